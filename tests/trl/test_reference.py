"""The models beside the one in training, references and rewards: sharded as it is, and never trained."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_zero.engine import engine_of
from tests.compare import assert_equal, weights_of
from tests.distributed import ranks
from tests.engine.reference import assert_away
from tests.trainer.harness import assert_close, assert_learned, compare, record, seed_everything
from tests.trl.harness import KINDS, PLAIN, data, make, policy


pytest.importorskip("trl")

LIMIT = 400.0


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.support("TRL: reference and reward models sharded, without gradients", area="Models in one process")
@ranks(2, timeout=LIMIT)
def test_reference_and_reward_models_are_sharded_and_frozen(folder, stage):
    """In bf16, where what is trained has a master of fp32, and what is not has none."""
    from hf_zero.trl.mixin import sync_reference

    parts = {"reward_funcs": f"{folder}/reward"}
    settings = {"bf16": True, "beta": 0.1, "num_generations": 2, "max_completion_length": 4, "max_steps": 2}
    trainer = make(stage, "GRPO", folder, f"{folder}/policy", data("prompt"), parts=parts, **settings)
    others = [trainer.ref_model, trainer.reward_funcs[0]]
    before = [weights_of(model) for model in others]
    trainer.train()
    assert engine_of(trainer.model).stage == stage
    for model, start in zip(others, before):
        engine = engine_of(model)
        assert engine.stage == stage and not engine.gradients
        flats = [flat for unit in engine.units for flat in unit.flats]
        assert not any(flat.has_copy for flat in flats)
        # of each parameter a rank may hold 16 elements more than its half, as padding
        share = 2 * (model.num_parameters() // 2 + 16 * len(start))
        assert stage < 3 or sum(flat.masters.values.nbytes for flat in flats) <= share
        assert_away(model, engine)
        assert all(torch.equal(weight, start[name]) for name, weight in weights_of(model).items())
    for alpha in (1.0, 0.3):
        sync_reference(trainer.model, trainer.ref_model, alpha)
        policy, reference = weights_of(trainer.model), weights_of(trainer.ref_model)
        assert all(torch.equal(reference[name], weight.to(reference[name].dtype)) for name, weight in policy.items())


@pytest.mark.full("slow")
@pytest.mark.support("TRL: DPOTrainer, reference given, evaluation", area="Trainers", stages=(1, 2, 3))
@ranks(2, timeout=LIMIT)
def test_a_reference_that_is_given_is_used_in_training_and_evaluation(folder):
    def run(kind):
        seed_everything()
        model = policy(folder)
        reference = policy(folder)
        with torch.no_grad():
            reference.lm_head.weight.mul_(1.5)
        parts = {"ref_model": reference, "eval_dataset": data("preference", 7, seed=9)}
        trainer = make(
            kind, "DPO", folder, model, data("preference"), parts=parts, eval_strategy="steps", eval_steps=1
        )
        trainer.train()
        return record(trainer)

    assert len(compare(run, steps=3, equal=())[PLAIN].evals) == 3


@pytest.mark.full("slow")
@pytest.mark.parametrize("name, rows", [("DPO", "preference"), ("KTO", "unpaired")])
@pytest.mark.support("TRL: {name}Trainer, precomputed reference", area="Trainers", stages=(1, 2, 3))
@ranks(2, timeout=LIMIT)
def test_what_the_reference_says_may_be_computed_beforehand(folder, name, rows):
    """TRL keeps what it computed in files beside the data, by the values of the model: the second run reads them, and
    another model does not."""
    from datasets import load_from_disk

    runs = {}
    for kind in KINDS:
        if dist.get_rank() == 0:
            data(rows).save_to_disk(f"{folder}/rows-{kind}")
        dist.barrier()
        for attempt in range(2):
            seed_everything()
            train = load_from_disk(f"{folder}/rows-{kind}")
            trainer = make(kind, name, folder, f"{folder}/policy", train, precompute_ref_log_probs=True)
            assert trainer.ref_model is None
            trainer.train()
            runs[kind, attempt] = record(trainer)
        column = "ref_chosen_logps" if name == "DPO" else "ref_logps"
        runs[kind, column] = torch.tensor(trainer.train_dataset[column])
        other = make(kind, name, folder, f"{folder}/teacher", train, precompute_ref_log_probs=True).train_dataset
        assert not torch.allclose(torch.tensor(other[column]), runs[kind, column], rtol=1e-3)
        torch.testing.assert_close(runs[kind, column], runs[1, column], rtol=1e-5, atol=1e-5)
    assert_learned(runs[PLAIN, 0], 3)
    for stage in (1, 2, 3):
        assert_close(runs[stage, 0], runs[PLAIN, 0], f"stage {stage} and under DDP")
        assert_equal(runs[stage, 1], runs[stage, 0], f"stage {stage}, read again")


@pytest.mark.full("slow")
@ranks(2, timeout=LIMIT)
def test_a_model_that_is_trained_in_rounds_is_its_own_reference_in_each(folder):
    """Each trainer takes the model as the one before has left it, which is what the reference says in its round."""
    from datasets import load_from_disk

    wanted, found = [], []
    for stage, logps in ((1, wanted), (3, found)):
        if dist.get_rank() == 0:
            data("preference").save_to_disk(f"{folder}/rows-{stage}")
        dist.barrier()
        seed_everything()
        model = policy(folder)
        for _ in range(3):
            settings = {"precompute_ref_log_probs": True, "learning_rate": 1e-2}
            trainer = make(stage, "DPO", folder, model, load_from_disk(f"{folder}/rows-{stage}"), **settings)
            logps.append(torch.tensor(trainer.train_dataset["ref_chosen_logps"]))
            trainer.train()
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-4, atol=1e-4)
    assert not any(torch.allclose(one, other, rtol=1e-2) for one, other in zip(wanted, wanted[1:]))


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.support("TRL: checkpoints, resuming, model card", area="Trainers")
@ranks(2, timeout=LIMIT)
def test_training_with_a_reference_that_follows_resumes_bit_for_bit(folder, stage):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    settings |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6, "learning_rate": 0.1}
    runs, said = [], []
    for resume in (None, f"{folder}/out/checkpoint-2"):
        seed_everything()
        trainer = make(stage, "DPO", folder, f"{folder}/policy", data("preference"), **settings)
        trainer.train(resume_from_checkpoint=resume)
        runs.append(record(trainer))
        said.append([(entry["num_tokens"], entry["rewards/margins"]) for entry in trainer.state.log_history[:-1]])
    assert_equal(*runs, f"stage {stage}: unbroken and resumed")
    assert said[0] == said[1], f"stage {stage}: {said}"
    if dist.get_rank() == 0:
        trainer.create_model_card(dataset_name="words")
        card = Path(folder, "out", "README.md").read_text()
        assert "words" in card and "dpo" in card and "trl" in card
        saved = type(trainer.model).from_pretrained(f"{folder}/out/checkpoint-4", dtype=torch.float32)
        assert all(torch.equal(p, runs[0].weights[name]) for name, p in saved.named_parameters())
