"""Long-lived memory is the same from step to step, whatever the activations are, and gradients leave none behind."""

import pytest
import torch
import torch.distributed as dist

from tests import models
from tests.distributed import run_ranks
from tests.training import Sharded, adamw


LENGTHS = (9, 17, 5, 21, 13, 8)


def _stay(stage: int) -> None:
    subject = Sharded(models.build("llama"), adamw, stage, compute_dtype=torch.bfloat16, shared_memory=False)
    places = []
    for step, length in enumerate(LENGTHS):
        for micro in range(1 + step % 2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(1, models.VOCAB, (2, length), generator=generator)
            subject(input_ids=tokens, labels=tokens).loss.backward()
        subject.clip_grad_norm_(0.1)
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        units = subject.engine.units
        places.append({unit.slot.buffer.data_ptr() for unit in units if unit.slot is not None})
        if stage > 1:
            assert all(gradient.reduced is None for gradient in subject.engine.gradients)
            assert not any(unit.gradient_slots.slots for unit in units if unit.gradient_slots is not None)
    assert all(each == places[0] for each in places)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_slots_stay_where_they_are_over_varying_lengths(stage):
    run_ranks(_stay, 2, stage)
