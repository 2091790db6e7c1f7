"""What all ranks determine about the averaged gradients before a step: their norm, and whether they are finite."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import NonFiniteError


# torch's fp32 norm of a long CPU tensor has an error of 1e-5 at 1 M elements and 3e-4 at 10 M. Norms of rows of this
# size, combined in fp64, have an error of 4e-9 at the same speed.
ROW_NUMEL = 1024
WHAT = "the gradient norm"


def measure_norm(engine: ZeroEngine, norm_type: float = 2.0) -> Tensor:
    """Returns the norm of the averaged gradients over all parameters and ranks, and stores it in `engine.grad_norm`.
    It takes one exchange of a few numbers, and is finite only if all gradients are.

    Every rank measures its own part of the gradients. The parts are the same at every stage, so the result does not
    depend on the stage. With tensor parallelism, gradients of divided parameters are measured by each tensor-parallel
    rank, and those of replicated parameters only by the first, so that all ranks get the same norm.

    Args:
        norm_type (`float`): order of the norm, including `inf`.

    Returns:
        `Tensor`: 0-d fp32, equal on every rank. On the device if the host does not wait for it, otherwise on the CPU.
    """
    comm, reduced = engine.comm, [gradient for gradient in engine.gradients if gradient.is_reduced]
    add = torch.Tensor.amax if norm_type == float("inf") else torch.Tensor.sum
    own = _measure([gradient for gradient in reduced if not gradient.flat.is_divided], comm, norm_type)
    if engine.divided_over is not None:
        divided = _measure([gradient for gradient in reduced if gradient.flat.is_divided], comm, norm_type)
        own = torch.cat([own, divided])
    total = add(_gathered(engine, comm, own), dim=0)
    if engine.divided_over is not None:
        rows = _gathered(engine, engine.divided_over, total.to(comm.device))
        total = add(torch.stack([rows[0, 0], add(rows[:, 1], dim=0)]), dim=0)
    total = total.reshape(())
    engine.grad_norm = (total if norm_type == float("inf") else total.pow(1.0 / norm_type)).float()
    return engine.grad_norm


def _gathered(engine: ZeroEngine, comm: Comm, values: Tensor) -> Tensor:
    """Returns the values of all ranks as [ranks, values], on the device if the host does not wait for it."""
    return (comm.all_gather_rows if engine.runs_ahead else comm.all_gather_vector)(values, what=WHAT)


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
