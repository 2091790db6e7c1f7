"""A model that was built on the meta device is initialised where it is sharded, by each rank for its own ranges."""

import hashlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of, materialize
from hf_zero.engine.initial_values import initialize
from hf_zero.errors import UnsupportedError
from tests import models
from tests.distributed import run_ranks
from tests.tensor_meter import TensorMeter
from tests.tiers import more
from tests.trainer.harness import Rows, assert_equal, assert_learned, make, record


NAMES = ("llama-tied", "gpt2", "mixtral", "t5")
SEED = 3


def _without_data(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.BUILDERS[name]().train()


def _digests(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy()).hexdigest() for name, t in tensors}


def _expected(name: str) -> nn.Module:
    model = _without_data(name)
    initialize(model, SEED)
    return materialize(model)


def _sharded(names: tuple[str, ...], stages: tuple[int, ...]) -> dict[tuple[str, int], dict[str, str]]:
    found = {}
    for name in names:
        for stage in stages:
            rank = dist.get_rank() if dist.is_initialized() else 0
            torch.manual_seed(SEED + rank)  # rank 0's counts
            model = _without_data(name)
            hf_zero.shard(model, stage=stage)
            with hf_zero.gathered(model):
                found[name, stage] = _digests(model)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, *more(3)])
def test_initial_values_are_the_same_at_all_stages_on_any_number_of_ranks(num_ranks):
    stages = (0, 1, 2, 3)
    everyones = run_ranks(_sharded, num_ranks, NAMES, stages)
    for name in NAMES:
        expected = _digests(_expected(name))
        for found in everyones:
            for stage in stages:
                assert found[name, stage] == expected, f"{name} at stage {stage} on {num_ranks} ranks"


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_initial_values_are_distributed_as_those_of_a_model_that_is_built_with_data(name):
    model, plain = _expected(name), models.build(name)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for (key, own), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(own == 0, other == 0) and torch.equal(own == 1, other == 1), f"{key}: constants"
        std, other_std = own.std(correction=0).item(), other.std(correction=0).item()
        assert std == pytest.approx(other_std, rel=0.2, abs=1e-3), key
        assert own.mean().item() == pytest.approx(other.mean().item(), abs=7 * other_std / other.numel() ** 0.5), key
    for (key, own), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(own, other), f"buffer {key}"
    drawn = [p for p in model.parameters() if p.dim() > 1]
    assert not any(torch.equal(a, b) for a, b in zip(drawn, drawn[1:]) if a.shape == b.shape), "each has its own"


class Untouched(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


class Half(Untouched):
    def reset_parameters(self):
        nn.init.ones_(self.scale[:2])


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))


class Copied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def reset_parameters(self):
        self.down.weight.copy_(self.up.weight)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Untouched, r"scale: .*no initialisation sets all of it; give its module a `reset_parameters`"),
        (Half, r"scale: .*no initialisation sets all of it"),
        (Table, r"mask: is a buffer that .*no initialisation sets all of it"),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), r"0.weight_ih_l0: .*weak references"),
        (Copied, r"Copied: its initialisation needs values that are not there"),
    ],
)
def test_what_no_initialisation_sets_is_refused_by_name(build, said):
    with torch.device("meta"):
        model = build()
    with pytest.raises(UnsupportedError, match=said):
        hf_zero.shard(model, stage=3)


@pytest.mark.quick
def test_modules_of_torch_reset_themselves_and_no_generator_moves():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2))
    before = torch.manual_seed(SEED).get_state()
    hf_zero.shard(model, stage=2)
    assert torch.equal(before, torch.get_rng_state())
    assert not any(t.is_meta or t.isnan().any() for t in [*model.parameters(), *model.buffers()])
    assert 0 < model[0].weight.abs().max() <= 8**-0.5 and model[1].running_var.tolist() == [1.0] * 8


def test_adapters_without_data_are_refused():
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = peft.get_peft_model(models.BUILDERS["llama"](), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"adapter|and others have"):
        hf_zero.shard(model, stage=3)


@pytest.fixture
def rank_of_many(monkeypatch) -> Iterator[int]:
    """One rank of 64, which exchanges nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    yield 64
    dist.destroy_process_group()


def test_no_rank_holds_more_than_one_unit_beside_its_share(rank_of_many):
    with torch.device("meta"):
        model = models.llama(hidden=256, layers=12, vocab=512)
    units = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    numel = sum(p.numel() for p in model.parameters())
    root = numel - sum(units)
    with TensorMeter() as meter:
        meter.mark("start")
        hf_zero.shard(model, stage=3, bucket_nbytes=2**16)
        meter.mark("end")
    # two slots for blocks and one for the root, as many buffers for gradients, and the parameter that is computed
    kept = 2 * 2 * max(units) + 2 * root + numel / rank_of_many
    peak = meter.span("start", "end").peak_nbytes
    assert peak <= 4 * (1.05 * kept + max(units)), f"{peak} bytes, the model has {4 * numel}"
    assert engine_of(model) is not None


def test_trainer_initialises_a_model_without_data_by_its_seed(tmp_path):
    runs = []
    for folder in ("first", "second"):
        trainer = make(3, tmp_path / folder, _without_data("llama"), Rows("llama"), seed=SEED)
        trainer.train()
        runs.append(record(trainer))
    assert_learned(runs[0])
    assert_equal(*runs, "two runs of one seed")
