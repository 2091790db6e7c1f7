"""`--optim` under `ZeroTrainer` against Trainer's under DDP."""

from importlib.util import find_spec

import pytest
import torch

import hf_zero
from tests import models
from tests.compare import assert_equal, weights_of
from tests.distributed import ranks, run_ranks
from tests.optim import kinds
from tests.tiers import in_core
from tests.trainer.harness import PLAIN, Rows, assert_close, compare, make, train


# by `--optim`: the feature, and what else to set. Where the state is of few bits, clipping measures only: its factor
# differs from torch's by a rounding error.
OPTIMS = {
    "adafactor": ("Adafactor", {}),
    "adamw_torch_8bit": ("8-bit AdamW (torchao)", {"max_grad_norm": 1e9}),
    "adamw_bnb_8bit": ("8-bit AdamW (bitsandbytes)", {"max_grad_norm": 1e9}),
    "ademamix": ("AdEMAMix (bitsandbytes)", {}),
    "ademamix_8bit": ("8-bit AdEMAMix (bitsandbytes)", {"max_grad_norm": 1e9}),
    "schedule_free_adamw": ("Schedule-free AdamW", {"eval_strategy": "steps", "eval_steps": 2, "warmup_steps": 2}),
    "schedule_free_sgd": ("Schedule-free SGD", {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.05}),
}


def _forget_overrides() -> None:
    """bitsandbytes' settings for single parameters outlive their trainer."""
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


def _run(stage, folder, optim: str):
    feature, settings = OPTIMS[optim]
    if "bnb" in optim or "8bit" in optim:
        _forget_overrides()
    torch.manual_seed(0)
    parts = {"eval_dataset": Rows("llama", count=6, seed=1)} if "eval_strategy" in settings else None
    with kinds.eager():
        return train(
            stage,
            f"{folder}/{stage}",
            data=Rows("llama"),
            model=kinds.model_for(feature),
            optim=optim,
            parts=parts,
            **settings,
        )


@pytest.mark.quick
@pytest.mark.support("--optim {optim}", area="Optimizers", stages=(1, 2, 3))
@pytest.mark.parametrize("optim", in_core(["adafactor"], OPTIMS))
def test_optim_trains_as_in_trainer(tmp_path, optim):
    kinds.skip_without(OPTIMS[optim][0])
    run_ranks(_like_trainer, 2, str(tmp_path), optim, timeout=300)


def _like_trainer(folder: str, optim: str) -> None:
    compare(lambda stage: _run(stage, folder, optim), equal=())


@pytest.mark.support("Muon in Trainer", area="Optimizers", stages=(1, 3))
@ranks(2, timeout=300)
def test_muon_trains_as_in_trainer(tmp_path):
    """A factory, as Trainer takes one for optimizers that divide the parameters."""
    settings = {"lr": 1e-3, "adamw": {"eps": 1e-4}}
    parts = {"optimizer_cls_and_kwargs": (hf_zero.MuonWithAdamW, settings)}
    with kinds.precise_muon():
        compare(lambda stage: train(stage, f"{tmp_path}/{stage}", "llama", parts=parts), stages=(1, 3), equal=())


@ranks(2, timeout=300)
def test_hooks_of_an_optimizer_see_the_steps_of_the_training_alone(tmp_path):
    """State is also made where nothing is updated: to know its size before the first step, and to be loaded into."""
    for stage in (PLAIN, 3):
        for resume, num_steps in ((None, 4), (f"{tmp_path}/{stage}/checkpoint-2", 2)):
            model, seen = models.build("llama"), []
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
            optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
            parts = {"optimizers": (optimizer, None)}
            train(stage, f"{tmp_path}/{stage}", "llama", model=model, parts=parts, resume=resume, **SAVES)
            assert seen == ["before", "after"] * num_steps, f"{stage}: {seen}"


SAVES = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}


needs_schedule_free = pytest.mark.skipif(
    find_spec("schedulefree") is None, reason="has the optimizer; install the extra `test`"
)


@needs_schedule_free
@pytest.mark.support("Schedule-free: saving and resuming", area="Optimizers", stages=(3,))
@ranks(2, timeout=300)
def test_schedule_free_saves_the_averaged_weights_and_resumes(tmp_path):
    """What is saved are the averaged weights, those that evaluation sees; and training resumes from them."""
    settings = {"optim": "schedule_free_adamw", "warmup_steps": 2, **SAVES}
    trainer = make(3, f"{tmp_path}/whole", models.build("llama"), Rows("llama"), **settings)
    trainer.train()
    trained = weights_of(trainer.model)
    trainer.evaluate(Rows("llama", count=4, seed=1))
    averaged = weights_of(trainer.model)
    saved = type(trainer.model).from_pretrained(f"{tmp_path}/whole/checkpoint-4")
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, averaged[name]), name
        assert torch.equal(trained[name], averaged[name]), "the last step was saved: it is averaged"

    unbroken = train(3, f"{tmp_path}/unbroken", "llama", **settings)
    resumed = train(3, f"{tmp_path}/unbroken", "llama", resume=f"{tmp_path}/unbroken/checkpoint-2", **settings)
    assert_equal(resumed, unbroken, "resumed and unbroken")


@needs_schedule_free
@ranks(2, timeout=240)
def test_schedule_free_weights_are_the_averaged_ones_in_half_precision_too(tmp_path):
    settings = {"optim": "schedule_free_adamw", "learning_rate": 3e-2, "max_grad_norm": 0.0, "max_steps": 6}
    for stage in (1, 3):
        torch.manual_seed(0)
        parts = {"eval_dataset": Rows("llama", 6)}
        trainer = make(stage, tmp_path, models.build("llama"), Rows("llama"), parts=parts, **settings)
        trainer.train()
        trainer._zero_optimizer.train()  # the weights at which gradients are taken
        trainer.args.bf16_full_eval = True
        half = trainer.evaluate()["eval_loss"]
        trainer.args.bf16_full_eval = False
        assert half == pytest.approx(trainer.evaluate()["eval_loss"], rel=5e-3), f"stage {stage}"


@pytest.mark.full("slow")
@ranks(2, timeout=300)
def test_adafactor_goes_on_from_a_checkpoint_of_trainer(tmp_path):
    """A checkpoint of plain Trainer, whose Adafactor state has the shapes of rows and columns."""
    settings = {"optim": "adafactor", "save_strategy": "steps", "save_steps": 2}
    plain = train(PLAIN, f"{tmp_path}/plain", "llama", **settings)
    zero = train(3, f"{tmp_path}/zero", "llama", resume=f"{tmp_path}/plain/checkpoint-2", **settings)
    assert_close(zero, plain, "ZeroTrainer from Trainer's checkpoint, and Trainer")
