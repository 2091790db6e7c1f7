"""`ZeroTrainer` trains as `Trainer` does under DDP, whatever is asked of it, and the stages do so bit for bit."""

from contextlib import nullcontext

import pytest
import torch
from transformers import Trainer

import hf_zero
from hf_zero.engine.engine import BackwardPass, ZeroEngine
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.tiers import more
from tests.trainer.harness import PLAIN, Rows, Stream, compare, make, record, train


def _compare(folder, name, *, stages=(1, 3), steps=4, equal=None, **kwargs):
    return compare(lambda kind: train(kind, folder, name, **kwargs), stages=stages, steps=steps, equal=equal)


@pytest.mark.quick
@pytest.mark.parametrize("name, num_ranks", [("bert", 2), ("llama-tied", 2), ("bert", 1)])
@ranks("num_ranks", timeout=240)
def test_every_stage_trains_as_trainer_does(tmp_path, name, num_ranks):
    runs = _compare(tmp_path, name, stages=(0, 1, 2, 3))
    assert max(runs[PLAIN].norms) > 0.1, "clipping was to be active"


@pytest.mark.quick
@ranks(2, timeout=240)
def test_accumulation_with_ragged_labels_and_a_short_last_window(tmp_path):
    accumulation = {"gradient_accumulation_steps": 3}
    _compare(tmp_path, "llama", stages=(0, 1, 2, 3), equal=((1, 0), (3, 2)), max_steps=2, steps=2, **accumulation)
    # 28 rows, 2 ranks of 2: 7 batches, so that the last window of the epoch has one batch instead of three
    short = {"data": Rows("llama", 28), "max_steps": -1, "num_train_epochs": 2, "steps": 6}
    _compare(tmp_path, "llama", equal=(), **accumulation, **short)
    # without num_items_in_batch: a classifier's mean over a batch, divided by the number of batches
    _compare(tmp_path, "bert", equal=(), **accumulation, data=Rows("bert", 28), max_steps=3, steps=3)


@ranks(2, timeout=240)
def test_iterable_data_without_a_length(tmp_path):
    for count in (64, 14):  # the second ends in the middle of an accumulation window, and is begun anew
        data = Stream(Rows("llama", count).rows)
        _compare(tmp_path, "llama", equal=(), data=data, gradient_accumulation_steps=2)


@ranks(2, timeout=240)
def test_clipping_and_schedules(tmp_path):
    _compare(tmp_path, "llama", max_grad_norm=0.0, lr_scheduler_type="cosine", warmup_steps=2)
    clipped = _compare(tmp_path, "bert", max_grad_norm=1e-3)
    free = train(3, tmp_path, "bert", max_grad_norm=0.0)
    assert clipped[3].losses[0] == free.losses[0] and clipped[3].norms[0] == free.norms[0], (
        "the norm is before clipping"
    )
    assert clipped[3].losses[2] != free.losses[2], "clipping was to matter"


@ranks(2, timeout=240)
def test_the_rate_falls_on_a_plateau_of_the_evaluation_loss(tmp_path):
    schedule = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},  # never good enough: the rate falls every time
        "eval_strategy": "steps",
        "eval_steps": 1,
        "parts": {"eval_dataset": Rows("bert", 6, seed=1)},
    }
    runs = _compare(tmp_path, "bert", **schedule)
    assert runs[3].rates[-1] < runs[3].rates[0], runs[3].rates


@ranks(2, timeout=240)
def test_a_users_own_optimizer_groups_and_scheduler(tmp_path):
    def run(kind):
        model = models.build("bert")
        head = [p for name, p in model.named_parameters() if "classifier" in name]
        body = [p for name, p in model.named_parameters() if "classifier" not in name]
        optimizer = torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": body, "momentum": 0.5}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        result = train(kind, tmp_path, model=model, parts={"optimizers": (optimizer, scheduler)})
        assert torch.allclose(
            torch.tensor([group["lr"] for group in optimizer.param_groups]), torch.tensor([1e-3, 1e-4])
        )
        return result

    runs = compare(run, stages=(1, 3))
    assert runs[3].rates == pytest.approx([0.1, 0.1, 0.01, 0.01])
    frozen = models.build("bert")
    foreign = torch.optim.SGD(models.build("bert").parameters(), lr=0.1)
    with pytest.raises(hf_zero.errors.ConfigError, match="belong to no prepared model"):
        train(3, tmp_path, model=frozen, parts={"optimizers": (foreign, None)})


@ranks(2, timeout=240)
def test_a_subclass_of_trainer_with_its_own_loss(tmp_path):

    class CustomTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.3)
            return (loss, outputs) if return_outputs else loss

    data = {"parts": {"eval_dataset": Rows("bert", 6)}, "eval_strategy": "steps", "eval_steps": 2}
    runs = _compare(tmp_path, "bert", mixin_on=CustomTrainer, **data)
    assert runs[3].losses[0] != train(3, tmp_path, "bert", **data).losses[0], "the override was to be used"
    assert len(runs[3].evals) == 2


@ranks(2, timeout=240)
def test_a_model_init_is_called_for_every_training(tmp_path):
    def run(kind):
        trainer = make(kind, tmp_path, None, Rows("bert"), parts={"model_init": lambda: models.build("bert", seed=3)})
        trainer.train()
        trainer.train()  # from the beginning, with a new model
        return record(trainer)

    compare(run, stages=(1, 3))


# Five micro-batches in an epoch, so a window of two, another one, and a short one.
WINDOWS = {"gradient_accumulation_steps": 2, "max_steps": 6}


@pytest.mark.parametrize("stage", [1, *more(0)])
@ranks(2, timeout=240)
def test_the_last_backward_reduces_also_in_a_short_window(tmp_path, stage):
    runs, num_early = {}, []
    finish = BackwardPass.finish

    def count(backward: BackwardPass) -> None:
        num_early.append(len(backward.num_coming) - len(backward._early))
        finish(backward)

    for tells in (False, True):
        num_early.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackwardPass, "finish", count)
            if not tells:
                patch.setattr(ZeroEngine, "reducing_this_backward", lambda *_: nullcontext())
            runs[tells] = train(stage, f"{tmp_path}/{tells}", "llama", data=Rows("llama", 20), **WINDOWS)
        early = [count > 0 for count in num_early]
        assert early == [False, tells, False, tells, tells] * 2, early
    assert_equal(runs[True], runs[False], "told")
