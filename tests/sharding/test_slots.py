import random

import pytest
import torch

from hf_zero.sharding.slots import Slot, parts_nbytes


pytestmark = pytest.mark.quick


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


@pytest.mark.parametrize("seed", range(10))
def test_views_are_aligned_apart_and_fill_what_was_counted(seed):
    rng = random.Random(seed)
    parts = [(rng.randrange(200), rng.choice(DTYPES)) for _ in range(rng.randrange(1, 6))]
    slot = Slot(torch.empty(parts_nbytes(parts), dtype=torch.uint8))
    views = slot.views(parts)
    assert [(view.numel(), view.dtype) for view in views] == parts
    for number, view in enumerate(views):
        view.fill_(number + 1)
        if view.numel():
            assert view.untyped_storage().data_ptr() == slot.buffer.untyped_storage().data_ptr()
            assert (view.data_ptr() - slot.buffer.data_ptr()) % 64 == 0
    for number, view in enumerate(views):
        assert (view == number + 1).all(), "a later view overwrote it"
    # each part is rounded up to 64 bytes
    assert parts_nbytes(parts) - sum(numel * dtype.itemsize for numel, dtype in parts) < 64 * len(parts)


def test_views_of_the_same_parts_are_the_same_memory():
    parts = [(10, torch.bfloat16), (30, torch.float32)]
    slot = Slot(torch.empty(parts_nbytes(parts), dtype=torch.uint8))
    assert [view.data_ptr() for view in slot.views(parts)] == [view.data_ptr() for view in slot.views(parts)]
