"""`ZeroAccelerator` in scripts of the usual shape: it trains what DDP trains, and says in a line what cannot work."""

import os
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader

import hf_zero
from hf_zero import ZeroAccelerator
from hf_zero.config import ZeroConfig
from hf_zero.engine import engine_of, guards
from hf_zero.errors import ConfigError, LifecycleError
from tests import models, training
from tests.accelerator import example
from tests.compare import weights_of
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import reset_accelerate


@pytest.mark.quick
@ranks(2, timeout=240)
def test_a_script_for_accelerate_trains_as_it_does_under_ddp():
    stages = (0, 1, 2, 3)
    wanted, wanted_answers, wanted_rates, _ = example.train(example.with_ddp())
    assert min(wanted.values()) < 0.95 * wanted[0] and wanted_answers[1] == example.NUM_EVAL_ROWS
    for stage in stages:
        losses, answers, rates, model = example.train(example.with_zero(stage))
        assert losses == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert (answers, rates) == (wanted_answers, wanted_rates)
        assert engine_of(model).stage == stage


@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_accumulation_and_clipping_are_those_of_ddp(stage):
    """Losses and norms with accelerate's own accumulation, and clipping."""
    found = []
    for accelerator in (
        example.with_ddp(gradient_accumulation_steps=2),
        example.with_zero(stage, gradient_accumulation_steps=2),
    ):
        torch.manual_seed(0)
        model = example.bert()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        loader = DataLoader(example.rows(24, 0), collate_fn=example.collate, batch_size=2)
        model, loader, optimizer = accelerator.prepare(model, loader, optimizer)
        losses, norms = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, norms))
    assert len(found[0][1]) == 3
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    step = accelerator.last_step
    assert step.loss.item() == pytest.approx(sum(losses[-2:]) / 2) and step.grad_norm.item() == norms[-1]


class Normed(nn.Module):
    """Statistics of the batches that a rank has seen, and a count that its output depends on."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("total", torch.tensor(1.0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("own", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.total += x.detach().abs().sum()
        self.own += dist.get_rank()
        return self.head(self.norm(x)) / self.total


@pytest.mark.parametrize("broadcasts", [True, False])
@ranks(2)
def test_buffers_that_forwards_write_are_those_of_ddp(broadcasts):
    found = []
    for make in (example.with_ddp, *(partial(example.with_zero, stage) for stage in (0, 1, 3))):
        accelerator = make(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=broadcasts)])
        torch.manual_seed(0)
        model = Normed()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            losses.append(model(torch.randn(6, 4)).pow(2).mean())
            if step < 3:  # DDP has them the same when the next forward begins
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
        named = accelerator.unwrap_model(model).named_buffers()
        found.append((torch.stack(losses).detach(), {name: buffer.double() for name, buffer in named}))
    for losses, written in found[1:]:
        torch.testing.assert_close(losses, found[0][0])
        assert written.pop("own").tolist() == [4 * dist.get_rank()] * 2
        for name, buffer in written.items():
            torch.testing.assert_close(buffer, found[0][1][name], msg=name)


def _prepared(stage=3, model=None, **settings):
    accelerator = example.with_zero(stage, **settings)
    torch.manual_seed(0)
    model = model if model is not None else example.bert()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@ranks(2)
def test_the_order_within_a_call_does_not_count_and_what_is_prepared_stays():
    accelerator, model = example.with_zero(), example.bert()
    plain = torch.optim.AdamW(model.parameters())
    optimizer, loader, same = accelerator.prepare(plain, DataLoader([1, 2]), model)
    assert same is model and type(optimizer).__name__ == "ZeroAcceleratedOptimizer" and len(loader) == 1
    assert accelerator.prepare(model) is model and accelerator.prepare(plain) is optimizer
    assert accelerator.prepare(optimizer) is optimizer
    assert len(accelerator._models) == len(accelerator._optimizers) == 1

    accelerator, model = example.with_zero(), example.bert()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    assert engine_of(model) is optimizer.optimizer.engine


@ranks(2)
def test_the_state_dict_of_a_prepared_optimizer_answers():
    accelerator, model, optimizer = _prepared()
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-2 and not optimizer.state_dict()["state"]
    batch = example.collate(example.rows(4, dist.get_rank()))
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    before = optimizer.state_dict()
    assert before["state"]
    optimizer.load_state_dict(before)
    after = optimizer.state_dict()
    assert all(torch.equal(after["state"][0][key], value) for key, value in before["state"][0].items())

    model = example.bert()  # accelerate itself asks when it is given one of ours
    sharded = hf_zero.ShardedOptimizer(hf_zero.shard(model), torch.optim.AdamW, lr=1e-3)
    assert example.with_ddp().prepare(sharded).param_groups is sharded.param_groups


def _refuses_orders():
    accelerator, model = example.with_zero(), example.bert()
    with pytest.raises(ConfigError, match="AdamW: the parameters belong to no prepared model; prepare the model"):
        accelerator.prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="belong to no prepared model"):
        accelerator.prepare(model, torch.optim.AdamW(example.bert().parameters()))
    params = list(model.parameters())
    first = accelerator.prepare(torch.optim.AdamW(params[:4]))
    with pytest.raises(ConfigError, match="SGD: BertForSequenceClassification already has an optimizer; prepare one"):
        accelerator.prepare(torch.optim.SGD(params[4:]))
    assert accelerator._optimizers == [first]
    with pytest.raises(ConfigError, match="is not a parameter of the model"):
        other = example.bert()
        accelerator.prepare(other, torch.optim.AdamW([*other.parameters(), nn.Parameter(torch.ones(3))]))
    with pytest.raises(ConfigError, match="already sharded with stage 3, but the accelerator has 2"):
        example.with_zero(2).prepare(model)
    with pytest.raises(
        ConfigError, match="already sharded with sequence_parallel 1, but the accelerator has 2; use the same seq"
    ):
        example.with_zero(3, zero_sequence_parallel=2).prepare(model)
    with pytest.raises(
        ConfigError, match="already sharded with nonfinite stop, but the accelerator has skip; use the same"
    ):
        example.with_zero(3, zero_nonfinite="skip").prepare(model)


def _refuses_losses():
    accelerator, model, optimizer = _prepared()
    batch = example.collate(example.rows(4, 0))
    loss = model(**batch).loss
    with pytest.raises(LifecycleError, match="is used .* while its values are sharded"):
        accelerator.backward(loss + 0.01 * sum(p.norm() for p in model.parameters()))
    del loss
    accelerator.backward(model(**batch).loss)
    with pytest.raises(ConfigError, match="clip_grad_norm_: got 2 trainable parameters, but Bert.* has 57"):
        accelerator.clip_grad_norm_(model.classifier.parameters(), 1.0)
    both = example.bert()
    accelerator.prepare(both)
    with pytest.raises(ConfigError, match="clip_grad_value_: got 114 trainable parameters"):
        accelerator.clip_grad_value_([*model.parameters(), *both.parameters()], 1.0)
    with pytest.raises(ConfigError, match="clip_grad_norm_: no optimizer of Bert.* is prepared"):
        accelerator.clip_grad_norm_(both.parameters(), 1.0)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    optimizer.step()


@pytest.mark.parametrize("act", [_refuses_orders, _refuses_losses])
def test_what_cannot_work_is_one_line(act):
    run_ranks(act, 2)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"zero_stage": 4}, "stage: 4 is not one of"),
        ({"zero_stage": "3"}, "stage: '3' is of type str; give 0, 1, 2 or 3"),
        ({"zero_prefetch_units": 1.5}, "prefetch_units: 1.5 is of type float; give a whole number"),
        ({"zero_shared_memory": "false"}, "shared_memory: 'false' is of type str; give True or False"),
        ({"zero_offlod": "optimizer"}, "'zero_offlod' is not one of .*; the nearest is 'zero_offload'"),
        ({"zero_offload": "disk"}, "offload: 'disk' is not one of"),
        ({"mixed_precision": "fp16"}, "mixed_precision: this process trains on the CPU"),
        ({"fsdp_plugin": object}, "^fsdp_plugin: cannot be combined with hf_zero"),
        (
            {"kwargs_handlers": lambda: [DistributedDataParallelKwargs(comm_hook="fp16")]},
            "comm_hook: .* requires DDP",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message, monkeypatch):
    reset_accelerate()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        ZeroAccelerator(cpu=True, **settings)
    reset_accelerate()


def test_another_way_to_shard_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP: cannot be combined with hf_zero"):
        ZeroAccelerator()


@ranks(2)
def test_mixed_precision_makes_compute_copies_of_masters_or_casts_at_each_use():
    accelerator, model, optimizer = _prepared(mixed_precision="bf16")
    batch = example.collate(example.rows(4, dist.get_rank()))
    output = model(**batch)
    assert next(model.parameters()).dtype is torch.bfloat16 and output.logits.dtype is torch.float32
    accelerator.backward(output.loss)
    optimizer.step()
    assert all(shard.tensor.dtype is torch.float32 for shard in engine_of(model).named_shards())

    accelerator, model, _ = _prepared(mixed_precision="bf16", zero_autocast=True, zero_reduce_dtype=torch.bfloat16)
    assert next(model.parameters()).dtype is torch.float32
    assert engine_of(model).config.reduce_dtype is torch.bfloat16
    assert accelerator.get_state_dict(nn.Linear(2, 2)).keys() == {"weight", "bias"}


@ranks(2)
def test_a_schedule_stands_still_for_its_own_optimizer_alone():
    accelerator = example.with_zero(zero_nonfinite="skip")
    built = {name: models.build(name) for name in ("mlp", "llama")}
    plain = {name: torch.optim.SGD(model.parameters(), lr=1.0) for name, model in built.items()}
    schedules = {name: torch.optim.lr_scheduler.ExponentialLR(plain[name], 0.5) for name in built}
    accelerator.prepare(*built.values())
    optimizers = {name: accelerator.prepare(optimizer) for name, optimizer in plain.items()}
    schedules = {name: accelerator.prepare(schedule) for name, schedule in schedules.items()}
    for name, model in built.items():
        output = model(**models.batch(name, seed=0))
        loss = output.loss if hasattr(output, "loss") else output.square().mean()
        accelerator.backward(loss * (float("inf") if name == "mlp" else 1.0))
        optimizers[name].step()
        optimizers[name].zero_grad()
    for schedule in schedules.values():
        schedule.step()
    rates = {name: schedule.get_last_lr() for name, schedule in schedules.items()}
    assert rates == {"mlp": [1.0], "llama": [0.25]}  # accelerate steps it once for each rank


@pytest.mark.parametrize("stage, precision", [(1, "no"), (3, "no"), (3, "bf16")])
@ranks(2)
def test_whole_weights_are_written_in_every_way_of_accelerates_examples(tmp_path, stage, precision):
    from transformers import BertForSequenceClassification

    accelerator, model, _ = _prepared(stage, mixed_precision=precision)
    whole = accelerator.get_state_dict(model)
    assert bool(whole) == accelerator.is_main_process
    torch.manual_seed(0)
    drawn = example.bert().state_dict()  # in fp32
    assert all(torch.equal(value, drawn[name]) for name, value in whole.items())
    unwrapped, is_main = accelerator.unwrap_model(model), accelerator.is_main_process
    unwrapped.save_pretrained(f"{tmp_path}/plain", is_main_process=is_main, save_function=accelerator.save)
    state = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(f"{tmp_path}/given", is_main_process=is_main, state_dict=state)
    accelerator.save_model(model, f"{tmp_path}/model", max_shard_size="20KB")
    accelerator.save_state(f"{tmp_path}/state")
    accelerator.wait_for_everyone()
    for name in ("plain", "given", "model", "state") if is_main else ():
        # transformers notes the dtype of the parameters that the model shows
        loaded = BertForSequenceClassification.from_pretrained(f"{tmp_path}/{name}", dtype=torch.float32).state_dict()
        assert loaded.keys() == whole.keys() and all(torch.equal(loaded[key], whole[key]) for key in whole), name
    if is_main:
        assert len([name for name in os.listdir(f"{tmp_path}/model") if name.endswith(".safetensors")]) > 1
    with pytest.raises(ConfigError, match="safe_serialization: only safetensors"):
        accelerator.save_model(model, f"{tmp_path}/pickled", safe_serialization=False)
    accelerator.save_model(plain := nn.Linear(2, 2), f"{tmp_path}/never prepared")
    accelerator.wait_for_everyone()
    assert engine_of(plain) is None and os.listdir(f"{tmp_path}/never prepared") == ["model.safetensors"]
    if stage == 3:
        with pytest.raises(LifecycleError, match=re.escape("call it on all ranks with is_main_process=")):
            unwrapped.save_pretrained(f"{tmp_path}/alone")
        with pytest.raises(ConfigError, match="save_pretrained: variant is not supported while .* also pass state_d"):
            unwrapped.save_pretrained(f"{tmp_path}/variant", is_main_process=is_main, variant="new")
    else:
        unwrapped.save_pretrained(f"{tmp_path}/alone{dist.get_rank()}")
    before = type(model).save_pretrained
    assert hf_zero.ShardedModel(model).unshard().save_pretrained.__func__ is before


def test_no_whole_state_dict_is_made_of_values_that_a_broken_step_has_left(tmp_path):
    accelerator, model, optimizer = _prepared(stage=1)
    engine = engine_of(model)
    with pytest.raises(KeyboardInterrupt), guards.noting_torn(engine, "an optimizer step"):
        raise KeyboardInterrupt
    with pytest.raises(LifecycleError, match="an optimizer step broke off"):
        accelerator.get_state_dict(model)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2, timeout=60)
def test_where_the_parameters_are_whole_one_rank_may_save_them(tmp_path, stage):
    """Nothing here may be collective: rank 0 alone calls it."""
    from peft import LoraConfig, get_peft_model

    for name, model in (
        ("plain", example.bert()),
        ("adapter", get_peft_model(example.bert(), LoraConfig(task_type="SEQ_CLS", r=2))),
    ):
        accelerator, model, _ = _prepared(stage, model)
        with hf_zero.gathered(model):
            if accelerator.is_main_process:
                model.save_pretrained(f"{tmp_path}/{name}", is_main_process=True)
    if stage == 2 and accelerator.is_main_process:
        model.save_pretrained(f"{tmp_path}/not gathered", is_main_process=True)
    dist.barrier()
    for name, file in {"plain": "model.safetensors", "adapter": "adapter_model.safetensors"}.items():
        assert (tmp_path / name / file).exists()


@ranks(2)
def test_a_model_that_is_only_evaluated_may_be_sharded_at_another_stage():
    judge = example.bert()
    engine = engine_of(hf_zero.shard(judge, stage=2))
    accelerator = example.with_zero(3)
    assert accelerator.prepare_model(judge, evaluation_mode=True) is judge and engine_of(judge) is engine
    with pytest.raises(ConfigError, match="already sharded with stage 2, but the accelerator has 3"):
        accelerator.prepare_model(judge)


@ranks(2)
def test_a_model_of_a_trainer_keeps_its_own_save_pretrained():
    reset_accelerate()
    accelerator = ZeroAccelerator.adopt(Accelerator(cpu=True), ZeroConfig(), torch.device("cpu"))
    model = accelerator.prepare_model(example.bert())
    assert "save_pretrained" not in vars(model)


# Several models, each with its optimizer, found by the parameters


TWO = ("mlp", "llama")


def _alone(stage):
    """Each model by itself."""
    found = {}
    for name in TWO:
        subject = training.Sharded(models.build(name), training.adamw, stage)
        found[name] = training.train(subject, name, num_steps=3)
    return found


def _together(stage):
    reset_accelerate()
    accelerator = ZeroAccelerator.adopt(
        Accelerator(cpu=True), ZeroConfig(stage=stage), torch.device("cpu"), trains=lambda model: model is not judge
    )
    judge = models.build("llama", seed=3)
    built = {name: models.build(name) for name in TWO}
    optimizers = {name: training.adamw(model) for name, model in built.items()}
    with pytest.raises(ConfigError, match="the parameters belong to no prepared model"):
        accelerator.prepare_optimizer(optimizers["mlp"])
    for model in built.values():
        accelerator.prepare_model(model)
    accelerator.prepare_model(judge, evaluation_mode=True)
    optimizers = {name: accelerator.prepare_optimizer(optimizer) for name, optimizer in optimizers.items()}
    norms = {name: [] for name in TWO}
    for step in range(3):
        for name, model in built.items():
            batch = models.batch(name, seed=1000 * step + dist.get_rank())
            accelerator.backward(training.loss_of(model(**batch)))
            norms[name].append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizers[name].step()
            optimizers[name].zero_grad()
    assert not engine_of(judge).gradients
    return {name: (torch.stack(norms[name]), weights_of(built[name])) for name in TWO}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.support("Several models, each with its optimizer, in one accelerator", area="Models in one process")
@ranks(2)
def test_each_optimizer_trains_its_own_model(stage):
    alone, together = _alone(stage), _together(stage)
    for name in TWO:
        norms, weights = together[name]
        assert torch.equal(norms, alone[name].norms)
        assert all(torch.equal(weight, weights[key]) for key, weight in alone[name].weights.items())
