"""Gradients that are not finite: noticed before a step is taken on them, which would leave no weight as it was."""

import torch

from hf_zero.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.unit import Unit
from hf_zero.optim.norm import global_norm


def norm_of(engine: ZeroEngine) -> torch.Tensor:
    """Returns a norm of the averaged gradients, the one that was measured already if there is one. All ranks call it.

    Returns:
        `Tensor`: 0-d, equal on every rank, finite if and only if all gradients are (and their norm can be told).
    """
    if engine.grad_norm is None:
        reduced = [gradient for gradient in engine.gradients() if gradient.is_reduced]
        engine.grad_norm = global_norm(reduced, engine.comm, float("inf"), divided_over=engine.divided_over)
    return engine.grad_norm


def is_finite(unit: Unit) -> bool:
    """Whether this rank's range of a unit's averaged gradients is finite."""
    return all(bool(torch.isfinite(g.owned_range()).all()) for g in unit.gradients if g.is_reduced)


def trace(engine: ZeroEngine) -> str:
    """Says from where gradients that are not finite came: the rank, and the unit where backward met them first.
    All ranks call it.
    """
    units = [unit for unit in [*reversed(engine.blocks), engine.root] if unit.gradients]
    bad = [not is_finite(unit) for unit in units]
    told = [not _is_finite_here(unit) for unit in units]
    own = torch.tensor([bad, told], dtype=torch.uint8, device=engine.comm.device).view(-1)
    rows = engine.comm.all_gather_vector(own).view(engine.comm.num_ranks, 2, len(units)).bool().cpu()
    met = rows[:, 0].any(dim=0).tolist()
    if not any(met):
        return _of_ranks(rows[:, 1].any(dim=1).tolist(), engine.comm)
    first = met.index(True)
    where = rows[:, 1, first] if rows[:, 1, first].any() else rows[:, 1].any(dim=1)
    begins = ", where backward begins," if first == 0 else " as backward goes"
    return f"{_of_ranks(where.tolist(), engine.comm)}, first in unit {units[first].name!r}{begins}"


def _is_finite_here(unit: Unit) -> bool:
    """Whether what this rank has added to a unit's gradients was finite, as far as it can be told afterwards."""
    return all(g.witness is None or bool(torch.isfinite(g.witness)) for g in unit.gradients)


def _of_ranks(told: list[bool], comm: Comm) -> str:
    ranks = [str(rank) for rank, is_told in enumerate(told) if is_told]
    if comm.num_ranks == 1:
        return "of rank 0"
    if not ranks:
        return "in the sum over the ranks"
    if len(ranks) == comm.num_ranks:
        return "of all ranks"
    return f"of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
