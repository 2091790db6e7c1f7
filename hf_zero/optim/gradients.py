"""The norm of all gradients, and whether they are finite, so that no step is taken on those that are not."""

from numbers import Real

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError, LifecycleError


# torch's fp32 norm of a long CPU tensor is off by 1e-5 at 1 M elements and 3e-4 at 10 M; by rows of so many elements,
# which are then added in fp64, it is exact to 4e-9, and no slower.
ROW_NUMEL = 1024
WHAT = "the gradient norm"


def measure_norm(engine: ZeroEngine, norm_type: float = 2.0, max_norm: float = float("inf")) -> Tensor:
    """Returns the norm of the averaged gradients over all parameters and ranks, by one exchange of few numbers, and
    sets `engine.grad_norm`. It is finite only if all gradients are.

    Every rank measures the ranges that it owns, at every stage the same ones: the result does not depend on the stage.
    Gradients of what tensor-parallel ranks divide are measured by each of them, those of what is whole on all of them
    by the first alone, so that all of them see one norm.

    Args:
        engine (`ZeroEngine`): the sharded model. All ranks call it.
        norm_type (`float`): order of the norm, `inf` included.
        max_norm (`float`): to what the caller clips it; `inf` for not at all.

    Returns:
        `Tensor`: 0-d fp32 on the CPU, equal on every rank.

    Raises:
        `LifecycleError`: on all ranks, when not all clip alike: shards of one parameter would be scaled unlike.
        `ConfigError`: for a bound or an order that is none.
    """
    for name, value in {"max_norm": max_norm, "norm_type": norm_type}.items():
        if not isinstance(value, Real | Tensor) or value < 0:
            raise ConfigError(f"clip_grad_norm_: {name} {value!r} is not a number of 0 or more; give one")
    comm, reduced = engine.comm, [gradient for gradient in engine.gradients() if gradient.is_reduced]
    whole = _measure([gradient for gradient in reduced if not gradient.flat.is_divided], comm, norm_type)
    add = torch.Tensor.amax if norm_type == float("inf") else torch.Tensor.sum
    if engine.divided_over is None:
        total = add(_gathered(comm, whole, norm_type, max_norm), dim=0)
    else:
        divided = _measure([gradient for gradient in reduced if gradient.flat.is_divided], comm, norm_type)
        rows = _gathered(comm, torch.cat([whole, divided]), norm_type, max_norm)
        rows = engine.divided_over.all_gather_vector(add(rows, dim=0).to(comm.device), what=WHAT)
        total = add(torch.stack([rows[0, 0], add(rows[:, 1], dim=0)]), dim=0)
    total = total.reshape(())
    engine.grad_norm = (total if norm_type == float("inf") else total.pow(1.0 / norm_type)).float()
    return engine.grad_norm


def _gathered(comm: Comm, values: Tensor, norm_type: float, max_norm: float) -> Tensor:
    """Returns the values of all ranks, [ranks, values], and refuses ranks that clip differently."""
    own = [values.new_full((1,), number) for number in (norm_type, max_norm)]  # a copy from the host would wait
    rows = comm.all_gather_vector(torch.cat([values, *own]), what=WHAT)
    limits = rows[:, -2:].tolist() if not values.is_meta else []  # a simulated step has no values
    for rank, (kind, bound) in enumerate(limits):
        if (kind, bound) != (norm_type, max_norm) and max_norm == max_norm:
            raise LifecycleError(
                f"clip_grad_norm_: rank {comm.rank} clips to {max_norm} by the norm of order {norm_type}, rank {rank} "
                f"to {bound} of order {kind} (inf: not at all); call it on all ranks alike"
            )
    return rows[:, :-2].contiguous()


def _measure(gradients: list[Gradient], comm: Comm, norm_type: float) -> Tensor:
    """Returns the part of this rank's ranges in the norm, before the root: one number, fp64."""
    owned = [part for gradient in gradients for part in _rows(gradient.owned_range())]
    if owned:
        parts = [_row_norms(part, norm_type) for part in owned]
        if len({part.device for part in parts}) > 1:  # some gradients rest on the host
            parts = [part.cpu() for part in parts]
        norms = torch.cat(parts).double()
    else:
        norms = torch.zeros(1, dtype=torch.float64, device=comm.device)
    return (norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()).reshape(1)


def _row_norms(rows: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)  # a norm of bf16 numbers would be rounded to bf16
    return torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)


def _rows(flat: Tensor) -> list[Tensor]:
    """Returns a 1-D tensor as rows of equal length, and the rest as one more row."""
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    return [part for part in (flat[:whole].view(-1, ROW_NUMEL), flat[whole:].view(1, -1)) if part.numel()]


def is_finite(unit: Unit) -> bool:
    """Whether this rank's range of a unit's averaged gradients is finite."""
    return all(bool(torch.isfinite(g.owned_range()).all()) for g in unit.gradients if g.is_reduced)


def trace(engine: ZeroEngine) -> str:
    """Returns the origin of gradients that are not finite: the rank, and the unit that backward came to first. All
    ranks call it."""
    units = [unit for unit in [*reversed(engine.blocks), engine.root] if unit.gradients]
    bad = [not is_finite(unit) for unit in units]
    bad_here = [not _is_finite_here(unit) for unit in units]
    own = torch.tensor([bad, bad_here], dtype=torch.uint8, device=engine.comm.device).view(-1)
    rows = engine.comm.all_gather_vector(own).view(engine.comm.num_ranks, 2, len(units)).bool().cpu()
    met = rows[:, 0].any(dim=0).tolist()
    if not any(met):
        return _of_ranks(rows[:, 1].any(dim=1).tolist(), engine.comm)
    first = met.index(True)
    where = rows[:, 1, first] if rows[:, 1, first].any() else rows[:, 1].any(dim=1)
    begins = ", where backward begins," if first == 0 else " as backward goes"
    return f"{_of_ranks(where.tolist(), engine.comm)}, first in unit {units[first].name!r}{begins}"


def _is_finite_here(unit: Unit) -> bool:
    """Whether this rank's summand of a unit's gradients was finite, as far as its witness tells."""
    return all(g.witness is None or bool(torch.isfinite(g.witness)) for g in unit.gradients)


def _of_ranks(is_bad: list[bool], comm: Comm) -> str:
    ranks = [str(rank) for rank, bad in enumerate(is_bad) if bad]
    if comm.num_ranks == 1:
        return "of rank 0"
    if not ranks:
        return "in the sum over the ranks"
    if len(ranks) == comm.num_ranks:
        return "of all ranks"
    return f"of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
