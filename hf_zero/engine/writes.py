"""Writes of user code to parameters, which are found before the optimizer's next step.

[Note: whole tensors that are written count, or the write raises]
Where parameters rest whole on every rank (stages 0 to 2), user code may write to them between steps. Before masters
are read or updated, a write is found by the parameters' version counters (`p.copy_`), by the memory that they show
(`p.data = ...`), and, since `p.data.copy_` leaves both as they are, by a checksum of a fixed number of elements of
each parameter. What has been written is taken over. On an accelerator the host does not wait for the checksum, so a
write that it alone shows is refused when it has arrived. Where the ranks' checksums are not equal, one has written
alone, and the step is refused. At stage 3 what can be written is a copy that is given up: `gathered` with `writeback`
is the way, a placeholder refuses, and what is noticed later than that raises. Single elements that are written through
`p.data` are not noticed.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn

from hf_zero.config import MemoryTier
from hf_zero.engine.access import unit_of
from hf_zero.engine.flat import Flat
from hf_zero.engine.model_units import ModelUnits
from hf_zero.errors import LifecycleError


_INSIDE = "write inside `with hf_zero.gathered(parameter, writeback=True):`"


def take(engine: ModelUnits) -> None:
    """Updates the masters from what user code wrote to the parameters on all ranks. All ranks call it before an
    update. Raises [`LifecycleError`] on all ranks, when one of them has written what the others have not, or what
    cannot be taken over. At stage 3, where there is nothing to compare, on the rank alone that has written what is
    given up."""
    flats = [flat for flat in engine.flats if flat.trainable and not flat.rest.is_sharded]
    failure: LifecycleError | None = None
    try:
        if engine.refuse_new_members is not None:
            engine.refuse_new_members()
        _refuse_own_gradients(engine)
        refuse_lost(engine)
        _take_assigned(engine)
    except LifecycleError as error:
        failure = error
    comm = engine.comm
    if engine.runs_ahead:
        _take_unread(engine, flats, failure)
        return
    if comm.num_ranks == 1:
        flats = [flat for flat in flats if flat.rest.has_copy]  # of the others, values and masters are one
    if not flats:
        if failure is not None:
            raise failure
        return
    bits = torch.stack([flat.sample.sum_of(flat.full) for flat in flats])
    known = torch.stack([now if flat.bits is None else flat.bits for now, flat in zip(bits, flats)])
    is_well = torch.full((1,), failure is None, dtype=torch.int64, device=bits.device)
    rows = comm.all_gather_vector(torch.cat([bits, bits == known, is_well]), what="the optimizer's step")
    if failure is not None:
        raise failure
    _refuse_failed(rows[:, -1])
    _refuse_unlike(engine, flats, rows[:, : len(flats)])
    for flat, is_kept in zip(flats, rows[comm.rank, len(flats) : -1].tolist()):
        if not is_kept or flat.rewritten() is not None:
            _follow(engine, flat)


def _take_unread(engine: ModelUnits, flats: list[Flat], failure: LifecycleError | None) -> None:
    """Does what `take` does without reading a checksum, for which the host would wait: it takes over what version
    counters show, and learns later whether a checksum has changed and whether the ranks hold the same."""
    comm = engine.comm
    if comm.num_ranks > 1 and flats:
        is_well = torch.tensor([failure is None], dtype=torch.uint8)
        all_well = comm.on_host.all_gather_vector(is_well, what="the optimizer's step")
    if failure is not None:
        raise failure
    if comm.num_ranks > 1 and flats:
        _refuse_failed(all_well)
    elif comm.num_ranks == 1:
        flats = [flat for flat in flats if flat.rest.has_copy]  # of the others, values and masters are one
    if not flats:
        return
    for flat in flats:
        if flat.rewritten() is not None:
            _follow(engine, flat)
    bits = torch.stack([flat.sample.sum_of(flat.full) for flat in flats])
    known = torch.stack([now if flat.bits is None else flat.bits for now, flat in zip(bits, flats)])
    rows = comm.all_gather_rows(torch.cat([bits, known]))
    bits, known_bits = rows[:, : len(flats)], rows[:, len(flats) :]
    if comm.num_ranks > 1:
        engine.late_checks.expect((bits == bits[0]).all(), partial(_refuse_unlike, engine, flats, bits))
    if any(flat.rest.has_copy for flat in flats):
        refuse = partial(_refuse_late, flats, bits, known_bits)
        engine.late_checks.expect((bits == known_bits).all(), refuse, partial(_put_back, engine))


def _put_back(engine: ModelUnits) -> None:
    """Gives compute copies the masters' values, where no update has done so meanwhile. All ranks call it."""
    for pending in [pending for unit in engine.units for pending in unit.refresh(only_trained=True, only_used=False)]:
        pending.wait()
    for flat in engine.flats:
        flat.mark_clean()


def _refuse_late(flats: list[Flat], bits: Tensor, known: Tensor) -> None:
    rank, index = (bits != known).nonzero()[0].tolist()
    raise LifecycleError(
        f"{flats[index].infos[0].name} or a parameter of its unit: rank {rank} wrote to its memory beside the "
        "optimizer, through p.data or a view of it, and the write is lost; write to the parameter itself under "
        f"torch.no_grad(), as in p.copy_(values), or {_INSIDE}"
    )


def compare_replicas(engine: ModelUnits) -> None:
    """Compares the values of ranks that hold the same shard, where nothing else does: at stage 3. All ranks call it,
    while no update is under way. Values on disk are not read for that. Raises [`LifecycleError`] on all ranks, when
    those of two differ."""
    comm = engine.comm
    flats = [
        flat
        for flat in engine.flats
        if flat.trainable and flat.rest.is_sharded and flat.rest.masters.tier is not MemoryTier.DISK
    ]
    if comm.num_replicas == 1 or not flats:
        return
    sums = [flat.master_sample.sum_of(flat.rest.masters.values) for flat in flats]
    bits = torch.stack([each.to(comm.device) for each in sums])
    rows = comm.all_gather_rows(bits, what="comparing shard groups").view(comm.num_replicas, -1, len(flats))
    differs = rows != rows[0]  # [groups, ranks of a group, buffers]
    engine.late_checks.expect(~differs.any(), partial(_refuse_unlike_replicas, engine, flats, differs))


def _refuse_unlike_replicas(engine: ModelUnits, flats: list[Flat], differs: Tensor) -> None:
    group, place, index = differs.nonzero()[0].tolist()
    rank = group * differs.shape[1] + place
    raise LifecycleError(
        f"{flats[index].infos[0].name} or a parameter of its unit: its values on rank {rank} are not those on rank "
        f"{place}, which holds the same shard, so the shard groups do not train one model; go on from the last "
        "checkpoint, and shard over all ranks where unlike processors round updates in ways of their own"
    )


def take_here(engine: ModelUnits, flats: Iterable[Flat]) -> None:
    """Takes writes over as `take` does, on this rank alone, before the masters of some buffers are read. Raises
    [`LifecycleError`] for what cannot be taken over."""
    refuse_lost(engine)
    _take_assigned(engine)
    for flat in flats:
        if flat.bits is None or flat.rest.refreshing is not None:
            continue  # no checksum was taken, or the engine itself is writing: its copy may be on the way
        if flat.rewritten() is not None or not torch.equal(flat.sample.sum_of(flat.full), flat.bits):
            _follow(engine, flat)


def _follow(engine: ModelUnits, flat: Flat) -> None:
    if not flat.rest.has_copy or flat.rest.refreshing is not None:
        return  # values and master are one, or the engine itself is writing
    flat.rest.follow_written(flat.full)
    flat.mark_clean()


def refuse_lost(engine: ModelUnits) -> None:
    """Refuses values that were written to a temporary copy, data that was assigned while a parameter's own is away,
    and uses of such data. Raises [`LifecycleError`] with the parameter's name; its data is put back."""
    for unit in engine.units if any(unit.is_sharded for unit in engine.units) else ():
        if unit.num_gathered:
            continue
        for flat in unit.flats:
            if (index := next(flat.assigned(), None)) is not None:
                flat.unshard()
                raise LifecycleError(
                    f"{flat.infos[index].name}: was given other data during a forward or before its backward, "
                    "where stage 3 shows a copy, and that is lost; " + _INSIDE
                )
        for flat in unit.flats:
            if flat.trainable and (index := flat.rewritten()) is not None:
                flat.mark_clean()
                raise LifecycleError(
                    f"{flat.infos[index].name}: was written in place during a forward or before its backward, where "
                    f"stage 3 shows a copy, so its values are not defined now; {_INSIDE} between steps, or use stage 2"
                )


def _refuse_own_gradients(engine: ModelUnits) -> None:
    for gradient in engine.gradients():
        for info, param in zip(gradient.flat.infos, gradient.flat.params):
            if param.grad is not None:
                raise LifecycleError(
                    f"{info.name}: has a gradient that was put into p.grad and came from no backward of the sharded "
                    "model, so no step is taken on it; let loss.backward() bring it (of a loss such as "
                    "(p * grad).sum() where need be), or set p.grad to None"
                )


def _take_assigned(engine: ModelUnits) -> None:
    for unit in engine.units:
        for flat in unit.flats if not unit.is_sharded else ():
            for index in flat.assigned():
                flat.take_assigned(index)


def _refuse_failed(is_well: Tensor) -> None:
    """Raises on all ranks when one of them could not go on."""
    failed = next((rank for rank, flag in enumerate(is_well.flatten().tolist()) if not flag), None)
    if failed is not None:
        raise LifecycleError(f"optimizer step: rank {failed} refused it; look at the log of rank {failed}")


def _refuse_unlike(engine: ModelUnits, flats: list[Flat], bits: Tensor) -> None:
    """Raises on all ranks when the ranks' parameters are not the same. `bits`: a sum over each, [ranks, buffers]."""
    if bool((bits == bits[0]).all()):
        return
    flat = flats[int((bits != bits[0]).any(0).nonzero()[0])]
    each = torch.stack([view.reshape(-1).view(torch.uint8).sum() for view in flat.views])
    each = engine.comm.all_gather_vector(each)
    differs = (each != each[0]).any(0).nonzero().flatten().tolist()
    name = flat.infos[differs[0]].name if differs else f"a parameter of {flat.infos[0].name}'s unit"
    rank = int((bits != bits[0]).any(1).nonzero()[0])
    raise LifecycleError(
        f"{name}: its values on rank {rank} are not those on rank 0, so the ranks do not train one model; write the "
        f"same on all ranks, or {_INSIDE}, which takes rank 0's; where nothing is written, unlike processors round "
        "replicated updates (stage 0, several shard groups) in ways of their own: use stage 1 or 2 over all ranks"
    )


class Members:
    """The parameters and modules that the modules of a model hold."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._learn()

    def refuse_new(self) -> None:
        """Refuses parameters that came later, in place of others or beside them, alone or with a module. Those that
        are frozen may come beside others, as long as they are. Raises [`LifecycleError`] with the first one's name."""
        # each step comes here: no Python code runs for a module
        if all(map(is_, self._present(), self._known)):
            return
        has_frozen = False
        for name, param in self._model.named_parameters(remove_duplicate=False):
            if unit_of(param) is not None:
                continue
            if param.requires_grad or name in self._trained:
                raise LifecycleError(
                    f"{name}: was put into the model, by itself or with its module, after the model was sharded, and "
                    "would not be trained; write into the parameter that is there, or put it there before sharding"
                )
            has_frozen = True
        if not has_frozen:  # else it is looked at in each step, since it may be unfrozen
            self._learn()

    def _learn(self) -> None:
        modules = self._model.modules()
        self._held: list[dict] = [held for each in modules for held in (each._parameters, each._modules)]
        self._known = list(self._present())

    def _present(self) -> Iterator[nn.Parameter | nn.Module | None]:
        return chain(chain.from_iterable(map(dict.values, self._held)), [self._model])  # which marks the end
