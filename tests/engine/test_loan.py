"""Blocks collect their gradients in the root's slot when nobody needs the root's values any more, and only then.

The root of the model, a tied embedding, is larger than two blocks. Bits are compared with those of stage 2, where
nothing is lent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests import models
from tests.distributed import run_ranks
from tests.training import Sharded, adamw, assert_equal, train


NAME = "llama-vocabulary"
Change = Callable[[nn.Module, Tensor], Tensor]  # of the hidden states that a block is given


@contextmanager
def _changed(subject: Sharded, change: Change) -> Iterator[list[bool]]:
    """Changes the second block's hidden states. Gives a list: whether the root was lent in each backward
    when it came there."""
    lent: list[bool] = []

    def look(grad: Tensor) -> None:
        loan = subject.engine.root_loan
        lent.append(loan is not None and loan.is_under_way)

    def hook(module: nn.Module, args: tuple, kwargs: dict):
        hidden = change(subject.model, args[0])
        if hidden.requires_grad:
            hidden.register_hook(look)
        return (hidden, *args[1:]), kwargs

    handle = subject.model.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
    yield lent
    handle.remove()


def _unchanged(model: nn.Module, hidden: Tensor) -> Tensor:
    return hidden * 1


def _through_the_head(model: nn.Module, hidden: Tensor) -> Tensor:
    weight = model.lm_head.weight
    return hidden + 1e-3 * F.linear(F.linear(hidden, weight), weight.t())


def _through_its_values(model: nn.Module, hidden: Tensor) -> Tensor:
    """autograd holds a view of the slot, and not the parameter."""
    weight = model.lm_head.weight.detach()
    return hidden + 1e-3 * F.linear(F.linear(hidden, weight), weight.t())


def _norm_again(model: nn.Module, hidden: Tensor) -> Tensor:
    """The backward calls a module of the root, as what is computed again may."""
    hidden = hidden * 1
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: grad + 1e-3 * model.model.norm(grad))
    return hidden


def _as_at_stage_2(change: Change, dtype: torch.dtype | None, shared_memory: bool, is_lent: bool) -> None:
    records = []
    for stage in (2, 3):
        settings = {"compute_dtype": dtype, "shared_memory": shared_memory}
        subject = Sharded(models.build(NAME), adamw, stage, **settings)
        with _changed(subject, change) as lent:
            records.append(train(subject, NAME, num_steps=3))
    assert lent == [is_lent] * 3, lent
    assert_equal(records[1], records[0], "stage 3 and stage 2")
    assert all(unit.slot is not None for unit in subject.engine.units), "the test is about slots"


@pytest.mark.direct
@pytest.mark.parametrize(
    "change, is_lent",
    [(_unchanged, True), (_through_the_head, False), (_through_its_values, False), (_norm_again, True)],
)
@pytest.mark.parametrize("dtype, shared_memory", [(None, False), (torch.bfloat16, True)], ids=["messages", "shared"])
def test_the_slot_is_lent_when_nobody_holds_its_values(change, is_lent, dtype, shared_memory):
    run_ranks(_as_at_stage_2, 2, change, dtype, shared_memory, is_lent)


@contextmanager
def _breaking_off(subject: Sharded) -> Iterator[None]:
    """Breaks a backward off on this rank alone, behind all that ranks do together in it."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subject.engine.schedule, "end_backward", Mock(side_effect=KeyboardInterrupt))
        yield


def _lends_in_the_last_backward(checkpoints: bool, keeps: bool) -> None:
    subject = Sharded(models.build(NAME), adamw, 3, shared_memory=False)
    if checkpoints:
        subject.model.activation_checkpointing_enable()
    with _changed(subject, _unchanged) as lent:
        for step in range(3):
            for micro in range(2):
                batch = models.batch(NAME, seed=10 * step + micro + dist.get_rank())
                with saved_tensors_hooks(lambda x: x, lambda x: x) if keeps else nullcontext():
                    loss = subject(**batch).loss
                breaks_off = (step, micro) == (2, 0) and dist.get_rank() == 0
                with _breaking_off(subject) if breaks_off else nullcontext():
                    loss.backward()
                if (step, micro) == (1, 0) and dist.get_rank() == 0:
                    subject.optimizer.zero_grad()
            subject.optimizer.step()
            subject.optimizer.zero_grad()
    # how many there are is known after the first step
    assert lent == ([False] * 6 if keeps else [True, False, False, True, False, True]), lent


@pytest.mark.parametrize("checkpoints, keeps", [(False, False), (True, False), (False, True)])
def test_the_slot_is_lent_in_the_last_backward_of_a_step(checkpoints, keeps):
    """Unless hooks do something else with what autograd saves, whose backward may need values without holding them.
    All ranks lend alike, also when one alone drops its gradients between backwards, or breaks one off at its end."""
    run_ranks(_lends_in_the_last_backward, 2, checkpoints, keeps)
