"""Ranges that a rank updates but does not hold: their gradients and values come to it, and the new values go back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.config import Residency
from hf_zero.engine.flat import Flat
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.optim.runs import Run, Share


@dataclass(frozen=True)
class Move:
    """A range of a parameter that one rank holds and another updates."""

    share: Share
    start: int
    stop: int
    holder: int
    updater: int


@dataclass(frozen=True)
class Visit:
    """A run while its values are here: 1-D gradient and values."""

    run: Run
    grad: Tensor
    values: Tensor

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start - self.run.start : stop - self.run.start]


class Exchange:
    """Moves the ranges of one optimizer's parameters, one unit at a time: no rank has more than that beside its own.

    All ranks know all moves and make those of a unit at once, in one order.

    Args:
        comm (`Comm`): the ranks.
        shares (`list[Share]`): the parameters.
        runs (`list[Run]`): what this rank updates of them.
    """

    def __init__(self, comm: Comm, shares: list[Share], runs: list[Run]):
        self._comm = comm
        # a backend of the device's own knows no memory of the host
        self._host_comm = comm.aside("update") if any(share.unit.is_away for share in shares) else comm
        self._moves: dict[Unit, list[Move]] = {share.unit: [] for share in shares}
        for share in shares:
            self._moves[share.unit] += _moves(share)
        self._visiting: dict[Unit, list[Run]] = {}
        for run in runs:
            if not run.is_held:
                self._visiting.setdefault(run.unit, []).append(run)
        self._visits: dict[tuple[Gradient, int], Visit] = {}  # while they last

    @property
    def units(self) -> list[Unit]:
        """The units of which any rank updates parameters."""
        return list(self._moves)

    def bring(self, unit: Unit) -> None:
        """Lends this rank's runs of a unit their gradients and values."""
        self._visits = {
            (run.gradient, run.indices[0]): _visit(run)
            for run in self._visiting.get(unit, ())
            if run.gradient.used[run.indices[0]]
        }
        sends, receives = [], []
        for move in self._used_moves(unit):
            gradient, flat = move.share.gradient, move.share.gradient.flat
            if move.holder == self._comm.rank:
                sends.append((_part(gradient.owned_range(), flat.owned, move), move.updater))
                if not _is_at_hand(flat):
                    sends.append((_part(flat.master, flat.held, move), move.updater))
            elif move.updater == self._comm.rank:
                visit = self._visits[gradient, move.share.index]
                receives.append((visit.part(visit.grad, move.start, move.stop), move.holder))
                if not _is_at_hand(flat):
                    receives.append((visit.part(visit.values, move.start, move.stop), move.holder))
        self._exchange(unit, sends, receives)
        for visit in self._visits.values():
            param = visit.run.param
            param.data = visit.values.view(param.shape)
            param.grad = visit.grad.view(param.shape).to(param.dtype)

    def take_back(self, unit: Unit) -> None:
        """Sends the new values to who holds them; nothing of them stays here."""
        sends, receives = [], []
        for move in self._used_moves(unit):
            flat = move.share.gradient.flat
            if move.updater == self._comm.rank:
                visit = self._visits[move.share.gradient, move.share.index]
                sends.append((visit.part(visit.values, move.start, move.stop), move.holder))
            elif move.holder == self._comm.rank:
                receives.append((_part(flat.master, flat.held, move), move.updater))
        self._exchange(unit, sends, receives)
        for visit in self._visits.values():
            run, (low, high) = visit.run, _own_part(visit.run)
            if low < high:
                held = run.flat.held[0]
                run.flat.master[low - held : high - held].copy_(visit.part(visit.values, low, high))
            run.param.data = run.param.new_empty(1).expand(run.param.shape)
            run.param.grad = None
        self._visits = {}

    def _exchange(self, unit: Unit, sends: list, receives: list) -> None:
        comm = self._host_comm if unit.is_away else self._comm
        comm.exchange(sends, receives, what=unit.name).wait()

    def _used_moves(self, unit: Unit) -> Iterator[Move]:
        """Those of parameters that have a gradient, on which all ranks agree, and that concern this rank."""
        for move in self._moves[unit]:
            if move.share.gradient.used[move.share.index] and self._comm.rank in (move.holder, move.updater):
                yield move


def _moves(share: Share) -> Iterator[Move]:
    flat = share.gradient.flat
    if flat.plan.master is Residency.REPLICATED:
        return
    for updater, (start, stop) in enumerate(share.ranges):
        for holder in range(flat.layout.num_ranks):
            low, high = max(start, flat.layout.owned(holder)[0]), min(stop, flat.layout.owned(holder)[1])
            if low < high and holder != updater:
                yield Move(share, low, high, holder, updater)


def _visit(run: Run) -> Visit:
    """Memory for a run, with what this rank has of it already."""
    flat, numel = run.flat, run.stop - run.start
    grad = torch.empty(numel, dtype=run.gradient.dtype, device=flat.master.device)
    values = torch.empty(numel, dtype=flat.master.dtype, device=flat.master.device)
    if _is_at_hand(flat):
        values.copy_(flat.full[run.start : run.stop])
    visit, (low, high) = Visit(run, grad, values), _own_part(run)
    if low < high:
        visit.part(grad, low, high).copy_(run.gradient.owned_range()[low - flat.owned[0] : high - flat.owned[0]])
        visit.part(values, low, high).copy_(flat.master[low - flat.held[0] : high - flat.held[0]])
    return visit


def _own_part(run: Run) -> tuple[int, int]:
    """The range of a run that this rank holds; empty where the second is not the greater."""
    return max(run.start, run.flat.held[0]), min(run.stop, run.flat.held[1])


def _part(tensor: Tensor, covers: tuple[int, int], move: Move) -> Tensor:
    return tensor[move.start - covers[0] : move.stop - covers[0]]


def _is_at_hand(flat: Flat) -> bool:
    """Whether every rank can read all masters where they lie: they are the compute copies, or common memory."""
    return flat.rests_whole and not flat.has_master
