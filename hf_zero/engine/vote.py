"""What all ranks agree on about the gradients of a step.

Everything in a vote is known on the host, so no rank waits for its device. Whoever comes first, `clip_grad_norm_`, the
loss scale or `step`, asks for the vote on the current gradients.
"""

import logging
from typing import TYPE_CHECKING

import torch

from hf_zero.errors import LifecycleError


if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine


logger = logging.getLogger(__name__)

NO_NORM = -1.0  # the order of the norm of a caller that measures none


def vote(engine: "ZeroEngine", norm_type: float, max_norm: float) -> None:
    """Finds the parameters that any rank used. A step skips the others: they have no gradient and are not decayed.

    Collective. Raises [`LifecycleError`] on all ranks if they hold the gradients of different backwards, or clip
    differently (`norm_type`, `max_norm`), and errors of earlier steps that any rank has detected since.
    """
    own = [engine.schedule.num_dropped, engine.schedule.num_backwards, norm_type, max_norm]
    numbers = torch.tensor(own, dtype=torch.float64).view(torch.uint8)
    learned = [engine.late_checks.has_failed()] if engine.runs_ahead else []
    used = [each for gradient in engine.gradients for each in gradient.count_used()]
    row = torch.cat([numbers, torch.tensor([*used, *learned], dtype=torch.uint8)])
    rows = engine.comm.on_host.all_gather_vector(row, what="the optimizer's step")
    table = rows[:, : numbers.numel()].reshape(-1).view(torch.float64).view(-1, len(own))
    dropped, total, kinds, bounds = table.unbind(1)
    anywhere = rows[:, numbers.numel() :].any(dim=0).tolist()
    _refuse_dropped(engine, dropped.int().tolist(), total.int().tolist())
    _warn_of_uncleared(engine)
    if learned and anywhere.pop():
        engine.clear_gradients()  # they have not been clipped as requested
        engine.late_checks.settle()
    clips = table[:, 2:].nan_to_num(nan=-1.0).tolist()
    rank = next((rank for rank, each in enumerate(clips) if each != clips[0]), None)
    if rank is not None:
        raise LifecycleError(
            f"clip_grad_norm_: rank 0 clips to {bounds[0]} by the norm of order {kinds[0]}, rank {rank} to "
            f"{bounds[rank]} of order {kinds[rank]} (inf: no clipping, order {NO_NORM:g}: no call); use the "
            "same arguments on all ranks"
        )
    flags = iter(anywhere)
    for gradient in engine.gradients:
        gradient.used = [next(flags) for _ in gradient.used]
        # kept by `zero_grad(set_to_none=False)`, with no backward since that would have reduced it
        if any(gradient.used) and not (gradient.is_reduced or gradient.is_due_at_step):
            gradient.become_zero()


def _refuse_dropped(engine: "ZeroEngine", dropped: list[int], total: list[int]) -> None:
    """Raises [`LifecycleError`] if some ranks have dropped gradients that others hold, for example after an exception
    on one rank. All ranks then drop theirs. If no rank has dropped any and a rank has run fewer backwards than others,
    warns once: only stages without collectives in backward permit this, and a backward that raised before its first
    gradient does not count.

    Args:
        dropped, total: By rank, how many backwards since the last step it has dropped, and how many it has run.
    """
    held = [has_run - has_dropped for has_run, has_dropped in zip(total, dropped)]
    if len(set(held)) == 1:
        return
    rank, fullest = held.index(min(held)), held.index(max(held))
    if len(set(dropped)) > 1:
        engine.clear_gradients()
        engine.schedule.end_step()
        raise LifecycleError(
            f"optimizer step: rank {rank} has dropped gradients that rank {fullest} holds, as after an exception in "
            "backward, so all ranks drop theirs and take no step; after an exception, end the run, or call "
            "zero_grad() on all ranks"
        )
    if not engine.schedule.was_uneven:
        engine.schedule.was_uneven = True
        if engine.comm.rank in (0, rank):
            logger.warning(
                "hf_zero: rank %d has run %d backwards in this step, rank %d has run %d; missing gradients count as "
                "zero in the average (logged once)",
                *(rank, total[rank], fullest, total[fullest]),
            )


def _warn_of_uncleared(engine: "ZeroEngine") -> None:
    """Warns, once, of gradients that plain torch would have added to those of the previous step."""
    schedule = engine.schedule
    if schedule.num_backwards and not (schedule.is_cleared or schedule.was_uncleared):
        schedule.was_uncleared = True
        if engine.comm.rank == 0:
            logger.warning(
                "hf_zero: no zero_grad() was called between two steps; a step drops its gradients, but plain torch "
                "would add the next ones to them; call zero_grad() after each step (logged once)"
            )
