"""Optimizers that look at more than one element train as under DDP, at all stages bit for bit alike, and resume."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import hf_zero
from hf_zero.errors import CheckpointError
from tests import models
from tests.compare import assert_close, assert_equal
from tests.distributed import ranks, run_ranks
from tests.optim import kinds
from tests.tiers import more
from tests.training import Plain, Record, Sharded, go_on, loss_of, train


NUM_STEPS = 4
# Those that are in the core.
ALWAYS = ("Muon with AdamW", "Adafactor", "8-bit AdamW (torchao)", "Schedule-free AdamW")


def _train(subject, max_norm: float) -> Record:
    kinds.set_mode(subject.optimizer, "train")
    return train(subject, "llama", num_steps=NUM_STEPS, max_norm=max_norm)


def _state_nbytes(optimizer: hf_zero.ShardedOptimizer) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor, _ in optimizer.state_tensors() if tensor.dim() > 0)


def _check_memory(optimizer: hf_zero.ShardedOptimizer, whole: int) -> None:
    """The ranks' states are about halves of the whole, and of what a rank updates but does not hold nothing stays."""
    everywhere = optimizer.engine.comm.all_gather_object(_state_nbytes(optimizer))
    # Of flat stretches the padding has state, 16 elements of two moments; of divided parameters each part has tables.
    spare = (2 * 16 * 4 + 2 * 256 * 4) * len(optimizer.slices)
    assert whole - spare <= sum(everywhere) <= whole + spare, f"{everywhere} of {whole}"
    assert max(everywhere) <= 0.6 * sum(everywhere), f"{everywhere} of {whole}"
    assert abs(optimizer.unsharded_state_nbytes() - whole) <= 0.1 * whole + spare
    assert all(run.is_held or run.param.untyped_storage().nbytes() <= 4 for run in optimizer.slices)


@pytest.mark.full("more cases", after=3)
@pytest.mark.quick(cases=1)
@pytest.mark.support("{kind}", area="Optimizers", stages=(0, 1, 2, 3))
@kinds.each_kind(ALWAYS)
@ranks(2, timeout=300)
def test_agrees_with_ddp_and_bit_for_bit_between_stages(kind):
    make = kinds.KINDS[kind]
    # Clipping differs by a rounding error from torch's, see `norm.py`; where that counts it only measures here.
    max_norm = float("inf") if kinds.is_coarse(kind) else 0.1
    with kinds.eager():
        plain = _train(Plain(kinds.model_for(kind), make), max_norm)
        whole = Sharded(kinds.model_for(kind), make, 0)
        zero = _train(whole, max_norm)
        assert_close(zero, plain, "stage 0 and DDP", atol=NUM_STEPS * 1e-2 * 1e-8 / 1e-4)
        for stage, shared_memory in ((1, True), (2, False), (3, True), (3, False)):
            subject = Sharded(kinds.model_for(kind), make, stage, shared_memory=shared_memory)
            assert_equal(_train(subject, max_norm), zero, f"stage {stage}, shared memory {shared_memory}")
            _check_memory(subject.optimizer, _state_nbytes(whole.optimizer))
            sizes = [(run, run.flat.layout.spans[run.indices[0]].numel) for run in subject.optimizer.slices]
            is_divided = any(run.stop - run.start < numel for run, numel in sizes)
            assert is_divided or "-bit" not in kind, "a quantised parameter was to be divided"


@ranks(2)
def test_muon_with_clipping_and_a_tied_head_agrees_with_ddp():
    make = kinds.KINDS["Muon with AdamW"]
    with kinds.precise_muon():
        plain = train(Plain(models.build("llama-tied"), make), "llama-tied", num_steps=NUM_STEPS)
        for stage in (1, 3):
            found = train(Sharded(models.build("llama-tied"), make, stage), "llama-tied", num_steps=NUM_STEPS)
            assert_close(found, plain, f"stage {stage} and DDP", atol=NUM_STEPS * 1e-3 * 1e-8 / 1e-4)


def _agrees_where_some_is_unused(kind: str, build, run) -> None:
    """A training gives what DDP gives, bit for bit alike at all stages."""
    make = kinds.KINDS[kind]
    zero = run(Sharded(build(), make, 0))
    assert_close(zero, run(Plain(build(), make)), "stage 0 and DDP")
    for stage in (2, 3):
        assert_equal(run(Sharded(build(), make, stage)), zero, f"stages {stage} and 0")


@pytest.mark.parametrize("kind", ["Muon with AdamW", *more("Adafactor")])
@ranks(2)
def test_an_expert_that_nobody_used_is_left_alone(kind):
    """Which experts are used changes from step to step, and one is used by one rank only."""

    def routes(step: int, rank: int) -> dict:
        return {"routes": [step % 2 if step > 2 else 0, 0, rank if step == 1 else 0]}

    def run(subject) -> Record:
        return train(subject, "switch", num_steps=5, max_norm=None, more=routes)

    _agrees_where_some_is_unused(kind, lambda: models.build("switch"), run)


class Pair(nn.Module):
    """Two layers of one unit, of which one is used at some steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x, y, uses_both: bool):
        return (self.always(x) + (self.sometimes(x) if uses_both else 0)).square().mean()


@pytest.mark.parametrize(
    "kind",
    [
        "Muon with AdamW",
        pytest.param("AdEMAMix (bitsandbytes)", marks=kinds.needs_package_of("AdEMAMix (bitsandbytes)")),
    ],
)
@ranks(2)
def test_state_is_divided_where_a_parameter_is_unused_later(kind):
    def run(subject) -> Record:
        return train(subject, "mlp", num_steps=5, max_norm=None, more=lambda step, rank: {"uses_both": step % 2 == 0})

    with kinds.precise_muon():
        _agrees_where_some_is_unused(kind, Pair, run)


@pytest.mark.direct
@pytest.mark.parametrize("kind", ["Muon with AdamW", *more("Adafactor")])
@ranks(3)
def test_half_precision_frozen_parts_and_three_ranks(kind):
    """bf16 compute, fp32 masters, three ranks, a part frozen: bit for bit alike at all stages, and they learn."""
    records = []
    for stage in range(4):
        model = models.build("llama")
        model.model.layers[0].requires_grad_(False)
        subject = Sharded(model, kinds.KINDS[kind], stage, compute_dtype=torch.bfloat16)
        records.append(train(subject, "llama", num_steps=4))
    for stage in (1, 2, 3):
        assert_equal(records[stage], records[0], f"stage {stage} and stage 0")
    start = dict(models.build("llama").named_parameters())
    for name, weight in records[3].weights.items():
        if name.endswith("proj.weight"):
            assert torch.equal(weight, start[name].bfloat16().float()) == name.startswith("model.layers.0."), name


class Centred(torch.optim.Optimizer):
    """Somebody's own optimizer that looks at whole parameters, and counts steps in its group."""

    whole_parameters = True

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_((p.grad - p.grad.mean()) * (group["lr"] / group["count"]) * p.abs().max())


@ranks(2)
def test_an_optimizer_may_declare_that_it_looks_at_whole_parameters():
    def make(model):
        return Centred(model.parameters())

    plain = train(Plain(models.build("llama"), make), "llama", num_steps=3)
    for stage in (0, 3):
        subject = Sharded(models.build("llama"), make, stage)
        assert_close(train(subject, "llama", num_steps=3), plain, f"stage {stage}")
        assert subject.optimizer.param_groups[0]["count"] == 3


# Schedule-free


@kinds.needs_package_of("Schedule-free AdamW")
@pytest.mark.parametrize("stage", [*more(1), 3])
@ranks(2)
def test_schedule_free_evaluation_in_between_agrees_with_ddp(stage):
    """Evaluation in between sees the averaged weights, and training goes on from where it was."""

    def run(subject) -> tuple[Record, list]:
        evaluated, records = [], []
        for step in range(3):
            subject.optimizer.train()
            records.append(train(subject, "llama", num_steps=2))
            subject.optimizer.eval()
            subject.optimizer.eval()  # nothing is turned twice
            with torch.no_grad():
                evaluated.append(loss_of(subject(**models.batch("llama", seed=step))))
        losses = torch.cat([torch.stack(evaluated), *(record.losses for record in records)])
        return Record(losses, torch.cat([r.norms for r in records]), subject.weights()), records[-1].weights

    make = kinds.KINDS["Schedule-free AdamW"]
    wanted, _ = run(Plain(models.build("llama"), make))
    found, before = run(Sharded(models.build("llama"), make, stage))
    assert_close(found, wanted, f"stage {stage} and DDP", atol=6 * 1e-3 * 1e-8 / 1e-4)
    assert any(not torch.equal(found.weights[name], before[name]) for name in before), "eval() was to change them"


# Several optimizers as one


def test_two_optimizers_of_one_parameter_are_refused():
    layer = nn.Linear(3, 3)
    with pytest.raises(hf_zero.errors.ConfigError, match="a parameter is in two optimizers; give each its own"):
        hf_zero.CombinedOptimizer(torch.optim.SGD(layer.parameters()), torch.optim.AdamW([layer.weight]))


def test_a_combined_optimizer_saves_and_loads_as_any_other():
    def build():
        model = models.build("llama")
        return model, hf_zero.MuonWithAdamW()(model)

    def step(model, optimizer, seed):
        loss_of(model(**models.batch("llama", seed))).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    step(model, optimizer, 0)
    other, loaded = build()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))
    torch.optim.lr_scheduler.LambdaLR(loaded, lambda _: 0.5)
    assert {group["lr"] for inner in loaded.optimizers for group in inner.param_groups} == {5e-4}
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    for pair in ((model, optimizer), (other, loaded)):
        step(*pair, 1)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters()):
        assert torch.equal(a, b), name


# State that is not shaped like parameters, or lies whole on one rank, is saved by name and resumes anywhere.


SAVED_AT = 2


def _save(folder: str, kind: str, stage: int) -> None:
    with kinds.eager():
        subject = Sharded(kinds.model_for(kind), kinds.KINDS[kind], stage)
        kinds.set_mode(subject.optimizer, "train")
        go_on(subject, "llama", 0, SAVED_AT)
        kinds.set_mode(subject.optimizer, "eval")
        hf_zero.save_checkpoint(subject.engine, subject.optimizer, folder)
        kinds.set_mode(subject.optimizer, "train")
        losses = go_on(subject, "llama", SAVED_AT, 3 * SAVED_AT)
    Path(folder, "unbroken.json").write_text(json.dumps(losses))


def _resume(folder: str, kind: str, stage: int, exact: bool) -> None:
    with kinds.eager():
        subject = Sharded(kinds.model_for(kind), kinds.KINDS[kind], stage)
        hf_zero.load_weights(subject.engine, folder)
        hf_zero.load_state(subject.engine, subject.optimizer, folder)
        kinds.set_mode(subject.optimizer, "train")
        losses = go_on(subject, "llama", SAVED_AT, 3 * SAVED_AT)
    unbroken = json.loads(Path(folder, "unbroken.json").read_text())
    assert losses == (unbroken if exact else pytest.approx(unbroken, rel=1e-5)), f"stage {stage}"


@kinds.each_kind(("Muon with AdamW", "8-bit AdamW (torchao)", "AdEMAMix (bitsandbytes)"))
@pytest.mark.full("more cases", after=2)
def test_a_resumed_run_is_the_unbroken_one_whatever_the_ranks_and_the_stage(tmp_path, kind):
    run_ranks(_save, 2, str(tmp_path), kind, 3, timeout=240)
    run_ranks(_resume, 2, str(tmp_path), kind, 3, True, timeout=240)
    run_ranks(_resume, 2, str(tmp_path), kind, 0, True, timeout=240)
    run_ranks(_resume, 1, str(tmp_path), kind, 1, False, timeout=240)
    run_ranks(_resume, 4, str(tmp_path), kind, 2, False, timeout=240)


GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.norm.weight"  # 52 by 24, or 260 by 128 where quantised
BYTES, SCALES = ("U8", (260, 128)), ("F32", (260 * 128 // 256,))
# By kind: what of its state is in the file, and names that only others have.
SAVED = {
    "Adafactor (torch)": {
        f"{GATE}.row_var": ("F32", (52, 1)),
        f"{GATE}.col_var": ("F32", (1, 24)),
        f"{NORM}.variance": ("F32", (24,)),
    },
    "8-bit AdamW (torchao)": {
        f"{GATE}.exp_avg_scale": SCALES,
        f"{NORM}.exp_avg": ("F32", (128,)),  # too small to be quantised
    },
    "8-bit AdEMAMix (bitsandbytes)": {
        **{f"{GATE}.{key}": BYTES for key in ("state1_0", "state1_1", "state2")},
        **{f"{GATE}.{key}": SCALES for key in ("absmax1_0", "absmax1_1", "absmax2")},
    },
    "AdEMAMix (bitsandbytes)": {f"{GATE}.{key}": ("F32", (52, 24)) for key in ("state1_0", "state1_1", "state2")},
}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=kinds.needs_package_of(kind)) for kind in SAVED])
def test_state_is_saved_in_its_own_shapes_and_dtypes(tmp_path, kind):
    """Factors beside the weights, codes and scales of what is quantised, each row of what is stacked by itself."""
    run_ranks(_save, 2, str(tmp_path), kind, 3)
    with safe_open(Path(tmp_path, "zero", "optimizer.safetensors"), "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        found = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    assert SAVED[kind].items() <= found.items()
    assert ("8-bit" in kind) is any(dtype == "U8" for dtype, _ in found.values())
    assert not any(name.endswith("qmap") for name in found), "the tables follow from the optimizer"
    if kind == "AdEMAMix (bitsandbytes)":
        assert not any("absmax" in name for name in found)


class Listing(torch.optim.SGD):
    """Keeps a list in its state, which no checkpoint knows."""

    whole_parameters = True

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1.0]


def test_state_that_cannot_be_saved_is_named(tmp_path):
    model = models.build("mlp")
    engine = hf_zero.shard(model, stage=1)
    subject = hf_zero.ShardedOptimizer(engine, Listing, lr=0.1)
    loss_of(model(**models.batch("mlp", seed=0))).backward()
    subject.step()
    with pytest.raises(
        CheckpointError, match="state 'history' of .*: a list cannot be saved; keep tensors and numbers"
    ):
        hf_zero.save_checkpoint(engine, subject, tmp_path / "saved")


def test_hyperparameters_in_tensors_are_saved(tmp_path):
    """An optimizer that was saved without them would be taken for another kind."""
    made = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.5), torch.tensor(0.25)), "foreach": False}
    for folder in (tmp_path / "saved", None):
        model = models.build("mlp")
        engine = hf_zero.shard(model, stage=1)
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, **made)
        if folder is not None:
            hf_zero.save_checkpoint(engine, optimizer, folder)
    made["betas"][0].fill_(0.75)
    hf_zero.load_state(engine, optimizer, tmp_path / "saved")
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.25)
