import random

import pytest
import torch

from hf_zero.activation.arena import Arena
from hf_zero.errors import LifecycleError
from hf_zero.sharding.slots import ALIGN_NBYTES


pytestmark = pytest.mark.quick


DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _size(tensor: torch.Tensor) -> int:
    return max(1, -(-tensor.numel() * tensor.element_size() // ALIGN_NBYTES)) * ALIGN_NBYTES


def _made(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_taken_never_overlaps_and_all_of_it_comes_back(seed):
    rng, arena = random.Random(seed), Arena(_made, 4096)
    taken: list[tuple[torch.Tensor, int]] = []
    capacity = 0
    for turn in range(600):
        if taken and rng.random() < (0.35 if turn < 300 else 0.65):
            tensor, mark = taken.pop(rng.randrange(len(taken)))
            assert (tensor == mark).all(), "somebody else wrote there"
            arena.give(tensor)
        else:
            tensor = arena.take(rng.randrange(0, 700), rng.choice(DTYPES))
            assert tensor.data_ptr() % tensor.element_size() == 0 and tensor.is_contiguous()
            taken.append((tensor.fill_(turn % 100), turn % 100))
        assert arena.used_nbytes == sum(_size(tensor) for tensor, _ in taken)
        assert arena.capacity_nbytes >= capacity, "it does not shrink"
        capacity = arena.capacity_nbytes
    ranges = sorted(_range(tensor) for tensor, _ in taken if tensor.numel())
    assert all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:]))
    for tensor, mark in taken:
        assert (tensor == mark).all()
        arena.give(tensor)
    assert (arena.used_nbytes, arena.capacity_nbytes) == (0, capacity)


def test_holes_that_touch_become_one():
    arena = Arena(_made, 6 * 64)
    parts = [arena.take(16, torch.float32) for _ in range(6)]
    assert arena.capacity_nbytes == 6 * 64 and len({part.untyped_storage().data_ptr() for part in parts}) == 1
    for index in (0, 2, 4):
        arena.give(parts[index])
    for index in (3, 1, 5):
        arena.give(parts[index])
    assert arena.take(96, torch.float32).data_ptr() == parts[0].data_ptr()
    assert arena.capacity_nbytes == 6 * 64


def test_what_is_given_back_last_taken_first_is_found_again_in_its_place():
    arena, addresses = Arena(_made, 1000), []
    for _ in range(3):
        parts = [arena.take(numel, torch.bfloat16) for numel in (100, 7, 320)]
        addresses.append([part.data_ptr() for part in parts])
        while parts:
            arena.give(parts.pop())
    assert addresses[0] == addresses[1] == addresses[2]
    assert arena.capacity_nbytes == 1000


def test_what_was_not_taken_cannot_be_given_back():
    arena = Arena(_made)
    tensor = arena.take(64, torch.float32)
    for stranger in (torch.empty(64), tensor[16:]):
        with pytest.raises(LifecycleError, match="arena: .*not allocated from it.*free each tensor"):
            arena.give(stranger)
    arena.give(tensor)
    with pytest.raises(LifecycleError, match="arena: "):
        arena.give(tensor)
