"""What all ranks determine about the gradients before a step: their norm, whether they are finite, and which exist."""

import logging
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError, LifecycleError, NonFiniteError


# torch's fp32 norm of a long CPU tensor has an error of 1e-5 at 1 M elements and 3e-4 at 10 M. Norms of rows of this
# size, combined in fp64, have an error of 4e-9 at the same speed.
ROW_NUMEL = 1024
WHAT = "the gradient norm"

logger = logging.getLogger(__name__)


def measure_norm(engine: ZeroEngine, norm_type: float = 2.0, max_norm: float = float("inf")) -> Tensor:
    """Returns the norm of the averaged gradients over all parameters and ranks, and stores it in `engine.grad_norm`.
    It takes one exchange of a few numbers, and is finite only if all gradients are.

    Every rank measures its own part of the gradients. The parts are the same at every stage, so the result does not
    depend on the stage. With tensor parallelism, gradients of divided parameters are measured by each tensor-parallel
    rank, and those of replicated parameters only by the first, so that all ranks get the same norm.

    Args:
        norm_type (`float`): order of the norm, including `inf`.
        max_norm (`float`): the norm to which the caller clips, or `inf` for no clipping.

    Returns:
        `Tensor`: 0-d fp32, equal on every rank. On the device if the host does not wait for it, otherwise on the CPU;
            0 if the step is skipped, see `leaves_out`.
    """
    for name, value in {"max_norm": max_norm, "norm_type": norm_type}.items():
        if not isinstance(value, Real | Tensor) or value < 0:
            raise ConfigError(f"clip_grad_norm_: {name} {value!r} is not a number of 0 or more; give one")
    comm, reduced = engine.comm, [gradient for gradient in engine.gradients if gradient.is_reduced]
    whole = _measure([gradient for gradient in reduced if not gradient.flat.is_divided], comm, norm_type)
    add = torch.Tensor.amax if norm_type == float("inf") else torch.Tensor.sum
    if engine.divided_over is None:
        total = add(_gathered(engine, whole, norm_type, max_norm), dim=0)
    else:
        divided = _measure([gradient for gradient in reduced if gradient.flat.is_divided], comm, norm_type)
        rows = _gathered(engine, torch.cat([whole, divided]), norm_type, max_norm)
        over = engine.divided_over
        gather = over.all_gather_rows if engine.runs_ahead else over.all_gather_vector
        rows = gather(add(rows, dim=0).to(comm.device), what=WHAT)
        total = add(torch.stack([rows[0, 0], add(rows[:, 1], dim=0)]), dim=0)
    total = total.reshape(())
    engine.grad_norm = (total if norm_type == float("inf") else total.pow(1.0 / norm_type)).float()
    return engine.grad_norm


def _gathered(engine: ZeroEngine, values: Tensor, norm_type: float, max_norm: float) -> Tensor:
    """Returns the values of all ranks as [ranks, values]. Raises [`LifecycleError`] if ranks clip differently."""
    comm, has_values = engine.comm, not values.is_meta  # a simulated step has no values
    if engine.runs_ahead:
        own = torch.tensor([norm_type, max_norm, engine.schedule.num_dropped], dtype=torch.float64)
        rows = comm.on_host.all_gather_vector(own, what=WHAT)
        values = comm.all_gather_rows(values, what=WHAT)
    else:  # a single exchange
        own = values.new_tensor([norm_type, max_norm, engine.schedule.num_dropped])
        rows = comm.all_gather_vector(torch.cat([values, own]), what=WHAT)
        values = rows[:, :-3].contiguous()
    limits = rows[:, -3:].tolist() if has_values else []
    for rank, (kind, bound, _) in enumerate(limits):
        if (kind, bound) != (norm_type, max_norm) and max_norm == max_norm:
            raise LifecycleError(
                f"clip_grad_norm_: rank {comm.rank} clips to {max_norm} by the norm of order {norm_type}, rank {rank} "
                f"to {bound} of order {kind} (inf: no clipping); use the same arguments on all ranks"
            )
    return torch.zeros_like(values) if leaves_out(engine, [int(dropped) for *_, dropped in limits]) else values


def leaves_out(engine: ZeroEngine, num_dropped: list[int]) -> bool:
    """Returns whether the step is skipped because ranks have dropped the gradients of different numbers of backwards
    (`Schedule.num_dropped`), for example after an exception on one rank. All ranks then drop theirs.

    Collective; `num_dropped` contains the numbers of all ranks. With tensor-parallel ranks, not all of which would
    learn of it, raises [`LifecycleError`] instead."""
    if len(set(num_dropped)) <= 1:
        return engine.leaves_step_out
    rank = num_dropped.index(max(num_dropped))
    found = f"rank {rank} has dropped gradients, as after an interrupted backward, but not all ranks have"
    engine.clear_gradients()
    engine.schedule.reset()
    engine.schedule.num_dropped, engine.leaves_step_out = 0, True
    if engine.divided_over is not None:
        raise LifecycleError(f"optimizer step: {found}; call zero_grad() on all ranks after an exception")
    if engine.comm.rank in (0, rank):
        logger.warning("hf_zero: %s; the step is skipped on all ranks", found)
    return True


def agree_on_used(engine: ZeroEngine) -> bool:
    """Finds the parameters that no rank used. A step skips them: they have no gradient and are not decayed.

    The ranks exchange one vector of values known on the host, and raise errors of earlier steps that any of them has
    detected since. Returns whether the step is to be taken, see `leaves_out`.
    """
    gradients = engine.gradients
    own = [used for gradient in gradients for used in gradient.count_used()]
    if not own:
        return True
    learned = [engine.late_checks.has_failed()] if engine.runs_ahead else []
    mark = torch.tensor([engine.schedule.num_dropped, engine.schedule.num_backwards]).view(torch.uint8)
    flags = torch.cat([mark, torch.tensor([*own, *learned], dtype=torch.uint8)])
    rows = engine.comm.on_host.all_gather_vector(flags, what="the optimizer's step")
    dropped, counts = rows[:, : mark.numel()].reshape(-1).view(torch.int64).view(-1, 2).unbind(1)
    if leaves_out(engine, dropped.tolist()):
        return False
    _warn_of_fewer(engine, counts.tolist())
    _warn_of_uncleared(engine)
    anywhere = rows[:, mark.numel() :].amax(dim=0).tolist()
    if learned and anywhere.pop():
        engine.clear_gradients()  # they have not been clipped as requested
        engine.late_checks.settle()
    for gradient in gradients if not all(own) else ():
        gradient.used = [bool(flag) for flag in anywhere[: len(gradient.used)]]
        anywhere = anywhere[len(gradient.used) :]
    return True


def _warn_of_fewer(engine: ZeroEngine, counts: list[int]) -> None:
    """Warns, once, if a rank has run fewer backwards in this step than others. Only stages without collectives in
    backward permit this. A backward that failed before its first gradient does not count."""
    if len(set(counts)) > 1 and not engine.schedule.was_uneven:
        engine.schedule.was_uneven = True
        rank = counts.index(min(counts))
        if engine.comm.rank in (0, rank):
            logger.warning(
                "hf_zero: rank %d has run %d backwards in this step, rank %d has run %d; missing gradients count as "
                "zero in the average (logged once)",
                *(rank, counts[rank], counts.index(max(counts)), max(counts)),
            )


def _warn_of_uncleared(engine: ZeroEngine) -> None:
    """Warns, once, of gradients that plain torch would have added to those of the previous step."""
    schedule = engine.schedule
    if schedule.is_uncleared and not schedule.was_uncleared:
        schedule.was_uncleared = True
        if engine.comm.rank == 0:
            logger.warning(
                "hf_zero: no zero_grad() was called between two steps; a step drops its gradients, but plain torch "
                "would add the next ones to them; call zero_grad() after each step (logged once)"
            )


def _measure(gradients: list[Gradient], comm: Comm, norm_type: float) -> Tensor:
    """Returns the contribution of this rank's ranges to the norm, before the p-th root, as one fp64 number."""

    def measure(chosen: list[Gradient]) -> None:
        for each in chosen:
            each.row_norms = [_row_norms(part, norm_type) for part in _rows(each.own_part())]

    on_host = [gradient for gradient in gradients if gradient.is_on_host]
    measure([gradient for gradient in gradients if not gradient.is_on_host])
    if on_host:  # on the thread that uses all cores of this rank
        on_host[0].flat.masters.transfer.bus.later(partial(measure, on_host), lane="update").wait()
    parts = [part for gradient in gradients for part in gradient.row_norms]
    here = [part for part in parts if part.device == comm.device]
    if on_host and here:  # one copy of all
        copies = iter(torch.cat(here).cpu().split([part.numel() for part in here]))
        parts = [next(copies) if part.device == comm.device else part for part in parts]
    norms = torch.cat(parts).double() if parts else torch.zeros(1, dtype=torch.float64, device=comm.device)
    return (norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()).reshape(1)


def _row_norms(rows: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)  # norms of bf16 values would be rounded to bf16
    return torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)


def _rows(flat: Tensor) -> list[Tensor]:
    """Returns a 1-D tensor as a matrix with rows of equal length, and the remaining elements as one more row."""
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    return [part for part in (flat[:whole].view(-1, ROW_NUMEL), flat[whole:].view(1, -1)) if part.numel()]


def is_finite(unit: Unit) -> bool:
    """Whether this rank's range of a unit's averaged gradients is finite."""
    return all(bool(each.owned_range().isfinite().all()) for each in unit.gradients if each.is_reduced)


def known_norm(engine: ZeroEngine) -> Tensor:
    """Returns the measured norm, or measures the fastest one. Collective."""
    return measure_norm(engine, float("inf")) if engine.grad_norm is None else engine.grad_norm


def heeds_found_inf(inner: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer can skip steps by `found_inf`. SGD with momentum cannot: after a skipped first step it
    keeps an uninitialized momentum buffer."""
    return not (isinstance(inner, torch.optim.SGD) and any(group["momentum"] for group in inner.param_groups))


def expect_finite(engine: ZeroEngine, num_steps: int, undo: Callable[[], None]) -> Tensor:
    """Returns a flag for fused optimizers (0-d fp32, on the device): 1 to skip the step because gradients are not
    finite, else 0. When the ranks learn later that it was skipped, all of them call `undo` and raise."""
    is_finite = known_norm(engine).isfinite()
    engine.late_checks.expect(is_finite, partial(refuse_nonfinite, engine, num_steps, norms_by_unit(engine)), undo)
    return is_finite.logical_not().float()


def norms_by_unit(engine: ZeroEngine) -> dict[str, list[Tensor]]:
    """Returns the norms that this rank has measured, by unit in the order of backward. They outlive the gradients."""
    return {
        unit.name: [norms for gradient in unit.gradients for norms in gradient.row_norms or ()]
        for unit in engine.reduction_order
        if unit.is_trainable
    }


def describe_nonfinite(engine: ZeroEngine, num_steps: int, norms: dict[str, list[Tensor]]) -> str:
    """Returns a message with the step, and with the unit in which backward met the first gradient that is not finite.
    Collective."""
    is_bad = [not all(bool(part.isfinite().all()) for part in parts) for parts in norms.values()]
    bad = torch.tensor(is_bad, dtype=torch.uint8)
    for comm in (engine.comm, engine.divided_over):
        bad = bad if comm is None else comm.on_host.all_gather_vector(bad).amax(dim=0)
    found = [name for name, is_bad in zip(norms, bad.tolist()) if is_bad]
    where = f"first in unit {found[0]!r}" if found else "only in the norm over all units"
    begins = ", where backward begins" if found[:1] == list(norms)[:1] else ""
    return f"after {num_steps} optimizer steps: the gradient is not finite, {where}{begins}"


def refuse_nonfinite(
    engine: ZeroEngine, num_steps: int, norms: dict[str, list[Tensor]], *, was_updated: bool = False
) -> NoReturn:
    """Raises [`NonFiniteError`] with the unit. `was_updated`: some units were already updated in backward.
    Collective."""
    done = "units before it were updated in backward" if was_updated else "no step was taken on it"
    is_sharded = any(unit.is_sharded for unit in engine.units)
    raise NonFiniteError(
        f"{describe_nonfinite(engine, num_steps, norms)}; {done}: look at the batch, the loss and the learning rate, "
        "or skip such steps with nonfinite='skip' (--zero_nonfinite skip)"
        + ("; a block's parameter that is used outside of the block after its forward is NaN in backward" * is_sharded)
    )
