"""TRL's trainers with ZeRO train as they do under DDP: same losses, gradient norms and weights, to rounding."""

import pytest
import torch
import torch.distributed as dist

from hf_zero.engine import engine_of
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.trainer.harness import assert_learned, compare, record, seed_everything
from tests.trl.harness import data, make, policy, train


pytest.importorskip("trl")
pytest.importorskip("peft")

LIMIT = 400.0
LORA = {"learning_rate": 1e-2}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6, "max_steps": 4}
GENERATING = {"num_generations": 2, "max_completion_length": 6, "per_device_train_batch_size": 4, "beta": 0.1}
NO_SHARING = {**GENERATING, "zero_shared_memory": False}


def lora(**settings):
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], **settings)}


def named(folder):
    return f"{folder}/policy"


def adapted(folder):
    """A model with an adapter that is no longer what it was at first: TRL keeps a copy of it as the reference."""
    from peft import get_peft_model

    torch.manual_seed(3)
    return get_peft_model(policy(folder), lora(init_lora_weights=False)["peft_config"])


def variety(completions, **_) -> list[float]:
    """A reward function: how many unlike words there are."""
    return [float(len(set(completion.split()))) for completion in completions]


def judged(folder):
    return {"reward_funcs": variety}


def with_lora(folder):
    return lora()


def with_lora_and_reward(folder):
    return {**judged(folder), **lora()}


def taught(folder):
    from transformers import LlamaForCausalLM

    return {"teacher_model": LlamaForCausalLM.from_pretrained(f"{folder}/teacher", dtype=torch.float32)}


# The trainer, its data, what makes the model and other parts, and settings.
CASES = {
    "TRL: models by name, LoRA, read in ranges": ("SFT", "text", named, with_lora, LORA),
    "TRL: SFTTrainer": ("SFT", "text", policy, None, {"zero_chunked_loss": "on"}),
    "TRL: SFTTrainer, packing": ("SFT", "text", named, None, {"packing": True}),
    # with a reference, a reward model, and more than one step with what was generated
    "TRL: GRPOTrainer": (
        "GRPO",
        "prompt",
        named,
        lambda folder: {"reward_funcs": [variety, f"{folder}/reward"]},
        {**GENERATING, "num_iterations": 2},
    ),
    "TRL: SFTTrainer, loss of the assistant's turns": (
        "SFT",
        "chat",
        named,
        None,
        {"assistant_only_loss": True, "label_smoothing_factor": 0.1},
    ),
    "TRL: SFTTrainer, loss of completions (dft)": ("SFT", "completion", named, None, {"loss_type": "dft"}),
    "TRL: SFTTrainer, LoRA": ("SFT", "text", policy, with_lora, LORA),
    "TRL: DPOTrainer": ("DPO", "preference", policy, None, {"zero_chunked_loss": "on"}),
    "TRL: DPOTrainer, reference synchronized with the model": ("DPO", "preference", named, None, SYNC),
    "TRL: DPOTrainer, LoRA": ("DPO", "preference", named, with_lora, LORA),
    "TRL: DPOTrainer, trained adapter": ("DPO", "preference", adapted, None, LORA),
    "TRL: RewardTrainer": ("Reward", "preference", named, None, {}),
    "TRL: RewardTrainer, LoRA": (
        "Reward",
        "preference",
        named,
        lambda _: lora(task_type="SEQ_CLS", modules_to_save=["score"]),
        LORA,
    ),
    "TRL: KTOTrainer": ("KTO", "unpaired", named, None, {}),
    "TRL: GRPOTrainer, LoRA": ("GRPO", "prompt", named, with_lora_and_reward, {**GENERATING, **LORA}),
    "TRL: RLOOTrainer": ("RLOO", "prompt", named, judged, GENERATING),
    "TRL: DistillationTrainer": ("Distillation", "prompt", named, taught, {"max_completion_length": 6}),
}


@pytest.mark.quick(cases=1)
@pytest.mark.full("more cases", after=4)
@pytest.mark.parametrize("feature", CASES)
@pytest.mark.support("{feature}", area="Trainers", stages=(1, 2, 3))
@ranks(2, timeout=LIMIT)
def test_a_trainer_of_trl_trains_as_under_ddp(folder, feature):
    name, rows, model, parts, settings = CASES[feature]

    def run(kind):
        own = None if parts is None else parts(folder)
        found = train(kind, name, folder, model(folder), data(rows), parts=own, **settings)
        # losses of policy gradients are small differences of numbers near 1, which are what is rounded
        found.losses = [1.0 + loss for loss in found.losses]
        return found

    compare(run, steps=settings.get("max_steps", 3), equal=((3, 2),))


@pytest.mark.full("slow")
@ranks(2, timeout=LIMIT)
def test_steps_that_share_answers_are_resumed_in_the_midst(folder):
    """4 steps take what was generated once, and 8 all of the prompts. The checkpoint is in the midst of both, in the
    second epoch."""
    shared = {"steps_per_generation": 2, "num_iterations": 2}
    settings = {**GENERATING, **shared, "max_steps": 13, "save_strategy": "steps", "save_steps": 10}
    runs, answers = [], []
    for resume in (None, f"{folder}/out/checkpoint-10"):
        seed_everything()
        trainer = make(3, "GRPO", folder, named(folder), data("prompt", 16), parts=judged(folder), **settings)
        score = trainer._generate_and_score_completions

        def scored(inputs, score=score):
            answers.append([row["prompt"] for row in inputs])
            return score(inputs)

        trainer._generate_and_score_completions = scored
        trainer.train(resume_from_checkpoint=resume)
        runs.append(record(trainer))
    first, second, third, fourth, again_fourth = answers
    assert again_fourth == fourth != second and third != first, "the prompts of the second epoch, in its order"
    assert_learned(runs[0], 13)
    assert_equal(*runs, "unbroken and resumed")


def _lines(files):
    for file in files:
        for count in file:
            yield from data("text", count, seed=count)


@pytest.mark.support("TRL: SFTTrainer, streams", area="Trainers", stages=(3,))
@ranks(2, timeout=LIMIT)
def test_a_stream_of_files_of_unlike_lengths_trains_all_ranks_equally(folder):
    """11 rows in two files, as many as ranks, and in one: a step takes the same rows of both."""
    import datasets

    runs = []
    for files in ([[3], [8]], [[3, 8]]):
        stream = datasets.IterableDataset.from_generator(_lines, gen_kwargs={"files": files})
        runs.append(train(3, "SFT", folder, named(folder), stream, max_steps=5))
    assert_learned(runs[0], 5)
    assert_equal(*runs, "two files and one")


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "Distillation"])
@pytest.mark.full("more cases", after=1)
@pytest.mark.support("TRL: generation with gathered weights", area="Generation", stages=(3,))
@ranks(2, timeout=LIMIT)
def test_trainers_generate_without_communication_and_unlike_often(folder, name):
    """As often as its answers ask for tools: here one rank twice, and one once."""
    seed_everything()
    parts, settings = judged(folder), NO_SHARING
    if name == "Distillation":
        parts, settings = taught(folder), {"max_completion_length": 6, "zero_shared_memory": False}
    trainer = make(3, name, folder, named(folder), data("prompt"), parts=parts, **settings)
    sent, generate, turn = [], trainer.model.generate, trainer._generate_single_turn

    def recorded(**inputs):
        counters = engine_of(trainer.model).comm.counters
        before = counters.total_sent_nbytes
        out = generate(**inputs)
        sent.append(counters.total_sent_nbytes - before)
        return out

    def turns(*args, **kwargs):
        return [turn(*args, **kwargs) for _ in range(1 + dist.get_rank())][0]

    trainer.model.generate, trainer._generate_single_turn = recorded, turns
    trainer.train()
    assert sent == [0, 0, 0] * (1 + dist.get_rank())
    ids = torch.ones(2, 3, dtype=torch.long)
    recorded(input_ids=ids, max_new_tokens=2 + 3 * dist.get_rank())
    assert sent[-1] > 0, "outside of the trainer it does gather"
