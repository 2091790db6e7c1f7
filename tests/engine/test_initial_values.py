"""A model that was built on the meta device is initialised where it is sharded, by each rank for its own ranges."""

import hashlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of, materialize
from hf_zero.engine.initial_values import draw_seed, initialize
from hf_zero.engine.source import source_of
from hf_zero.errors import UnsupportedError
from tests import models
from tests.compare import assert_equal
from tests.distributed import run_ranks
from tests.tensor_meter import TensorMeter
from tests.tiers import more
from tests.trainer.harness import Rows, assert_learned, make, record


NAMES = ("llama-tied", "gpt2", "mixtral", "t5")
SEED = 3


def _without_data(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.BUILDERS[name]().train()


def _digests(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: hashlib.sha256(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, t in tensors
    }


def _expected(name: str, seed: int = SEED) -> nn.Module:
    model = _without_data(name)
    initialize(model, seed)
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


@pytest.mark.parametrize("num_ranks", [2, *more(1, 3)])
def test_initial_values_are_the_same_at_all_stages_on_any_number_of_ranks(num_ranks):
    stages = (0, 1, 2, 3)
    everyones = run_ranks(_sharded, num_ranks, NAMES, stages)
    torch.manual_seed(SEED)
    seed = draw_seed()
    for name in NAMES:
        expected = _digests(_expected(name, seed))
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


class Turning(Table):
    def __init__(self):
        super().__init__()
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))

    def reset_parameters(self):
        nn.init.ones_(self.mask)
        nn.init.ones_(self.turns[:1])


class Asking(nn.Linear):
    def __init__(self, *sizes: int):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(sizes))

    def reset_parameters(self, std: float):
        nn.init.normal_(self.weight, std=std)


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
        (Untouched, r"scale: .*no initialization sets all of its values; set them in `reset_parameters`"),
        (Half, r"scale: .*no initialization sets all of its values"),
        (Table, r"mask: is a buffer that .*no initialization sets all of its values"),
        (Turning, r"turns: is a buffer that .*no initialization sets all of its values"),
        (lambda: nn.Sequential(Asking(4, 4)), r"^0, Asking: its initialization needs arguments .* argument: 'std'"),
        (lambda: nn.Sequential(nn.LSTM(4, 4)), r"0.weight_ih_l0: .*weak references"),
        (Copied, r"Copied: its initialization needs values that are not available"),
    ],
)
def test_what_no_initialisation_sets_is_refused_by_name(build, said):
    with torch.device("meta"):
        model = build()
    with pytest.raises(UnsupportedError, match=said):
        hf_zero.shard(model, stage=3)


class Noisy(nn.Linear):
    """Draws a buffer with its parameters, as random features do."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("noise", torch.randn(8))
        self.register_buffer("offset", torch.randn(8))
        self.calls = 0

    def reset_parameters(self):
        super().reset_parameters()
        for buffer in self._buffers.values():
            buffer.normal_()
        self.calls = getattr(self, "calls", 0) + 1


@pytest.mark.quick
def test_modules_of_torch_reset_themselves_from_a_seed_that_is_drawn(caplog):
    def sharded() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2), Noisy())
        hf_zero.shard(model, stage=2)
        return model

    torch.manual_seed(SEED)
    model, twin = sharded(), sharded()
    assert caplog.text.count("values that its constructors set are lost") == 2
    assert not torch.equal(model[0].weight, twin[0].weight), "two models in a row"
    torch.manual_seed(SEED)
    found = _digests(sharded())
    assert found == _digests(model), "the same seed"
    # a rank that computes no parameter of `Noisy`, and reads others in several ranges
    torch.manual_seed(SEED)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.MultiheadAttention(8, 2), Noisy())
    initialize(other, draw_seed())
    assert all(torch.equal(a, b) for a, b in zip(other[3].buffers(), model[3].buffers(), strict=True))
    assert not torch.equal(*other[3].buffers()), "each buffer has its own"
    calls, halves = other[3].calls, [torch.empty(32), torch.empty(32)]
    for index, half in enumerate(halves):
        source_of(other[3].weight).read(32 * index, half, torch.float32)
    assert other[3].calls == calls + 1 and torch.equal(torch.cat(halves).view(8, 8), model[3].weight)
    assert not any(t.is_meta or t.isnan().any() for t in [*model.parameters(), *model.buffers()])
    assert 0 < model[0].weight.abs().max() <= 8**-0.5 and model[1].running_var.tolist() == [1.0] * 8


class Ramp(nn.Linear):
    @torch.no_grad()
    def reset_parameters(self):
        self.weight.copy_(torch.arange(16, dtype=torch.float32, device=self.weight.device).sqrt_().view(4, 4))
        self.bias.zero_()


def test_an_initialisation_may_make_tensors_of_its_own():
    with torch.device("meta"):
        model = nn.Sequential(Ramp(4, 4))
    hf_zero.shard(model, stage=2)
    assert torch.equal(model[0].weight.flatten(), torch.arange(16.0).sqrt())


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
