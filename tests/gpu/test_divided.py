"""What divides ranks, sequences, losses and MLPs, and what is sent in few bits, while streams are late, against plain
torch on the same device."""

import copy

import pytest
import torch
from torch import nn

from hf_zero.activation import chunked_loss
from hf_zero.comm.blockwise import HIGHEST, pack_rows, packed_nbytes, unpack_rows
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import ROUNDING, tiny_llama, train_plain
from tests.gpu.late import BF16_ROUNDING, BITS_ROUNDING, assert_same, run_ranks_late, start, train_late
from tests.tiers import more


@pytest.fixture(autouse=True)
def _several_ranges(monkeypatch):
    """Ranges of the vocabulary that are so narrow that the tiny model has several."""
    for name, value in (("CPU_NBYTES", 1024), ("ACCELERATOR_NBYTES", 1024), ("MIN_WIDTH", 48)):
        monkeypatch.setattr(chunked_loss, name, value)


CASES = {
    "groups of 1": (2, dict(stage=2, shard_size=1)),
    "groups of 2": (4, dict(stage=3, shard_size=2)),
    "groups of 2, stage 1": (4, dict(stage=1, shard_size=2)),
    "shared sequences": (2, dict(stage=3, sequence_parallel=2)),
    "shared sequences, in groups": (4, dict(stage=3, sequence_parallel=2, shard_size=2, checkpoints=True)),
    "chunked loss": (2, dict(stage=3, chunked_loss="on")),
    "tiled MLPs": (2, dict(stage=3, tiled_mlp=3)),
    "tiled MLPs, checkpointing": (2, dict(stage=2, tiled_mlp=3, checkpoints=True)),
    "all at once": (4, dict(stage=3, shard_size=2, sequence_parallel=2, chunked_loss="on", tiled_mlp=3)),
}


@pytest.mark.parametrize("dtype, bound", [(None, ROUNDING), *more((torch.bfloat16, BF16_ROUNDING))])
@pytest.mark.parametrize("name", CASES)
def test_what_is_divided_agrees_with_plain_torch(device, delays, name, dtype, bound):
    num_ranks, settings = CASES[name]
    share = settings.get("sequence_parallel", 1)
    plain = train_plain(tiny_llama().to(device), num_ranks // share, device)
    first = train_late(device, num_ranks=num_ranks, compute_dtype=dtype, **settings)
    for rank, trained in enumerate(first):
        found = trained.differences(plain[rank // share])
        assert found["losses"] < bound, found
        assert dtype is not None or max(found.values()) < bound, found
    for delay in delays[1:]:
        found = train_late(device, delay, num_ranks=num_ranks, compute_dtype=dtype, **settings)
        assert_same(found, first, f"{name} while {delay} is late")


# An integer of 8 bits is rounded by up to 1/254 of the largest of 256 values.
@pytest.mark.parametrize(
    "settings, bound",
    [
        (dict(stage=2, reduce_dtype=torch.int8), BITS_ROUNDING),
        (dict(stage=3, reduce_dtype=torch.int8, gather_dtype=torch.int8), BITS_ROUNDING),
        (dict(stage=3, reduce_dtype=torch.int8, shard_size=2, num_ranks=4), BITS_ROUNDING),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_is_sent_in_few_bits_repeats_and_is_near_to_plain_torch(device, delays, settings, bound):
    plain = train_plain(tiny_llama().to(device), settings.get("num_ranks", 2), device)
    first = train_late(device, **settings)
    for trained, wanted in zip(first, plain, strict=True):
        found = trained.differences(wanted)
        assert max(found["losses"], found["norms"]) < bound, found
    for trained in first[1:]:
        assert all(torch.equal(weight, first[0].weights[name]) for name, weight in trained.weights.items())
    for delay in delays[1:]:
        assert_same(train_late(device, delay, **settings), first, f"{settings} while {delay} is late")


def test_a_device_packs_as_the_host_does(device):
    """Its division and rounding are IEEE's: a compiler that took reciprocals would give another integer here."""
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(3, 1000, generator=generator) * torch.logspace(-6, 6, 1000)
    values[0, 256:512] = 0.0
    unpacked = []
    for place in (torch.device("cpu"), device):
        packed = torch.zeros(3, packed_nbytes(1000), dtype=torch.uint8, device=place)
        pack_rows(values.to(place), packed)
        out = torch.zeros(3, 1000, device=place)
        unpack_rows(packed, out)
        unpacked.append(out.cpu())
    assert torch.equal(*unpacked)
    blocks = nn.functional.pad(values, (0, 24)).view(3, 4, 256).abs().amax(-1)
    error = nn.functional.pad(values - unpacked[0], (0, 24)).view(3, 4, 256).abs().amax(-1)
    assert (error <= 0.51 * blocks / HIGHEST).all()


class Running(nn.Module):
    """Blocks with statistics, which are saved, and a count, which is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)) for _ in range(3))
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for block in self.blocks:
            values = values + block(values)
        return values.square().mean()


def test_saved_buffers_are_those_of_the_first_rank(device):
    """Against plain torch, whose first rank's forward comes last, so that its statistics are the ones that stay."""
    model = Running()

    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)

    def play(comm) -> tuple[dict, float]:
        engine = start(comm, copy.deepcopy(model).to(device), stage=3)
        optimizer = ShardedOptimizer(engine, torch.optim.SGD(engine.model.parameters(), lr=0.1))
        for step in range(3):
            engine.model(batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = {name: buffer.cpu() for name, buffer in engine.model.named_buffers() if name != "count"}
        return saved, engine.model.count.item()

    plain = copy.deepcopy(model).to(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        for rank in (1, 0):
            for name, buffer in plain.named_buffers():
                buffer.copy_(before[name])
            (plain(batch(rank, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second = run_ranks_late(device, play)
    assert first[1] == second[1] == 3
    for name, buffer in first[0].items():
        assert torch.equal(buffer, second[0][name]), name
        torch.testing.assert_close(buffer, plain.get_buffer(name).cpu(), rtol=ROUNDING, atol=ROUNDING, msg=name)
