"""`ZeroTrainer` trains as `Trainer` does under DDP, whatever is asked of it, and the stages do so bit for bit."""

import copy
import os
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import Trainer

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.engine.engine import BackwardPass, ZeroEngine
from hf_zero.errors import LifecycleError
from tests import models
from tests.compare import assert_equal, weights_of
from tests.distributed import ranks
from tests.tiers import more
from tests.trainer.harness import PLAIN, Rows, Stream, assert_close, compare, make, record, seed_everything, train


def _compare(folder, name, *, stages=(1, 3), steps=4, equal=None, **kwargs):
    return compare(lambda kind: train(kind, folder, name, **kwargs), stages=stages, steps=steps, equal=equal)


@pytest.mark.quick
@pytest.mark.parametrize("name, num_ranks", [("bert", 2), ("llama-tied", 2), ("bert", 1)])
@ranks("num_ranks", timeout=240)
def test_every_stage_trains_as_trainer_does(tmp_path, name, num_ranks):
    runs = _compare(tmp_path, name, stages=(0, 1, 2, 3))
    assert max(runs[PLAIN].norms) > 0.1, "clipping was to be active"


@ranks(1, timeout=240)
def test_one_strict_process_trains_as_trainer_does(tmp_path):
    os.environ["HF_ZERO_STRICT"] = "1"
    try:
        _compare(tmp_path, "llama-tied", stages=(0, 1, 2, 3))
    finally:
        del os.environ["HF_ZERO_STRICT"]


@ranks(2, timeout=240)
def test_a_loss_of_parameters_that_are_away_is_refused_by_name(tmp_path):
    """A loss of Trainer's users: at stage 3 the parameters of blocks are away when it is made."""

    class Penalised(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())

    for stage in (2, 3):
        trainer = make(stage, tmp_path, models.build("bert"), Rows("bert"), mixin_on=Penalised)
        if stage == 2:
            trainer.train()
            continue
        with pytest.raises(LifecycleError, match="is used .* while its values are sharded"):
            trainer.train()


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
def test_optimizers_by_name(tmp_path):
    for optim in ("adamw_torch", "rmsprop"):
        runs = _compare(tmp_path, "bert", stages=(3,), optim=optim)
        assert runs[PLAIN].losses[0] != runs[PLAIN].losses[1]


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
    from transformers import Trainer

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


@pytest.mark.support("bf16 copies of fp32 masters", area="Precision", stages=range(4))
@ranks(2, timeout=240)
def test_bf16_keeps_fp32_masters_and_is_bit_equal_at_all_stages(tmp_path):
    runs = {kind: train(kind, tmp_path, "llama", bf16=True) for kind in (0, 1, 2, 3, PLAIN)}
    for stage in (1, 2, 3):
        assert_equal(runs[stage], runs[0], f"bf16: stage {stage} and stage 0")
    # Trainer keeps fp32 weights and rounds to the 8 bits of bf16 inside autocast, we round the weights: losses of
    # ln(5) to ln(61) agree to about 2^-8, norms to some percent, and weights move by at most lr a step.
    plain = runs[PLAIN]
    assert runs[3].losses == pytest.approx(plain.losses, rel=1e-2)
    assert runs[3].norms == pytest.approx(plain.norms, rel=5e-2)
    exact = train(3, tmp_path, "llama")
    assert runs[3].losses != exact.losses, "bf16 was to be used"
    for key, weight in runs[3].weights.items():
        if weight.is_floating_point():
            assert (weight.float() - plain.weights[key]).abs().max() < 2e-2, key
    narrow = {kind: train(kind, tmp_path, "llama", bf16=True, zero_reduce_dtype="bf16") for kind in (1, 3)}
    assert_equal(narrow[3], narrow[1], "bf16 sums: stage 3 and stage 1")
    assert narrow[3].norms != runs[3].norms, "bf16 sums were to be used"


@ranks(2, timeout=240)
def test_bf16_learns_with_rates_that_bf16_weights_would_lose(tmp_path):
    settings = {"bf16": True, "learning_rate": 1e-6, "weight_decay": 0.0, "lr_scheduler_type": "constant"}
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    before = {shard.name: shard.tensor.clone() for shard in trainer.accelerator.shard(trainer.model).named_shards()}
    trainer.train()
    for shard in engine_of(trainer.model).named_shards():
        assert shard.tensor.dtype is torch.float32
        if shard.name == "bert.encoder.layer.0.attention.output.LayerNorm.weight":
            assert (shard.tensor != before[shard.name]).any(), "weights near 1 move by 1e-6 a step"
    assert weights_of(trainer.model)["classifier.weight"].dtype is torch.bfloat16


@ranks(2, timeout=240)
def test_the_memory_report_measures_what_a_rank_holds(tmp_path):
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"))
    before = trainer.memory_report()
    assert before.optimizer_nbytes == 0 and before.parameter_nbytes > 0
    trainer.train()
    report = trainer.memory_report()
    numel = sum(p.numel() for p in trainer.model.parameters())
    assert report.ddp_parameter_nbytes == 4 * numel
    assert report.ddp_optimizer_nbytes == 8 * numel
    # Half of everything, with padding: 16 elements at most after each parameter and at the end of each shard.
    padding = 4 * 2 * 16 * (len(list(trainer.model.parameters())) + len(engine_of(trainer.model).units))
    assert 4 * numel / 2 <= report.parameter_nbytes <= 4 * numel / 2 + padding
    assert report.gradient_nbytes == 0  # given back after the step
    assert 8 * numel / 2 <= report.optimizer_nbytes <= 8 * numel / 2 + 2 * padding


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


class Distiller(Trainer):
    """Trains the model to agree with a teacher of more layers, which gets gradients too, and which nobody updates."""

    teacher: nn.Module

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            target = self.teacher(**inputs).logits
        loss = nn.functional.mse_loss(outputs.logits, target) + 0.1 * nn.functional.mse_loss(
            self.teacher(**inputs).logits, outputs.logits.detach()
        )
        return (loss, outputs) if return_outputs else loss


@pytest.mark.support("A plain or sharded teacher beside a sharded student", area="Models in one process")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.full("more cases", after=1)
@ranks(2, timeout=240)
def test_a_student_learns_from_a_teacher_that_is_sharded_or_not(tmp_path, stage):
    teacher = models.llama(layers=5)
    teacher.model.embed_tokens.requires_grad_(False)

    def run(kind, teacher_stage=None):
        seed_everything()
        trainer = make(kind, tmp_path, models.build("llama"), Rows("llama"), mixin_on=Distiller)
        trainer.teacher = copy.deepcopy(teacher)
        if teacher_stage is not None:
            hf_zero.shard(trainer.teacher, stage=teacher_stage)
        trainer.train()
        return record(trainer)

    plain = run(PLAIN)
    assert_close(run(stage), plain, f"stage {stage} beside a plain teacher, and Trainer")
    assert_close(run(stage, teacher_stage=3), plain, f"stage {stage} beside a sharded teacher, and Trainer")
