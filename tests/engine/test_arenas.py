"""Long-lived memory that is kept, as on accelerators, is the same from step to step whatever the activations are."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.engine import build
from hf_zero.sharding.arena import Arena, Arenas
from tests import models
from tests.distributed import run_ranks
from tests.training import Sharded, adamw


LENGTHS = (9, 17, 5, 21, 13, 8)


class _Keeping:
    """In place of `Arenas`: all of them keep what they have."""

    @staticmethod
    def of(comm) -> Arenas:
        return Arenas(*(Arena(name, comm.device, keeps=True) for name in Arenas._fields))


def _sharded(stage: int, keeps: bool) -> Sharded:
    build.Arenas = _Keeping if keeps else Arenas
    try:
        return Sharded(models.build("llama"), adamw, stage, compute_dtype=torch.bfloat16, shared_memory=False)
    finally:
        build.Arenas = Arenas


def _addresses(engine) -> set[int]:
    """Where the slots lie, and the gradients after a backward."""
    buffers = [unit.slot.buffer for unit in engine.units if unit.slot is not None]
    buffers += [slot.buffer for unit in engine.units if unit.gradient_slots for slot in unit.gradient_slots.slots]
    return {tensor.data_ptr() for tensor in [*buffers, *(gradient.reduced for gradient in engine.gradients())]}


def _step(subject: Sharded, step: int) -> list[torch.Tensor]:
    """One or two micro-batches of a length of this step's; the loss and the gradients' norm."""
    for micro in range(1 + step % 2):
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
        tokens = torch.randint(1, models.VOCAB, (2, LENGTHS[step]), generator=generator)
        loss = subject(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return [loss.detach(), subject.clip_grad_norm_(0.1)]


def _train(stage: int, keeps: bool) -> tuple[list[torch.Tensor], list[set[int]], list[list[int]]]:
    subject = _sharded(stage, keeps)
    arenas = subject.engine.arenas
    found, addresses, capacities = [], [], []
    for step in range(len(LENGTHS)):
        found += _step(subject, step)
        addresses.append(_addresses(subject.engine))
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        capacities.append([arena.capacity_nbytes for arena in arenas])
    for arena in arenas if keeps else ():
        assert arena.peak_nbytes == arena.capacity_nbytes, f"{arena.name}: what was expected is what is needed"
        assert arena.fragmentation == 0
    if stage > 1:  # gradients are no more, their memory is where it is kept
        assert arenas.reduced.used_nbytes == 0 and (arenas.reduced.capacity_nbytes > 0) is keeps
        assert (arenas.collected.capacity_nbytes > 0) is keeps
    hf_zero.ShardedModel(subject.engine).unshard()
    assert subject.engine.arenas is None and all(arena.capacity_nbytes == 0 for arena in arenas)
    return found, addresses, capacities


def _stays(stage: int) -> None:
    found, addresses, capacities = _train(stage, keeps=True)
    assert all(other == addresses[0] for other in addresses), "the places of slots and gradients have changed"
    assert all(other == capacities[0] for other in capacities) and sum(capacities[0]) > 0, capacities
    wanted, _, _ = _train(stage, keeps=False)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_long_lived_memory_stays_where_it_is_over_varying_lengths(stage):
    run_ranks(_stays, 2, stage)
