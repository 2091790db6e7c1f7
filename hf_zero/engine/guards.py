"""Guards against silent errors: writes to parameters that bypass the masters, values that an exception left half
updated, and code that reads, clips or steps gradients that are not in `p.grad`.

[Note: whole-tensor writes take effect or raise]
If parameters are replicated (stages 0 to 2), user code may write to them between steps. Before masters are read or
updated, writes are detected by version counters (`p.copy_`), by data pointers (`p.data = ...`), and by a checksum of a
fixed number of elements per parameter (`p.data.copy_`, which changes neither). The masters then follow the written
values. On an accelerator the host does not wait for the checksum, so a write that only the checksum shows is refused
once the checksum has arrived. If the checksums of the ranks differ, not all ranks have written the same values, and
the step is refused. At stage 3 a write would go to a temporary copy and be lost: placeholders raise, writes detected
later raise too, and `gathered(..., writeback=True)` is the supported way. Writes to single elements through `p.data`
are not detected.
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
    """Updates the masters from user writes to the parameters, before an update. Collective. Raises [`LifecycleError`]
    on all ranks if a write cannot take effect, or if ranks have written different values: at once on CPUs, otherwise
    by a late check, so that the host does not wait for a checksum. At stage 3, where nothing is compared, only the
    rank that wrote raises."""
    comm = engine.comm
    flats = [flat for flat in engine.flats if flat.trainable and not flat.is_sharded]
    failure: LifecycleError | None = None
    try:
        if engine.refuse_new_members is not None:
            engine.refuse_new_members()
        _refuse_own_gradients(engine)
        _take_assigned(engine)
    except LifecycleError as error:
        failure = error
    if comm.num_ranks == 1:
        flats = [flat for flat in flats if flat.has_copy]  # the others have no separate masters
    elif flats:
        is_well = torch.tensor([failure is None], dtype=torch.uint8)
        all_well = comm.on_host.all_gather_vector(is_well, what="the optimizer's step")
        if failure is None:
            _refuse_failed(all_well)
    if failure is not None:
        raise failure
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
    if any(flat.has_copy for flat in flats):
        refuse = partial(_refuse_unseen, flats, bits, known_bits)
        engine.late_checks.expect((bits == known_bits).all(), refuse, partial(_put_back, engine))


def _put_back(engine: "ZeroEngine") -> None:
    """Restores compute copies from the masters, unless an update has done so meanwhile. Collective."""
    for pending in [pending for unit in engine.units for pending in unit.refresh(only_trained=True, only_used=False)]:
        pending.wait()
    for flat in engine.flats:
        flat.mark_clean()


def _refuse_unseen(flats: list[Flat], bits: Tensor, known: Tensor) -> None:
    rank, index = (bits != known).nonzero()[0].tolist()
    raise LifecycleError(
        f"{flats[index].infos[0].name} or a parameter of its unit: rank {rank} wrote to its memory without the "
        "optimizer, through p.data or a view of it, and the write is lost; write to the parameter itself under "
        f"torch.no_grad(), as in p.copy_(values), or {_INSIDE}"
    )


def compare_replicas(engine: "ZeroEngine") -> None:
    """Compares the values of ranks with the same shard at stage 3, where nothing else compares them. Collective, while
    no update is pending. Values on disk are not compared. Raises [`LifecycleError`] on all ranks if values differ."""
    comm = engine.comm
    flats = [
        flat
        for flat in engine.flats
        if flat.trainable and flat.is_sharded and flat.masters.tier is not MemoryTier.DISK
    ]
    if comm.num_replicas == 1 or not flats:
        return
    sums = [flat.master_sample.sum_of(flat.masters.values) for flat in flats]
    bits = torch.stack([each.to(comm.device) for each in sums])
    rows = comm.all_gather_rows(bits, what="comparing shard groups").view(comm.num_replicas, -1, len(flats))
    differs = rows != rows[0]  # [groups, ranks of a group, buffers]
    engine.late_checks.expect(~differs.any(), partial(_refuse_unlike_replicas, flats, differs))


def _refuse_unlike_replicas(flats: list[Flat], differs: Tensor) -> None:
    group, place, index = differs.nonzero()[0].tolist()
    rank = group * differs.shape[1] + place
    raise LifecycleError(
        f"{flats[index].infos[0].name} or a parameter of its unit: its values on rank {rank} are not those on rank "
        f"{place}, which holds the same shard, so the shard groups no longer train the same model; resume from the "
        "last checkpoint, and if the processors differ, which may round updates differently, shard over all ranks"
    )


def take_here(engine: "ZeroEngine", flats: Iterable[Flat]) -> None:
    """Applies writes like `take`, on this rank only, before the masters of some buffers are read. Raises
    [`LifecycleError`] for writes that cannot take effect."""
    refuse_lost(engine)
    _take_assigned(engine)
    for flat in flats:
        if flat.bits is None or flat.refreshing is not None:
            continue  # no checksum was taken, or the engine itself is writing: its copy may be pending
        if flat.rewritten() is not None or not torch.equal(flat.sample.sum_of(flat.full), flat.bits):
            _follow(flat)


def _follow(flat: Flat) -> None:
    if not flat.has_copy or flat.refreshing is not None:
        return  # no separate masters, or the engine itself is writing
    flat.follow_written()
    flat.mark_clean()


def refuse_lost(engine: "ZeroEngine") -> None:
    """Raises [`LifecycleError`] for values written to a temporary copy, and for data assigned to a parameter while its
    values are sharded. Restores the parameter's data."""
    for unit in engine.units if any(unit.is_sharded for unit in engine.units) else ():
        if unit.num_gathered:
            continue
        for flat in unit.flats:
            if (index := next(flat.assigned(), None)) is not None:
                flat.unshard()
                raise LifecycleError(
                    f"{flat.infos[index].name}: its data was replaced during a forward or before its backward, "
                    "where stage 3 uses a temporary copy, so the new data is lost; " + _INSIDE
                )
        for flat in unit.flats:
            if flat.trainable and (index := flat.rewritten()) is not None:
                flat.mark_clean()
                raise LifecycleError(
                    f"{flat.infos[index].name}: was written in place during a forward or before its backward, where "
                    "stage 3 uses a temporary copy, so its values are undefined now; "
                    f"{_INSIDE} between steps, or use stage 2"
                )


def _refuse_own_gradients(engine: "ZeroEngine") -> None:
    with torch._C.DisableTorchFunctionSubclass():
        has_grad = [param.grad is not None for gradient in engine.gradients for param in gradient.flat.params]
    if any(has_grad):
        names = [info.name for gradient in engine.gradients for info in gradient.flat.infos]
        raise LifecycleError(
            f"{names[has_grad.index(True)]}: has a gradient that was put into p.grad without a backward of the "
            "sharded model, and a step would not use it; compute it with loss.backward() (for example of the loss "
            "(p * grad).sum()), or set p.grad to None"
        )


def _take_assigned(engine: "ZeroEngine") -> None:
    for unit in engine.units:
        for flat in unit.flats if not unit.is_sharded else ():
            for index in flat.assigned():
                flat.take_assigned(index)


def _refuse_failed(is_well: Tensor) -> None:
    """Raises on all ranks if one of them has failed."""
    failed = next((rank for rank, flag in enumerate(is_well.flatten().tolist()) if not flag), None)
    if failed is not None:
        raise LifecycleError(f"optimizer step: rank {failed} refused it; see the log of rank {failed}")


def _refuse_unlike(engine: "ZeroEngine", flats: list[Flat], bits: Tensor) -> None:
    """Raises on all ranks if their parameters differ. `bits`: checksums, [ranks, buffers]."""
    if bool((bits == bits[0]).all()):
        return
    flat = flats[int((bits != bits[0]).any(0).nonzero()[0])]
    each = torch.stack([view.reshape(-1).view(torch.uint8).sum() for view in flat.views])
    each = engine.comm.all_gather_vector(each)
    differs = (each != each[0]).any(0).nonzero().flatten().tolist()
    name = flat.infos[differs[0]].name if differs else f"a parameter of {flat.infos[0].name}'s unit"
    rank = int((bits != bits[0]).any(1).nonzero()[0])
    raise LifecycleError(
        f"{name}: its values on rank {rank} are not those on rank 0, so the ranks no longer train the same model; "
        f"write the same values on all ranks, or {_INSIDE}, which uses rank 0's; if no code writes to it, different "
        "processors have rounded replicated updates differently (stage 0, several shard groups): use stage 1 or 2 "
        "over all ranks"
    )


class Members:
    """Detects parameters that are added to a model after it was sharded."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._learn()

    def refuse_new(self) -> None:
        """Raises [`LifecycleError`] with the name of the first parameter that was added or replaced, by itself or with
        its module. Added parameters are allowed while they are frozen."""
        # runs in each step, so there is no Python loop over modules
        if all(map(is_, self._present(), self._known)):
            return
        has_frozen = False
        for name, param in self._model.named_parameters(remove_duplicate=False):
            if unit_of(param) is not None:
                continue
            if param.requires_grad or name in self._trained:
                raise LifecycleError(
                    f"{name}: was added to the model, by itself or with its module, after the model was sharded, and "
                    "would not be trained; write to the existing parameter, or add it before sharding"
                )
            has_frozen = True
        if not has_frozen:  # else it is checked in each step, because it may be unfrozen
            self._learn()

    def _learn(self) -> None:
        modules = self._model.modules()
        self._held: list[dict] = [held for each in modules for held in (each._parameters, each._modules)]
        self._known = list(self._present())

    def _present(self) -> Iterator[nn.Parameter | nn.Module | None]:
        return chain(chain.from_iterable(map(dict.values, self._held)), [self._model])  # the model marks the end


# Values that an exception left half updated


@contextmanager
def noting_torn(engine: "ZeroEngine", what: str) -> Iterator[None]:
    """Marks the parameters and the optimizer state as inconsistent if the context raises. `what`: the operation that
    changes them, the beginning of the message."""
    try:
        yield
    except BaseException:
        note_torn(engine, what)
        logger.warning("hf_zero: %s broke off; saving is refused until a whole checkpoint is loaded", what)
        raise


def note_torn(engine: "ZeroEngine", what: str) -> None:
    """Marks the parameters and the optimizer state as inconsistent."""
    for flat in (flat for flat in engine.flats if flat.trainable):
        flat.bits = None  # its values may be new: they are no write by user code
        for info in flat.infos:
            engine.torn.setdefault(info.name, what)
    if (optimizer := engine.newest_optimizer) is not None:
        optimizer.torn = optimizer.torn or what


def drop_torn(engine: "ZeroEngine", what: str) -> None:
    """Clears the marks of the operation `what`, after it was completed or repeated."""
    engine.torn = {name: why for name, why in engine.torn.items() if why != what}
    optimizer = engine.newest_optimizer
    if optimizer is not None and optimizer.torn == what:
        optimizer.torn = None


def refuse_torn(engine: "ZeroEngine") -> None:
    """Raises [`LifecycleError`] if values or optimizer state are inconsistent and must not be saved."""
    optimizer = engine.newest_optimizer
    for name, what in engine.torn.items():
        raise LifecycleError(
            f"saving: {what} broke off, so only some parameters may have new values ({name} and others, "
            f"{len(engine.torn)} in all); load a whole checkpoint, or these weights with hf_zero.load_weights"
        )
    if optimizer is not None and optimizer.torn is not None:
        raise LifecycleError(
            f"saving: {optimizer.torn} broke off, so only a part of the optimizer state may have new values; load a "
            "whole checkpoint, or create a new optimizer"
        )


def refuse_other_optimizer(engine: "ZeroEngine", optimizer: object) -> None:
    """Raises [`LifecycleError`] if another optimizer was created on the model after this one."""
    newest = engine.newest_optimizer
    if newest is not None and newest is not optimizer:
        raise LifecycleError(
            f"step: {type(engine.model).__name__} has another optimizer, which was created later, and a step uses the "
            "gradients of the whole model; create one optimizer with all parameter groups, or combine several: "
            "hf_zero.ShardedOptimizer(model, [first, second])"
        )


def refuse_in_context(engine: "ZeroEngine", what: str) -> None:
    """Raises [`LifecycleError`] inside `hf_zero.gathered` or `computing_in`. `what`: beginning of the message."""
    if engine.is_cast:
        raise LifecycleError(f"{what} inside computing_in(...): leave the context first")
    for unit in engine.units:
        if unit.num_gathered:
            raise LifecycleError(f"unit {unit.name!r}: {what} inside hf_zero.gathered(...); leave the context first")


# Gradients that torch keeps in `p.grad`, and hf_zero does not


GRAD_READ = (
    "a parameter's .grad is None between backward and step, because hf_zero stores gradients in its buffers. To read "
    "or change the gradient of this rank, call param.register_hook(...) before the backward; to read the averaged "
    "gradient, call sharded.full_grad(name) after it, on all ranks. (This warning is shown once.)"
)


def grad_of(param: Tensor) -> Tensor | None:
    """Returns `param.grad` without a warning."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.grad.__get__(param)  # type: ignore[attr-defined]


class GradientReads:
    """Watches parameters from the end of a backward until the next forward, backward or step. The first read of
    `.grad` warns, once per model. The class of a watched parameter overrides only `grad`, so nothing else gets slower.
    Parameters whose values are sharded keep their class, `AwayParameter`, which reports reads of `.grad` itself."""

    def __init__(self) -> None:
        self._watched: list[nn.Parameter] = []
        self._classes: dict[type, type] = {}  # original class -> class while watched
        self._has_warned = False

    def watch(self, flats: Iterable[Flat]) -> None:
        """Starts watching the parameters of buffers."""
        if self._has_warned:
            return
        for flat, param in [(each, param) for each in flats for param in each.params]:
            if isinstance(param, AwayParameter):
                setattr(param, ON_GRAD_READ, self._warn)
            elif not flat.is_sharded:  # a sharded one is unsharded only for now, and `hide` follows
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

        def copied(param: nn.Parameter, memo: dict) -> nn.Parameter:
            copy: Any = nn.Parameter.__deepcopy__(param, memo)
            copy.__class__ = cls
            return copy

        def fill(namespace: dict) -> None:
            watched = property(read, grad.__set__, grad.__delete__)
            namespace |= {"grad": watched, "watched": cls, "__module__": cls.__module__, "__deepcopy__": copied}

        return new_class(cls.__name__, (cls,), exec_body=fill)


# Patched function -> public function that scripts call. `clip_grad_norm_` looks up `_clip_grads_with_norm_` when it is
# called, so the patch works even if a script has already imported `clip_grad_norm_`.
CLIPPING = {"_clip_grads_with_norm_": "clip_grad_norm_", "clip_grad_value_": "clip_grad_value_"}

_SLICE = "_hf_zero_slice"  # an attribute


@cache
def guard_gradients() -> RemovableHandle:
    """Makes torch's optimizers, clipping functions, `GradScaler` and `DistributedDataParallel` raise for trained
    parameters of sharded models, for the rest of this process. Other parameters are not affected. Returns the handle
    of the hook on all optimizers, the same one at every call."""
    for name, called in CLIPPING.items():
        original = getattr(clip_grad, name, None)
        if original is None:
            continue  # another version of torch
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
    """Marks the parameters in a sharded optimizer's groups, whose gradients exist only during its step."""
    for param in params:
        setattr(param, _SLICE, True)
    return params


def _are_sharded(params: Iterable[Tensor]) -> bool:
    # Inside `gathered` a script may set some gradients by hand, and step and clip those.
    grads = [grad_of(param) for param in params if param.requires_grad and unit_of(param) is not None]
    return bool(grads) and all(grad is None for grad in grads)


def _refuse_step(optimizer: torch.optim.Optimizer, *_) -> None:
    if _are_sharded(param for group in optimizer.param_groups for param in group["params"]):
        name = type(optimizer).__name__
        raise LifecycleError(
            f"{name}: holds parameters of a sharded model, whose gradients are divided over the ranks, so it would "
            "update nothing; pass it to hf_zero.ShardedOptimizer(model, optimizer) or to ZeroAccelerator.prepare, and "
            "step the returned optimizer"
        )


def _refusing(original: Callable, called: str) -> Callable:
    @wraps(original)
    def clip(parameters, *args, **kwargs):
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _are_sharded(params) or any(grad_of(param) is None and hasattr(param, _SLICE) for param in params):
            raise LifecycleError(
                f"torch.nn.utils.{called}: was given parameters of a sharded model, whose gradients are divided over "
                f"the ranks, so it would clip nothing; call {called} of the ShardedOptimizer, or accelerator.{called}"
            )
        return original(params, *args, **kwargs)

    return clip


def _scaling(original: Callable) -> Callable:
    @wraps(original)
    def unscale(scaler, optimizer, *args, **kwargs):
        if any(hasattr(param, _SLICE) for group in optimizer.param_groups for param in group["params"]):
            raise LifecycleError(
                f"{type(scaler).__name__}: cannot unscale the gradients of a ShardedOptimizer, which are divided over "
                "the ranks; use hf_zero.ZeroGradScaler, which skips a step on all ranks together"
            )
        return original(scaler, optimizer, *args, **kwargs)

    return unscale


def _wrapping(original: Callable) -> Callable:
    @wraps(original)
    def init(wrapper, module, *args, **kwargs):
        if any(param.requires_grad and unit_of(param) is not None for param in module.parameters()):
            raise LifecycleError(
                "DistributedDataParallel: was given a sharded model, which is data-parallel already; call the model "
                "itself, without the wrapper"
            )
        original(wrapper, module, *args, **kwargs)

    return init
