"""Slots are lent to averages in the last backward of a step, on all ranks or on none."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests import models
from tests.distributed import run_ranks
from tests.training import Sharded, adamw


@contextmanager
def _breaking_off(subject: Sharded) -> Iterator[None]:
    """Breaks a backward off on this rank alone, behind all that ranks do together in it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject.engine.schedule, "end_backward", Mock(side_effect=KeyboardInterrupt))
        yield


def _lends_in_the_last_backward(patch: pytest.MonkeyPatch) -> None:
    subject = Sharded(models.build("llama-tied"), adamw, 3, shared_memory=False, timeout_seconds=30)
    lends = Mock(side_effect=subject.engine.lend_slots)
    patch.setattr(subject.engine, "lend_slots", lends)
    lent, is_first = [], dist.get_rank() == 0
    for step, num_backwards in enumerate((2, 2, 2, 2, 3)):
        for micro in range(num_backwards):
            loss = subject(**models.batch("llama-tied", seed=10 * step + micro + dist.get_rank())).loss
            breaks_off = is_first and (step, micro) in ((2, 0), (4, 1))
            lends.reset_mock()
            with _breaking_off(subject) if breaks_off else nullcontext():
                loss.backward()
            lent.append(lends.called)
            if is_first and (step, micro) == (1, 0):
                subject.optimizer.zero_grad()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    # how many there are is known after the first step
    assert lent == [True, False, *[False, True] * 3, False, True, False], lent


def _with_patches() -> None:
    with pytest.MonkeyPatch.context() as patch:
        _lends_in_the_last_backward(patch)


def test_slots_are_lent_in_the_last_backward_of_a_step():
    """All ranks lend alike, also when one alone drops its gradients between backwards, or breaks one off at its end:
    then it has the same values to gather again as the others."""
    run_ranks(_with_patches, 2)
