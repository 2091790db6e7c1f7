"""Guards against what would train wrongly in silence: parameters that are written beside the masters, values that
an exception has left half changed, gradients that are read, clipped or stepped where there are none.

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

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import chain
from operator import is_
from types import new_class
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_zero.config import MemoryTier
from hf_zero.engine.access import unit_of
from hf_zero.engine.away import ON_GRAD_READ, AwayParameter
from hf_zero.engine.flat import Flat
from hf_zero.errors import LifecycleError


if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine


logger = logging.getLogger(__name__)


# Writes


_INSIDE = "write inside `with hf_zero.gathered(parameter, writeback=True):`"


def take(engine: "ZeroEngine") -> None:
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
            _follow(flat)


def _take_unread(engine: "ZeroEngine", flats: list[Flat], failure: LifecycleError | None) -> None:
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
            _follow(flat)
    bits = torch.stack([flat.sample.sum_of(flat.full) for flat in flats])
    known = torch.stack([now if flat.bits is None else flat.bits for now, flat in zip(bits, flats)])
    rows = comm.all_gather_rows(torch.cat([bits, known]))
    bits, known_bits = rows[:, : len(flats)], rows[:, len(flats) :]
    if comm.num_ranks > 1:
        engine.late_checks.expect((bits == bits[0]).all(), partial(_refuse_unlike, engine, flats, bits))
    if any(flat.rest.has_copy for flat in flats):
        refuse = partial(_refuse_late, flats, bits, known_bits)
        engine.late_checks.expect((bits == known_bits).all(), refuse, partial(_put_back, engine))


def _put_back(engine: "ZeroEngine") -> None:
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


def compare_replicas(engine: "ZeroEngine") -> None:
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
    engine.late_checks.expect(~differs.any(), partial(_refuse_unlike_replicas, flats, differs))


def _refuse_unlike_replicas(flats: list[Flat], differs: Tensor) -> None:
    group, place, index = differs.nonzero()[0].tolist()
    rank = group * differs.shape[1] + place
    raise LifecycleError(
        f"{flats[index].infos[0].name} or a parameter of its unit: its values on rank {rank} are not those on rank "
        f"{place}, which holds the same shard, so the shard groups do not train one model; go on from the last "
        "checkpoint, and shard over all ranks where unlike processors round updates in ways of their own"
    )


def take_here(engine: "ZeroEngine", flats: Iterable[Flat]) -> None:
    """Takes writes over as `take` does, on this rank alone, before the masters of some buffers are read. Raises
    [`LifecycleError`] for what cannot be taken over."""
    refuse_lost(engine)
    _take_assigned(engine)
    for flat in flats:
        if flat.bits is None or flat.rest.refreshing is not None:
            continue  # no checksum was taken, or the engine itself is writing: its copy may be on the way
        if flat.rewritten() is not None or not torch.equal(flat.sample.sum_of(flat.full), flat.bits):
            _follow(flat)


def _follow(flat: Flat) -> None:
    if not flat.rest.has_copy or flat.rest.refreshing is not None:
        return  # values and master are one, or the engine itself is writing
    flat.rest.follow_written(flat.full)
    flat.mark_clean()


def refuse_lost(engine: "ZeroEngine") -> None:
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


def _refuse_own_gradients(engine: "ZeroEngine") -> None:
    with torch._C.DisableTorchFunctionSubclass():
        has_grad = [param.grad is not None for gradient in engine.gradients for param in gradient.flat.params]
    if any(has_grad):
        names = [info.name for gradient in engine.gradients for info in gradient.flat.infos]
        raise LifecycleError(
            f"{names[has_grad.index(True)]}: has a gradient that was put into p.grad and came from no backward of the "
            "sharded model, so no step is taken on it; let loss.backward() bring it (of a loss such as "
            "(p * grad).sum() where need be), or set p.grad to None"
        )


def _take_assigned(engine: "ZeroEngine") -> None:
    for unit in engine.units:
        for flat in unit.flats if not unit.is_sharded else ():
            for index in flat.assigned():
                flat.take_assigned(index)


def _refuse_failed(is_well: Tensor) -> None:
    """Raises on all ranks when one of them could not go on."""
    failed = next((rank for rank, flag in enumerate(is_well.flatten().tolist()) if not flag), None)
    if failed is not None:
        raise LifecycleError(f"optimizer step: rank {failed} refused it; look at the log of rank {failed}")


def _refuse_unlike(engine: "ZeroEngine", flats: list[Flat], bits: Tensor) -> None:
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


# Values that an exception has left half changed


@contextmanager
def noting_torn(engine: "ZeroEngine", what: str) -> Iterator[None]:
    """Notes that the parameters and the optimizer's state are torn if the context raises. `what`: what changes
    them, the beginning of the message."""
    try:
        yield
    except BaseException:
        note_torn(engine, what)
        logger.warning("hf_zero: %s broke off; nothing is saved before a whole checkpoint was loaded", what)
        raise


def note_torn(engine: "ZeroEngine", what: str) -> None:
    """Notes that the parameters and the optimizer's state are torn."""
    for info in (info for flat in engine.flats if flat.trainable for info in flat.infos):
        engine.torn.setdefault(info.name, what)
    if (optimizer := engine.newest_optimizer) is not None:
        optimizer.torn = optimizer.torn or what


def drop_torn(engine: "ZeroEngine", what: str) -> None:
    """Drops a note that says `what`, which has been made good since."""
    engine.torn = {name: why for name, why in engine.torn.items() if why != what}
    optimizer = engine.newest_optimizer
    if optimizer is not None and optimizer.torn == what:
        optimizer.torn = None


def refuse_torn(engine: "ZeroEngine") -> None:
    """Raises [`LifecycleError`] where values or state are torn: they must not be saved."""
    optimizer = engine.newest_optimizer
    for name, what in engine.torn.items():
        raise LifecycleError(
            f"saving: {what} broke off, so some parameters have its values and others not ({name}, "
            f"{len(engine.torn)} in all); load a whole checkpoint, or these weights with hf_zero.load_weights"
        )
    if optimizer is not None and optimizer.torn is not None:
        raise LifecycleError(
            f"saving: {optimizer.torn} broke off, so a part of the optimizer's state has its values and the rest "
            "not; load a whole checkpoint, or make a new optimizer"
        )


def refuse_other_optimizer(engine: "ZeroEngine", optimizer: object) -> None:
    """Refuses the step of an optimizer after which another one was made on the model."""
    newest = engine.newest_optimizer
    if newest is not None and newest is not optimizer:
        raise LifecycleError(
            f"step: {type(engine.model).__name__} has another optimizer, which was made later, and a step takes the "
            "gradients of the whole model; make one with all parameter groups, or one of several: "
            "hf_zero.ShardedOptimizer(model, [first, second])"
        )


def refuse_held(engine: "ZeroEngine", what: str) -> None:
    """Refuses an act, by the words of the message, inside `hf_zero.gathered` or `computing_in`."""
    if engine.is_cast:
        raise LifecycleError(f"{what} inside computing_in(...): leave it first")
    for unit in engine.units:
        if unit.num_gathered:
            raise LifecycleError(f"unit {unit.name!r}: {what} inside hf_zero.gathered(...); leave the context first")


# Gradients where torch has them, and hf_zero does not


GRAD_READ = (
    "a parameter's .grad is None between backward and step: hf_zero keeps gradients in buffers of its own. To read or "
    "change the gradient of this rank, call param.register_hook(...) before the backward; to read the averaged "
    "gradient, call sharded.full_grad(name) after it, on all ranks. (This warning is shown once.)"
)


def grad_of(param: Tensor) -> Tensor | None:
    """Reads `param.grad` for hf_zero itself, without a warning."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.grad.__get__(param)  # type: ignore[attr-defined]


class GradientReads:
    """Watches parameters from the end of a backward until the next forward, backward or step. The first read of
    `.grad` warns and ends the watch for good. A watched parameter has a class that differs in `grad` alone, so nothing
    else gets slower; one whose values are away has a class of its own anyway."""

    def __init__(self) -> None:
        self._watched: list[nn.Parameter] = []
        self._classes: dict[type, type] = {}  # that a parameter has while it is watched, by its own
        self._has_warned = False

    def watch(self, flats: Iterable[Flat]) -> None:
        """Begins to watch the parameters of buffers."""
        if self._has_warned:
            return
        for flat, param in [(each, param) for each in flats for param in each.params]:
            if isinstance(param, AwayParameter):
                setattr(param, ON_GRAD_READ, self._warn)
            elif not flat.rest.is_sharded:  # else it is shown for a while, and `hide` follows
                cls = type(param)
                if cls not in self._classes:
                    self._classes[cls] = self._watched_class(cls)
                param.__class__ = self._classes[cls]
            self._watched.append(param)

    def end(self) -> None:
        """Ends the watch."""
        for param in self._watched:
            vars(param).pop(ON_GRAD_READ, None)
            own = vars(type(param)).get("watched")
            if own is not None:
                param.__class__ = own
        self._watched.clear()

    def _warn(self) -> None:
        self._has_warned = True
        self.end()
        warnings.warn(GRAD_READ, stacklevel=3)

    def _watched_class(self, cls: type) -> type:
        grad: Any = Tensor.grad

        def read(param: nn.Parameter) -> Tensor | None:
            self._warn()
            return grad.__get__(param)

        def fill(namespace: dict) -> None:
            watched = property(read, grad.__set__, grad.__delete__)
            namespace |= {"grad": watched, "watched": cls, "__module__": cls.__module__}

        return new_class(cls.__name__, (cls,), exec_body=fill)


# What clips, by the function that a script calls. `clip_grad_norm_` looks its part up when it is called: it may have
# been imported before.
CLIPPING = {"_clip_grads_with_norm_": "clip_grad_norm_", "clip_grad_value_": "clip_grad_value_"}

_SLICE = "_hf_zero_slice"  # an attribute


@cache
def guard_gradients() -> RemovableHandle:
    """Lets torch's optimizers, its functions that clip, its `GradScaler` and `DistributedDataParallel` refuse trained
    parameters of sharded models from now on in this process. All others are stepped, clipped, scaled and wrapped as
    ever. Returns the handle of the hook on all optimizers, the same at every call."""
    for name, called in CLIPPING.items():
        original = getattr(clip_grad, name, None)
        if original is None:
            continue  # of another version of torch
        refusing = _refusing(original, called)
        for module in (clip_grad, torch.nn.utils):
            for alias in [alias for alias, value in vars(module).items() if value is original]:
                setattr(module, alias, refusing)
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = _scaling(scaler._unscale_grads_)
    wrapper: Any = nn.parallel.DistributedDataParallel
    wrapper.__init__ = _wrapping(wrapper.__init__)
    return register_optimizer_step_pre_hook(_refuse_step)


def marked_as_slices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Notes on what a sharded optimizer shows in its groups that its gradients are not there but within its step."""
    for param in params:
        setattr(param, _SLICE, True)
    return params


def _are_sharded(params: Iterable[Tensor]) -> bool:
    # Within `gathered` a script may set the gradients of some by hand, and step and clip these.
    grads = [grad_of(param) for param in params if param.requires_grad and unit_of(param) is not None]
    return bool(grads) and all(grad is None for grad in grads)


def _refuse_step(optimizer: torch.optim.Optimizer, *_) -> None:
    if _are_sharded(param for group in optimizer.param_groups for param in group["params"]):
        name = type(optimizer).__name__
        raise LifecycleError(
            f"{name}: holds parameters of a sharded model, whose gradients are divided over the ranks; it would "
            "update nothing; give it to hf_zero.ShardedOptimizer(model, optimizer), or to ZeroAccelerator.prepare, "
            "and step what you get"
        )


def _refusing(original: Callable, called: str) -> Callable:
    @wraps(original)
    def clip(parameters, *args, **kwargs):
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_sharded(params) or any(grad_of(param) is None and hasattr(param, _SLICE) for param in params):
            raise LifecycleError(
                f"torch.nn.utils.{called}: was given parameters of a sharded model, whose gradients are divided over "
                f"the ranks; it would clip nothing; call {called} of the ShardedOptimizer, or accelerator.{called}"
            )
        return original(params, *args, **kwargs)

    return clip


def _scaling(original: Callable) -> Callable:
    @wraps(original)
    def unscale(scaler, optimizer, *args, **kwargs):
        if any(hasattr(param, _SLICE) for group in optimizer.param_groups for param in group["params"]):
            raise LifecycleError(
                f"{type(scaler).__name__}: does not see the gradients of a ShardedOptimizer, which are divided over "
                "the ranks; use hf_zero.ZeroGradScaler, whose ranks skip a step together"
            )
        return original(scaler, optimizer, *args, **kwargs)

    return unscale


def _wrapping(original: Callable) -> Callable:
    @wraps(original)
    def init(wrapper, module, *args, **kwargs):
        if any(param.requires_grad and unit_of(param) is not None for param in module.parameters()):
            raise LifecycleError(
                "DistributedDataParallel: was given a sharded model, whose ranks train it together as it is; call the "
                "model itself, and leave the wrapper out"
            )
        original(wrapper, module, *args, **kwargs)

    return init
