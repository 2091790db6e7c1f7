"""Optimizers that look at more than one element train as under DDP, at all stages bit for bit alike."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from tests import models
from tests.distributed import ranks
from tests.optim import kinds
from tests.tiers import more
from tests.training import Plain, Record, Sharded, assert_close, assert_equal, loss_of, train


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


def _agrees_where_some_is_unused(kind: str, build, loss_at) -> None:
    """Steps of `loss_at(subject, step)` give what DDP gives, bit for bit alike at all stages."""
    records = []
    for stage in (None, 0, 2, 3):
        model, make = build(), kinds.KINDS[kind]
        subject = Plain(model, make) if stage is None else Sharded(model, make, stage)
        losses = []
        for step in range(5):
            loss = loss_at(subject, step)
            loss.backward()
            losses.append(loss.detach())
            subject.optimizer.step()
            subject.optimizer.zero_grad()
        records.append(Record(torch.stack(losses), torch.zeros(0), subject.weights()))
    plain, zero, *others = records
    assert_close(zero, plain, "stage 0 and DDP")
    for record in others:
        assert_equal(record, zero, "stages 2 and 3 and stage 0")


class Pair(nn.Module):
    """Two layers, of one unit or of two, of which one is used at some steps only."""

    def __init__(self, are_blocks: bool):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        if are_blocks:
            self.blocks = nn.ModuleList(layers)
        else:
            self.always, self.sometimes = layers

    def forward(self, x, uses_both: bool):
        always, sometimes = self.children() if hasattr(self, "always") else self.blocks
        return (always(x) + (sometimes(x) if uses_both else 0)).square().mean()


def _loss_of_pair(subject, step: int):
    torch.manual_seed(10 * step + dist.get_rank())
    return subject(x=torch.randn(4, 8), uses_both=step % 2 == 0)


def _loss_of_experts(subject, step: int):
    """Which experts are used changes from step to step, and one is used by one rank only."""
    routes = [step % 2 if step > 2 else 0, 0, dist.get_rank() if step == 1 else 0]
    return loss_of(subject(**models.batch("switch", seed=10 * step + dist.get_rank()), routes=routes))


@pytest.mark.parametrize("kind", ["Muon with AdamW", *more("Adafactor")])
@ranks(2)
def test_an_expert_or_a_block_that_nobody_used_is_left_alone(kind):
    _agrees_where_some_is_unused(kind, lambda: models.build("switch"), _loss_of_experts)
    with kinds.precise_muon():
        _agrees_where_some_is_unused(kind, lambda: Pair(are_blocks=True), _loss_of_pair)


@kinds.needs_package_of("AdEMAMix (bitsandbytes)")
@ranks(2)
def test_rows_of_state_are_divided_where_a_parameter_is_unused_later():
    _agrees_where_some_is_unused("AdEMAMix (bitsandbytes)", lambda: Pair(are_blocks=False), _loss_of_pair)


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
