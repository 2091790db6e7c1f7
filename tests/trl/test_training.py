"""TRL's trainers with ZeRO train as they do under DDP: same losses, gradient norms and weights, to rounding."""

import pytest
import torch
import torch.distributed as dist

from hf_zero.engine import engine_of
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import assert_close, assert_equal, assert_learned, record, seed_everything
from tests.trl.harness import KINDS, PLAIN, data, make, policy, save_models, train


pytest.importorskip("trl")
pytest.importorskip("peft")

LIMIT = 400.0
LORA = {"learning_rate": 1e-2}
CHUNKED = {"zero_chunked_loss": "on"}
GENERATING = {"num_generations": 2, "max_completion_length": 6, "per_device_train_batch_size": 4, "beta": 0.1}
NO_SHARING = {**GENERATING, "zero_shared_memory": False}


def lora(**settings):
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], **settings)}


def loaded(folder):
    return policy(folder)


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


def scored(folder):
    return {"reward_funcs": [variety, f"{folder}/reward"]}


def judged(folder):
    return {"reward_funcs": variety}


def with_lora(folder):
    return lora()


def with_lora_and_reward(folder):
    return {**judged(folder), **lora()}


def with_lora_and_head(folder):
    return lora(task_type="SEQ_CLS", modules_to_save=["score"])


def taught(folder):
    from transformers import LlamaForCausalLM

    return {"teacher_model": LlamaForCausalLM.from_pretrained(f"{folder}/teacher", dtype=torch.float32)}


def nothing(folder):
    return {}


def _matches(folder, name, rows, model, parts, settings):
    """Each kind of training, from the same start and with the same data."""
    if dist.get_rank() == 0:
        save_models(folder)
    dist.barrier()
    runs = {
        kind: train(kind, name, folder, model(folder), data(rows), parts=parts(folder), **settings) for kind in KINDS
    }
    assert_learned(runs[PLAIN], len(runs[PLAIN].losses))
    for run in runs.values():
        # losses of policy gradients are small differences of numbers near 1, which are what is rounded
        run.losses = [1.0 + loss for loss in run.losses]
    for stage in (1, 2, 3):
        assert_close(runs[stage], runs[PLAIN], f"{name} at stage {stage} and under DDP")
    if "zero_chunked_loss" in settings:
        assert_equal(runs[2], runs[3], f"{name} at stages 2 and 3")


CASES = [
    pytest.param("TRL: SFTTrainer", "SFT", "text", loaded, nothing, CHUNKED, id="sft"),
    pytest.param("TRL: SFTTrainer, packing", "SFT", "text", named, nothing, {"packing": True}, id="sft-packing"),
    pytest.param(
        "TRL: SFTTrainer, loss of the assistant's turns",
        "SFT",
        "chat",
        named,
        nothing,
        {"assistant_only_loss": True, "label_smoothing_factor": 0.1},
        id="sft-chat",
    ),
    pytest.param(
        "TRL: SFTTrainer, loss of completions (dft)",
        "SFT",
        "completion",
        named,
        nothing,
        {"loss_type": "dft", **CHUNKED},
        id="sft-completion",
    ),
    pytest.param("TRL: SFTTrainer, LoRA", "SFT", "text", loaded, with_lora, LORA, id="sft-lora"),
    pytest.param("TRL: DPOTrainer", "DPO", "preference", loaded, nothing, CHUNKED, id="dpo"),
    pytest.param(
        "TRL: DPOTrainer, reference synchronized with the model",
        "DPO",
        "preference",
        named,
        nothing,
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6, "max_steps": 4},
        id="dpo-sync",
    ),
    pytest.param("TRL: DPOTrainer, LoRA", "DPO", "preference", named, with_lora, {**LORA, **CHUNKED}, id="dpo-lora"),
    pytest.param("TRL: DPOTrainer, trained adapter", "DPO", "preference", adapted, nothing, LORA, id="dpo-adapted"),
    pytest.param("TRL: RewardTrainer", "Reward", "preference", named, nothing, {}, id="reward"),
    pytest.param(
        "TRL: RewardTrainer, LoRA", "Reward", "preference", named, with_lora_and_head, LORA, id="reward-lora"
    ),
    pytest.param("TRL: KTOTrainer", "KTO", "unpaired", named, nothing, CHUNKED, id="kto"),
    pytest.param(
        "TRL: GRPOTrainer, LoRA", "GRPO", "prompt", named, with_lora_and_reward, {**GENERATING, **LORA}, id="grpo-lora"
    ),
    pytest.param("TRL: RLOOTrainer", "RLOO", "prompt", named, judged, {**GENERATING, **CHUNKED}, id="rloo"),
    pytest.param(
        "TRL: DistillationTrainer",
        "Distillation",
        "prompt",
        named,
        taught,
        {"max_completion_length": 6},
        id="distillation",
    ),
]


@pytest.mark.full("more cases", after=2)
@pytest.mark.parametrize("feature, name, rows, model, parts, settings", CASES)
@pytest.mark.support("{feature}", area="Trainers", stages=(1, 2, 3))
def test_a_trainer_of_trl_trains_as_under_ddp(tmp_path, feature, name, rows, model, parts, settings):
    run_ranks(_matches, 2, str(tmp_path), name, rows, model, parts, settings, timeout=LIMIT)


@pytest.mark.quick
@pytest.mark.support("TRL: models by name, LoRA, read in ranges", area="Trainers", stages=(1, 2, 3))
def test_a_model_that_is_named_is_adapted_before_it_is_read(tmp_path):
    run_ranks(_matches, 2, str(tmp_path), "SFT", "text", named, with_lora, LORA, timeout=LIMIT)


@pytest.mark.support("TRL: GRPOTrainer", area="Trainers", stages=(1, 2, 3))
def test_grpo_trains_as_under_ddp(tmp_path):
    """With a reference, a reward model, and more than one step with what was generated."""
    settings = {**GENERATING, "num_iterations": 2}
    run_ranks(_matches, 2, str(tmp_path), "GRPO", "prompt", named, scored, settings, timeout=LIMIT)


def _resumes_between_steps_that_share_answers(folder):
    """4 steps take what was generated once, and 8 all of the prompts. The checkpoint is in the midst of both, in the
    second epoch."""
    if dist.get_rank() == 0:
        save_models(folder)
    dist.barrier()
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


@pytest.mark.full("slow")
def test_steps_that_share_answers_are_resumed_in_the_midst(tmp_path):
    run_ranks(_resumes_between_steps_that_share_answers, 2, str(tmp_path), timeout=LIMIT)


def _lines(files):
    for file in files:
        for count in file:
            yield from data("text", count, seed=count)


@pytest.mark.support("TRL: SFTTrainer, streams", area="Trainers", stages=(3,))
@ranks(2, timeout=LIMIT)
def test_a_stream_of_files_of_unlike_lengths_trains_all_ranks_equally(tmp_path):
    """11 rows in two files, as many as ranks, and in one: a step takes the same rows of both."""
    import datasets

    if dist.get_rank() == 0:
        save_models(tmp_path)
    dist.barrier()
    runs = []
    for files in ([[3], [8]], [[3, 8]]):
        stream = datasets.IterableDataset.from_generator(_lines, gen_kwargs={"files": files})
        runs.append(train(3, "SFT", tmp_path, named(tmp_path), stream, max_steps=5))
    assert_learned(runs[0], 5)
    assert_equal(*runs, "two files and one")


def _generates_gathered(folder, name):
    """As often as its answers ask for tools: here one rank twice, and one once."""
    if dist.get_rank() == 0:
        save_models(folder)
    dist.barrier()
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


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "Distillation"])
@pytest.mark.full("more cases", after=1)
@pytest.mark.support("TRL: generation with gathered weights", area="Generation", stages=(3,))
def test_trainers_generate_without_communication_and_unlike_often(tmp_path, name):
    run_ranks(_generates_gathered, 2, str(tmp_path), name, timeout=LIMIT)
