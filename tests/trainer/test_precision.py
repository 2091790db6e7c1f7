"""bf16 and fp16, as copies of fp32 masters, under autocast, or as the model was loaded, against plain `Trainer`."""

import contextlib
import io
from dataclasses import replace
from functools import partial
from math import isfinite

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import AutocastKwargs
from transformers import Trainer

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.planner import tensor_classes
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import PLAIN, Rows, Run, assert_close, assert_learned, make, record, seed_everything, train


LIMIT = 240.0
STAGES = (1, 2, 3)


def precision(feature: str, stages=STAGES):
    return pytest.mark.support(feature, area="Precision", stages=stages)


def _compare(run, *, losses: float, norms: float, first_is_equal: bool = False) -> tuple[Run, dict[int, Run]]:
    """Calls `run` with `PLAIN` and each stage: stages agree bit for bit, and with plain training within `losses` and
    `norms`."""
    plain, runs = run(PLAIN), {stage: run(stage) for stage in STAGES}
    for stage, found in runs.items():
        assert_learned(found, len(plain.losses))
        assert_equal(found, runs[1], f"stage {stage} and stage 1")
        assert found.losses == pytest.approx(plain.losses, rel=losses)
        assert found.norms == pytest.approx(plain.norms, rel=norms)
        assert not first_is_equal or found.losses[0] == plain.losses[0]
    return plain, runs


class Scaled(Trainer):
    """Trains as on a GPU with `--fp16`, which accelerate refuses on CPUs; in step 2 rank 1's gradients overflow."""

    autocasts = True

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.native_amp = True
        self.accelerator.autocast_handler = AutocastKwargs(enabled=self.autocasts)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        overflows = self.state.global_step == 2 and dist.get_rank() == 1
        return loss * float("inf") if overflows else loss


def _scaled(folder, kind, autocasts, compute_dtype=None, **settings):
    seed_everything()
    mixin_on = type("Scaled", (Scaled,), {"autocasts": autocasts})
    # not the fused one: Trainer's schedule does not see that it has skipped a step
    settings = {"optim": "adamw_torch", **settings}
    trainer = make(kind, folder, models.build("bert"), Rows("bert"), mixin_on=mixin_on, **settings)
    if kind != PLAIN:
        assert isinstance(trainer.accelerator.scaler, hf_zero.ZeroGradScaler)
        trainer.accelerator.zero_config = replace(trainer.accelerator.zero_config, compute_dtype=compute_dtype)
    trainer.train()
    return record(trainer), trainer.accelerator.scaler.get_scale()


@precision("Dynamic loss scale: an overflow on one rank skips step and schedule on all")
@ranks(2, timeout=LIMIT)
def test_an_overflow_on_one_rank_skips_the_step_and_the_schedule_everywhere(tmp_path):
    settings = {"max_steps": 6, "lr_scheduler_type": "linear"}
    plain, scale = _scaled(tmp_path, PLAIN, False, **settings)
    assert plain.rates[2] == plain.rates[3], f"the schedule waits for the step: {plain.rates}"
    assert scale == 2.0**9, "halved once, doubled twice"
    for stage in STAGES:
        run, own_scale = _scaled(tmp_path, stage, False, **settings)
        assert own_scale == scale, f"stage {stage}"
        assert not isfinite(run.norms.pop(2))
        assert_close(run, replace(plain, norms=[*plain.norms[:2], *plain.norms[3:]]), f"stage {stage} and Trainer")
        unclipped, own_scale = _scaled(tmp_path, stage, False, **settings, max_grad_norm=0.0)
        assert (unclipped.rates, own_scale) == (run.rates, scale)
    fused, own_scale = _scaled(tmp_path, 3, False, **settings, optim="adamw_torch_fused")
    assert (fused.rates, own_scale) == (plain.rates, scale)


@precision("fp16 copies of fp32 masters, with a loss scale")
@ranks(2, timeout=LIMIT)
def test_fp16_trains_as_autocast_does_to_fp16_rounding(tmp_path):
    # fp16 has 11 bits: losses of about ln(5) agree to 2^-10, norms to some of them; a weight moves by lr a step.
    plain, runs = _compare(
        lambda kind: _scaled(tmp_path, kind, True, torch.float16, max_steps=2)[0], losses=2e-3, norms=2e-2
    )
    for key, weight in runs[1].weights.items():
        assert weight.dtype is torch.float16
        assert (weight.float() - plain.weights[key]).abs().max() < 3e-3, key


@pytest.mark.quick
@precision("bf16 by autocast, as Trainer does it (`--zero_autocast`)")
@ranks(2, timeout=LIMIT)
def test_autocast_computes_what_trainer_computes(tmp_path):
    # The same casts of the same fp32 weights: the first loss is the same number; then sums over the ranks differ by
    # fp32 rounding, which can turn a later cast to the next bf16 number, 2^-8 of one factor in a sum of many.
    settings = {"bf16": True, "zero_autocast": True}
    plain, _ = _compare(
        lambda kind: train(kind, tmp_path, "llama", **settings), losses=1e-3, norms=5e-3, first_is_equal=True
    )
    assert plain.losses[0] != train(PLAIN, tmp_path, "llama").losses[0], "bf16 was to be used"


@precision("Models loaded in bf16: pure bf16, or fp32 masters with `--bf16`")
@pytest.mark.direct
@ranks(2, timeout=LIMIT)
def test_a_model_loaded_in_bf16_trains_in_it_or_with_fp32_masters(tmp_path):
    def run(kind):
        return train(kind, tmp_path, "llama", model=models.build("llama").to(torch.bfloat16))

    # DDP sums bf16 gradients in bf16, we in fp32: 2^-8 of a gradient, and as much of a weight in each step
    plain, runs = _compare(run, losses=1e-2, norms=3e-2)
    for key, weight in runs[1].weights.items():
        assert weight.dtype is torch.bfloat16
        bound = 4 * 2.0**-7 * plain.weights[key].abs().max() + 4e-3
        assert (weight - plain.weights[key]).abs().max() <= bound, key
    # with --bf16 the masters are fp32, begin with the bf16 values, and learn what bf16 cannot hold
    seed_everything()
    trainer = make(3, tmp_path, models.build("llama").to(torch.bfloat16), Rows("llama"), bf16=True, learning_rate=1e-6)
    trainer.train()
    fine = [shard.tensor for shard in engine_of(trainer.model).named_shards() if "mlp" in shard.name]
    assert all(values.dtype is torch.float32 for values in fine)
    assert any((values != values.bfloat16().float()).any() for values in fine)
    trainer.save_model()
    from safetensors.torch import load_file

    saved = load_file(f"{trainer.args.output_dir}/model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}, "in the dtype that it was loaded in"


def _mostly_frozen():
    """A bf16 model that is frozen, but for fp32 normalisations in every block and an fp32 head."""
    model = models.build("vit").to(torch.bfloat16).requires_grad_(False)
    for name, module in model.named_modules():
        if name.endswith("layernorm_before") or name == "classifier":
            module.float().requires_grad_(True)
    return model


@precision("Frozen bf16 beside trainable fp32, in one block")
@ranks(2, timeout=LIMIT)
def test_frozen_bf16_and_trainable_fp32_parameters_share_their_blocks(tmp_path):
    settings = {"bf16": True, "zero_autocast": True}
    plain, runs = _compare(
        lambda kind: train(kind, tmp_path, "vit", model=_mostly_frozen(), **settings),
        losses=1e-3,
        norms=5e-3,
        first_is_equal=True,
    )
    dtypes = {key: weight.dtype for key, weight in runs[1].weights.items()}
    assert dtypes == {key: weight.dtype for key, weight in plain.weights.items()}
    classes = {}
    trainer = make(3, tmp_path, _mostly_frozen(), Rows("vit"), **settings)
    trainer.train()
    for each in tensor_classes(engine_of(trainer.model), trainer._zero_optimizer):
        classes.setdefault(each.name, set()).add(each.dtype)
    assert classes["frozen parameters"] == {torch.bfloat16}
    assert classes["parameters"] == classes["optimizer state"] == {torch.float32}


@precision("`bf16_full_eval`, `fp16_full_eval`")
@pytest.mark.parametrize("flag", ["bf16_full_eval", "fp16_full_eval"])
@ranks(2, timeout=LIMIT)
def test_an_evaluation_in_half_precision_is_that_of_trainer_and_leaves_the_weights(tmp_path, flag):
    def run(kind, flag=flag):
        seed_everything()
        trainer = make(kind, tmp_path, models.build("llama"), Rows("llama"), parts={"eval_dataset": Rows("llama", 5)})
        if flag:
            setattr(trainer.args, flag, True)
        return trainer, trainer.evaluate()["eval_loss"]

    _, wanted = run(PLAIN)
    other, exact = run(3, flag=None)
    assert wanted != exact, "half precision was to be used"
    other.train()
    for stage in STAGES:
        trainer, loss = run(stage)
        assert loss == wanted, f"stage {stage}"
        trainer.train()  # plain Trainer would go on with what is left of the weights
        found, unrounded = (replace(record(each), evals=[]) for each in (trainer, other))
        assert_equal(found, unrounded, f"stage {stage}: trained after the evaluation")
        assert {weight.dtype for weight in found.weights.values()} == {torch.float32}


def _tells(folder, stage, settings):
    seed_everything()
    trainer = make(stage, folder, models.build("bert"), Rows("bert"), **settings)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer.train()
    lines = [line for line in said.getvalue().splitlines() if line.startswith(("hf_zero: stage", "  "))]
    assert bool(lines) == (dist.get_rank() == 0)
    told = {each.name: each for each in tensor_classes(engine_of(trainer.model), trainer._zero_optimizer)}
    report = trainer.memory_report()
    assert told["optimizer state"].nbytes == 8 * sum(run.param.numel() for run in trainer._zero_optimizer.slices)
    masters = told["masters"].nbytes if "masters" in told else 0
    # Adam's step counts are 4 bytes for each run of the optimizer, which no class lists
    counts = 4 * len(trainer._zero_optimizer.slices)
    assert masters + told["optimizer state"].nbytes + counts == report.optimizer_nbytes
    assert told["parameters"].nbytes == report.parameter_nbytes
    kept = sum(told[name].nbytes for name in ("gather buffers", "communication buffers") if name in told)
    # where they share memory, what gradients are collected in is kept as well
    if engine_of(trainer.model).comm.shared_memory is None:
        assert kept == report.buffer_nbytes
    return [" ".join(line.split()) for line in lines]


@precision("Memory log at the start: dtype and bytes per tensor class", stages=(1, 3))
def test_the_start_says_what_each_rank_holds_and_it_is_what_is_measured(tmp_path):
    tells = partial(run_ranks, _tells, 2, str(tmp_path), timeout=LIMIT)
    header, *lines = tells(1, {"bf16": True})[0]
    assert header == "hf_zero: stage 1 over 2 ranks; each holds, besides activations:"
    found = [line.split(" MiB")[0].rsplit(" ", 1)[0] for line in lines]
    assert found == [
        "parameters bfloat16",
        "masters float32",
        "gradients bfloat16",
        "reduced gradients float32",
        "optimizer state float32",
        "communication buffers",
    ], lines
    assert lines[1].endswith("sharded over 2 ranks") and lines[0].endswith("full copy")
    assert any(line.startswith("gradient buffers") for line in tells(3, {"zero_shared_memory": False})[0])
