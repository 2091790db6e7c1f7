"""Exchanges ranges that a rank updates but does not hold: gradients and values come, and new values go back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.config import Residency
from hf_zero.engine.flat import Flat
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.optim.flat_slices import FlatSlice, ParamPartition


@dataclass(frozen=True)
class Move:
    """A range of a parameter that one rank holds and another updates."""

    partition: ParamPartition
    start: int
    stop: int
    holder: int
    updater: int


@dataclass(frozen=True)
class BorrowedSlice:
    """A slice of another rank's shard while its gradient and values, 1-D, are on this rank."""

    flat_slice: FlatSlice
    grad: Tensor
    values: Tensor

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start - self.flat_slice.start : stop - self.flat_slice.start]


class Exchange:
    """Moves the ranges of one optimizer's parameters, one unit at a time: no rank has more than that beside its own.

    All ranks know all moves and make those of a unit at once, in one order.

    Args:
        comm (`Comm`): the ranks.
        partitions (`list[ParamPartition]`): the parameters.
        slices (`list[FlatSlice]`): what this rank updates of them.
    """

    def __init__(self, comm: Comm, partitions: list[ParamPartition], slices: list[FlatSlice]):
        self._comm = comm
        # a backend of the device's own knows no memory of the host
        self._host_comm = (
            comm.side_group("update") if any(partition.unit.is_away for partition in partitions) else comm
        )
        self._moves: dict[Unit, list[Move]] = {partition.unit: [] for partition in partitions}
        for partition in partitions:
            self._moves[partition.unit] += _moves(partition)
        self._to_borrow: dict[Unit, list[FlatSlice]] = {}
        for flat_slice in slices:
            if not flat_slice.is_held:
                self._to_borrow.setdefault(flat_slice.unit, []).append(flat_slice)
        self._borrowed: dict[tuple[Gradient, int], BorrowedSlice] = {}  # while they last

    @property
    def units(self) -> list[Unit]:
        """The units of which any rank updates parameters."""
        return list(self._moves)

    def borrow(self, unit: Unit) -> None:
        """Brings the gradients and values of a unit's slices that this rank updates and does not hold."""
        self._borrowed = {
            (flat_slice.gradient, flat_slice.indices[0]): _borrow(flat_slice)
            for flat_slice in self._to_borrow.get(unit, ())
            if flat_slice.gradient.used[flat_slice.indices[0]]
        }
        sends, receives = [], []
        for move in self._used_moves(unit):
            gradient, flat = move.partition.gradient, move.partition.gradient.flat
            if move.holder == self._comm.rank:
                sends.append((_part(gradient.owned_range(), flat.owned, move), move.updater))
                if not _is_at_hand(flat):
                    sends.append((_part(flat.master, flat.held, move), move.updater))
            elif move.updater == self._comm.rank:
                borrowed = self._borrowed[gradient, move.partition.index]
                receives.append((borrowed.part(borrowed.grad, move.start, move.stop), move.holder))
                if not _is_at_hand(flat):
                    receives.append((borrowed.part(borrowed.values, move.start, move.stop), move.holder))
        self._exchange(unit, sends, receives)
        for borrowed in self._borrowed.values():
            param = borrowed.flat_slice.param
            param.data = borrowed.values.view(param.shape)
            param.grad = borrowed.grad.view(param.shape).to(param.dtype)

    def give_back(self, unit: Unit) -> None:
        """Sends the new values to the ranks that hold them; nothing of them stays here."""
        sends, receives = [], []
        for move in self._used_moves(unit):
            flat = move.partition.gradient.flat
            if move.updater == self._comm.rank:
                borrowed = self._borrowed[move.partition.gradient, move.partition.index]
                sends.append((borrowed.part(borrowed.values, move.start, move.stop), move.holder))
            elif move.holder == self._comm.rank:
                receives.append((_part(flat.master, flat.held, move), move.updater))
        self._exchange(unit, sends, receives)
        for borrowed in self._borrowed.values():
            flat_slice, (low, high) = borrowed.flat_slice, _own_part(borrowed.flat_slice)
            if low < high:
                held = flat_slice.flat.held[0]
                flat_slice.flat.master[low - held : high - held].copy_(borrowed.part(borrowed.values, low, high))
            flat_slice.param.data = flat_slice.param.new_empty(1).expand(flat_slice.param.shape)
            flat_slice.param.grad = None
        self._borrowed = {}

    def _exchange(self, unit: Unit, sends: list, receives: list) -> None:
        comm = self._host_comm if unit.is_away else self._comm
        comm.exchange(sends, receives, what=unit.name).wait()

    def _used_moves(self, unit: Unit) -> Iterator[Move]:
        """Yields the moves that concern this rank, of parameters that have a gradient, on which all ranks agree."""
        for move in self._moves[unit]:
            if move.partition.gradient.used[move.partition.index] and self._comm.rank in (move.holder, move.updater):
                yield move


def _moves(partition: ParamPartition) -> Iterator[Move]:
    flat = partition.gradient.flat
    if flat.plan.master is Residency.REPLICATED:
        return
    for updater, (start, stop) in enumerate(partition.ranges):
        for holder in range(flat.layout.num_ranks):
            low, high = max(start, flat.layout.owned(holder)[0]), min(stop, flat.layout.owned(holder)[1])
            if low < high and holder != updater:
                yield Move(partition, low, high, holder, updater)


def _borrow(flat_slice: FlatSlice) -> BorrowedSlice:
    """Allocates memory for a slice, with what this rank has of it already."""
    flat, numel = flat_slice.flat, flat_slice.stop - flat_slice.start
    grad = torch.empty(numel, dtype=flat_slice.gradient.dtype, device=flat.master.device)
    values = torch.empty(numel, dtype=flat.master.dtype, device=flat.master.device)
    if _is_at_hand(flat):
        values.copy_(flat.full[flat_slice.start : flat_slice.stop])
    borrowed, (low, high) = BorrowedSlice(flat_slice, grad, values), _own_part(flat_slice)
    if low < high:
        borrowed.part(grad, low, high).copy_(
            flat_slice.gradient.owned_range()[low - flat.owned[0] : high - flat.owned[0]]
        )
        borrowed.part(values, low, high).copy_(flat.master[low - flat.held[0] : high - flat.held[0]])
    return borrowed


def _own_part(flat_slice: FlatSlice) -> tuple[int, int]:
    """Returns the range of a slice that this rank holds; empty where the second is not the greater."""
    return max(flat_slice.start, flat_slice.flat.held[0]), min(flat_slice.stop, flat_slice.flat.held[1])


def _part(tensor: Tensor, covers: tuple[int, int], move: Move) -> Tensor:
    return tensor[move.start - covers[0] : move.stop - covers[0]]


def _is_at_hand(flat: Flat) -> bool:
    """Whether every rank can read all masters where they lie: they are the compute copies, or common memory."""
    return flat.rests_whole and not flat.has_master
