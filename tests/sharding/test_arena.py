import random
from contextlib import contextmanager

import pytest
import torch

from hf_zero.errors import LifecycleError
from hf_zero.sharding.arena import ALIGN_NBYTES, Arena, trim


pytestmark = pytest.mark.quick


CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _size(tensor: torch.Tensor) -> int:
    return max(1, -(-tensor.numel() * tensor.element_size() // ALIGN_NBYTES)) * ALIGN_NBYTES


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_taken_never_overlaps_and_all_of_it_comes_back(seed, keeps):
    rng, arena = random.Random(seed), Arena("test", CPU, keeps=keeps, chunk_nbytes=4096)
    arena.expect(1000, torch.float32)
    taken: list[tuple[torch.Tensor, int]] = []
    peak = capacity = 0
    for turn in range(600):
        if taken and rng.random() < (0.35 if turn < 300 else 0.65):
            tensor, mark = taken.pop(rng.randrange(len(taken)))
            assert (tensor == mark).all(), "somebody else wrote there"
            arena.give(tensor)
        else:
            tensor = arena.take(rng.randrange(0, 700), rng.choice(DTYPES))
            assert tensor.data_ptr() % tensor.element_size() == 0 and tensor.is_contiguous()
            taken.append((tensor.fill_(turn % 100), turn % 100))
        used = sum(_size(tensor) for tensor, _ in taken)
        peak = max(peak, used)
        assert (arena.used_nbytes, arena.peak_nbytes) == (used, peak)
        assert 0 <= arena.fragmentation < 1 and arena.largest_hole_nbytes <= arena.capacity_nbytes - used
        assert not keeps or arena.capacity_nbytes >= capacity, "what is kept does not shrink"
        capacity = arena.capacity_nbytes
    ranges = sorted(_range(tensor) for tensor, _ in taken if tensor.numel())
    assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:]))
    for tensor, mark in taken:
        assert (tensor == mark).all()
        arena.give(tensor)
    assert arena.used_nbytes == 0
    assert arena.capacity_nbytes == (capacity if keeps else 0)
    assert arena.peak_nbytes <= capacity or not keeps


def test_holes_that_touch_become_one():
    arena = Arena("test", CPU, keeps=True)
    arena.expect(16, torch.float32, count=6)
    parts = [arena.take(16, torch.float32) for _ in range(6)]
    assert arena.capacity_nbytes == 6 * 64 and len({part.untyped_storage().data_ptr() for part in parts}) == 1
    for index in (0, 2, 4):
        arena.give(parts[index])
    assert (arena.largest_hole_nbytes, arena.fragmentation) == (64, pytest.approx(2 / 3))
    for index in (3, 1, 5):
        arena.give(parts[index])
    assert (arena.largest_hole_nbytes, arena.fragmentation) == (6 * 64, 0.0)
    assert arena.take(96, torch.float32).data_ptr() == parts[0].data_ptr()


def test_what_is_given_back_last_taken_first_is_found_again_in_its_place():
    arena, addresses = Arena("test", CPU, keeps=True, chunk_nbytes=1000), []
    for _ in range(3):
        parts = [arena.take(numel, torch.bfloat16) for numel in (100, 7, 320)]
        addresses.append([part.data_ptr() for part in parts])
        while parts:
            arena.give(parts.pop())
    assert addresses[0] == addresses[1] == addresses[2]
    assert arena.capacity_nbytes == 1000
    assert Arena("test", CPU, keeps=True, make=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)).take(
        3, torch.int8
    ).tolist() == [0, 0, 0]


def test_what_was_not_taken_cannot_be_given_back():
    arena = Arena("slots", CPU, keeps=True)
    tensor = arena.take(64, torch.float32)
    for stranger in (torch.empty(64), tensor[16:]):
        with pytest.raises(LifecycleError, match="arena 'slots': .*not taken from it.*give back once"):
            arena.give(stranger)
    arena.give(tensor)
    with pytest.raises(LifecycleError, match="arena 'slots'"):
        arena.give(tensor)


class _Backend:
    """In place of `torch.cuda`: says what was made in a pool."""

    def __init__(self):
        self.pools, self.inside, self.emptied = 0, None, 0

    def MemPool(self):
        self.pools += 1
        return f"pool {self.pools}"

    @contextmanager
    def use_mem_pool(self, pool, device):
        self.inside = (pool, device)
        yield
        self.inside = None

    def empty_cache(self):
        self.emptied += 1


def test_an_accelerators_memory_comes_from_a_pool_of_its_own_at_its_exact_size(monkeypatch):
    backend, made, empty = _Backend(), [], torch.empty

    def recorded(nbytes, *, dtype, device):
        made.append((nbytes, backend.inside, device))
        return empty(nbytes, dtype=dtype)

    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    monkeypatch.setattr(torch, "empty", recorded)
    device = torch.device("cuda", 1)
    arenas = [Arena(name, device) for name in ("one", "other")]
    for arena in arenas:
        arena.expect(100, torch.float32, count=3)
        for _ in range(2):  # steps
            for tensor in [arena.take(100, torch.float32) for _ in range(3)]:
                arena.give(tensor)
    arenas[0].take(1000, torch.float32)  # more than was expected
    assert made == [
        (3 * 448, ("pool 1", 1), device),
        (3 * 448, ("pool 2", 1), device),
        (4032, ("pool 1", 1), device),
    ]
    trim(device)
    assert backend.emptied == 1


def test_only_a_cpus_memory_is_given_back_by_default():
    assert [Arena("test", torch.device(kind)).keeps for kind in ("cpu", "cuda", "xpu")] == [False, True, True]
