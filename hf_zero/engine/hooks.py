"""The hooks on a model's modules and tensors. Each calls the engine."""

import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.config import Residency
from hf_zero.engine import direct, guards
from hf_zero.engine.access import UNIT_ATTRIBUTE, unit_of
from hf_zero.engine.away import in_backward, is_transformed
from hf_zero.engine.direct import Sink
from hf_zero.engine.divided import is_dtensor
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.partition import is_on
from hf_zero.engine.patch import ForwardGuard, NodeHook, Patch, Uncopyable
from hf_zero.engine.schedule import Stack
from hf_zero.engine.unit import Unit
from hf_zero.errors import LifecycleError


PLAIN_AGAIN = "do it before it is sharded, or after hf_zero.ShardedModel(model).unshard()"


def install(engine: ZeroEngine, owners: dict[nn.Module, Stack]) -> None:
    """Installs the hooks. `owners`: the modules whose forward calls the blocks of a stack."""
    sinks = engine.sinks
    for unit in engine.units:
        for gradient in unit.gradients:
            for index, param in enumerate(gradient.flat.params):
                # A hook on the AccumulateGrad node, not on the parameter, so that it runs after all user hooks.
                with torch.enable_grad():
                    node = param.expand_as(param).grad_fn.next_functions[0][0]
                take = partial(engine.receive, unit, gradient, index, param)
                engine.handles.append(NodeHook(node, take))
                sinks[id(param)] = Sink(engine, unit, gradient, index, node)
    direct.install(engine, sinks)
    guards.guard_gradients()
    engine.handles.append(Patch(engine.model, "zero_grad", partial(_zero_grad, engine)))
    _guard_moves(engine)
    _guard_loading(engine)
    if not any(unit.is_sharded or unit.reduces_each_backward for unit in engine.units):
        # nothing is gathered or reduced during forward and backward
        engine.handles.append(engine.model.register_forward_pre_hook(partial(_end_gradient_reads, engine)))
        return
    for module in _outer_modules(engine):
        if sum(inner in owners for inner in module.modules()) > 1:
            engine.schedule.with_several.add(module)
        _install_on_outer(engine, module, owners.get(module))
        if module is not engine.model:
            engine.handles += ForwardGuard.build(module)
    moves_blocks = engine.plan.grad is Residency.SHARDED or engine.plan.compute is Residency.SHARDED
    called = {unit: module for unit, module in engine.vocabulary.items() if unit.is_embedding} | engine.modules
    for unit, module in called.items() if moves_blocks else ():
        _install_on_block(engine, unit, module)
        engine.handles += ForwardGuard.build(module)


def _end_gradient_reads(engine: ZeroEngine, *_) -> None:
    engine.gradient_reads.end()


def _zero_grad(engine: ZeroEngine, set_to_none: bool = True) -> None:
    """Replaces `model.zero_grad()`, because the engine holds the gradients."""
    engine.clear_gradients(zeroed=not set_to_none)
    type(engine.model).zero_grad(engine.model, set_to_none)


# The hooks are partials, not closures, so that copying or pickling a module reaches the engine, which raises.


def _install_on_outer(engine: ZeroEngine, module: nn.Module, stack: Stack | None) -> None:
    given = _Given()
    before, after = partial(_before_outer, engine, stack, given), partial(_after_outer, engine, stack, given)
    engine.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    engine.handles.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))


def _before_outer(engine: ZeroEngine, stack: Stack | None, given: "_Given", module: nn.Module, args, kwargs) -> None:
    given.note(tensors_in(args, kwargs))
    engine.begin_forward(module, stack)


def _after_outer(engine: ZeroEngine, stack: Stack | None, given: "_Given", module, args, kwargs, output) -> None:
    failed = output is None and sys.exc_info()[0] is not None
    engine.end_forward(stack, failed)
    tape = None if in_backward() else engine.schedule.current_tape
    is_heads = engine.is_head(module)
    given.hook(output, [args, kwargs], lambda _grad: engine.before_backward(tape=tape, is_heads=is_heads))


def _install_on_block(engine: ZeroEngine, unit: Unit, module: nn.Module) -> None:
    engine.handles.append(Patch(module, UNIT_ATTRIBUTE, unit))  # makes copying the block raise
    given = _Given()
    before, after = partial(_before_block, engine, unit, given), partial(_after_block, engine, unit, given)
    engine.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    engine.handles.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))


def _before_block(engine: ZeroEngine, unit: Unit, given: "_Given", _module, args, kwargs) -> None:
    if engine.leaves_alone(unit):
        return
    tensors = tensors_in(args, kwargs)
    given.note(tensors)
    engine.before_block(unit, any(tensor.requires_grad for tensor in tensors))


def _after_block(engine: ZeroEngine, unit: Unit, given: "_Given", _module, args, kwargs, output) -> None:
    if engine.leaves_alone(unit):
        return
    if not unit.is_embedding:
        # the model may return this block's output, whose hook then runs before the model's
        tape = None if in_backward() else engine.schedule.current_tape
        given.hook(output, [args, kwargs], lambda _grad: engine.before_backward(unit=unit, tape=tape))
    engine.after_block(unit)


class _Given(Uncopyable):
    """The inputs of a module's running forward, each with its version counter and its history."""

    def __init__(self):
        self._noted: list[tuple[Tensor, int, Any]] = []

    def note(self, tensors: list[Tensor]) -> None:
        """Records the inputs before the forward, if it may have a backward."""
        is_counted = torch.is_grad_enabled()
        self._noted = [(t, t._version, _history(t)) for t in tensors if is_counted and not t.is_inference()]

    def hook(self, output, inputs, hook) -> None:
        """Registers `hook` on the outputs and on inputs that the forward has written to. Inputs that are returned
        unchanged get no hook, because their gradients arrive later."""
        noted, self._noted = self._noted, []
        if not torch.is_grad_enabled() or is_transformed():  # gradients of a transform are not parameter gradients
            return
        # a write under `no_grad` does not change the history
        written = [t for t, version, history in noted if t._version != version and _history(t) is not history]
        changed = {id(each) for each in (*written, *(each._base for each in written))}
        handed_in = tensors_in(inputs)
        handed_in += [tensor._base for tensor in handed_in if tensor._base is not None]
        known = {id(tensor) for tensor in handed_in} - changed
        for tensor in tensors_in(output, written):
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in known:
                _written_through(tensor, known).register_hook(hook)


def _history(tensor: Tensor) -> Any:
    """Returns the node that made a tensor. For a view, that of its base, because each write gives a view a new
    node."""
    return (tensor if tensor._base is None else tensor._base).grad_fn


def _written_through(tensor: Tensor, known: set[int]) -> Tensor:
    """Returns the tensor to hook: for a view, its base.

    If the caller writes to a view in place, its new history bypasses the node that made it, and a hook there would not
    run. The node of the base is still reached. A base of an input (`known`) belongs to another module.
    """
    base = tensor._base
    is_own = base is not None and base.requires_grad and not base.is_leaf and id(base) not in known
    return base if is_own else tensor


def _guard_moves(engine: ZeroEngine) -> None:
    """Makes calls raise that would move, cast or resize parameters without the engine."""
    for module in engine.model.modules():
        if module._parameters or module._buffers or module._modules:  # other models may share an activation
            engine.handles.append(Patch(module, "_apply", partial(_apply, engine, module)))
        if hasattr(type(module), "resize_token_embeddings"):
            engine.handles.append(Patch(module, "resize_token_embeddings", partial(_resize, engine, module)))


def _resize(engine: ZeroEngine, module: nn.Module, num_rows: int | None = None, *args, **kwargs) -> nn.Module:
    """Replaces transformers' method. Raises [`LifecycleError`] for another number of rows."""
    embedding = module.get_input_embeddings()
    if kwargs.get("new_num_tokens", num_rows) not in (None, embedding.weight.shape[0]):
        raise LifecycleError(
            f"resize_token_embeddings: the model is sharded with {embedding.weight.shape[0]} rows; {PLAIN_AGAIN}"
        )
    return embedding


def _apply(engine: ZeroEngine, module: nn.Module, fn, recurse: bool = True) -> nn.Module:
    """Replaces `module._apply`, which `module.to(...)` and `module.half()` call: applies `fn` to buffers only. Raises
    [`LifecycleError`] if `fn` would change parameters."""
    if not all(_is_kept(sample, fn(sample)) for sample in _samples(engine)):
        raise LifecycleError(
            f"{type(module).__name__}: the model is sharded, so its parameters cannot be moved or cast; {PLAIN_AGAIN}"
        )
    for part in module.modules() if recurse else [module]:
        part._buffers.update({name: fn(buffer) for name, buffer in part._buffers.items() if buffer is not None})
    return module


def _samples(engine: ZeroEngine) -> list[Tensor]:
    """Returns a scalar of each dtype that the parameters have, on their device."""
    dtypes = {flat.cast or flat.dtype for flat in engine.flats}
    return [torch.ones((), dtype=dtype, device=engine.comm.device) for dtype in sorted(dtypes, key=str)]


def _is_kept(before: Tensor, after: Tensor) -> bool:
    """Whether device, dtype and value are unchanged."""
    if after is before:
        return True
    stays = is_on(after, before.device) and after.dtype is before.dtype
    return stays and torch.equal(before, after.to(before.device))


def _guard_loading(engine: ZeroEngine) -> None:
    held = {id(p): (unit, flat, i) for unit in engine.units for flat in unit.flats for i, p in enumerate(flat.params)}
    for module in engine.model.modules():
        if any(True for _ in module.parameters()):
            before = partial(_before_loading, engine, held)
            engine.handles.append(module.register_load_state_dict_pre_hook(before))


def _before_loading(
    engine: ZeroEngine, held: dict[int, tuple], module, state_dict, prefix, local_metadata, *_
) -> None:
    """Writes loaded values to the masters without rounding, before torch writes them to the parameters. Raises
    [`LifecycleError`] for values that would be lost, and, before any value is loaded, for sharded parameters, which
    torch would otherwise report as mismatches one by one.

    Args:
        held: Unit, flat buffer and index in it of each parameter, by `id`.
    """
    for name, param in module.named_parameters() if any(unit.is_sharded for unit in engine.units) else ():
        unit = unit_of(param) if prefix + name in state_dict else None
        if unit is not None and not unit.is_unsharded:
            raise LifecycleError(
                f"load_state_dict: the values of {prefix}{name} are sharded over "
                f"{engine.comm.shard_group.num_ranks} ranks; load with hf_zero.load_weights(model, folder), or "
                "inside `with hf_zero.gathered(model, writeback=True):`, on all ranks"
            )
    for key, p in module._parameters.items():
        values = state_dict.get(prefix + key)
        if id(p) not in held or not isinstance(values, Tensor):
            continue
        if local_metadata.get("assign_to_params_buffers"):
            raise LifecycleError(
                f"load_state_dict: assign=True would replace sharded parameters ({prefix + key}); load without it"
            )
        unit, flat, index = held[id(p)]
        if unit.num_gathered and not unit.keeps_writes:
            raise LifecycleError(
                f"load_state_dict: values loaded into {prefix + key} would be dropped at the end of hf_zero.gathered; "
                "load inside `with hf_zero.gathered(model, writeback=True):`"
            )
        fits = values.shape == p.shape and not is_dtensor(p)
        is_finer = flat.masters.dtype is not flat.dtype and torch.promote_types(values.dtype, p.dtype) is not p.dtype
        if fits and is_finer and unit.keeps_writes:
            flat.write_master(index, values)


def _outer_modules(engine: ZeroEngine) -> list[nn.Module]:
    """Returns the modules around the blocks, the head, and at stage 3 the modules that own parameters of the root.
    Each may be called separately."""
    inside = {id(m) for block in engine.modules.values() for m in block.modules()}
    inside |= {id(module) for unit, module in engine.vocabulary.items() if unit.is_embedding}
    held = {id(p) for flat in engine.root.flats if engine.root.is_sharded for p in flat.params}
    held |= {id(p) for flat in (engine.head.flats if engine.head is not None else ()) for p in flat.params}
    outer = []
    for module in engine.model.modules():
        holds_block = any(id(child) in inside for child in module.modules())
        owns_held = any(id(p) in held for p in module.parameters(recurse=False))
        if module is engine.model or (id(module) not in inside and (holds_block or owns_held)):
            outer.append(module)
    return outer


def tensors_in(*values) -> list[Tensor]:
    """Returns the tensors in a module's arguments or outputs, including those in nested tuples, lists, dicts and
    dataclasses. Dataclasses may contain themselves."""
    found: list[Tensor] = []
    _collect(values, found, {})
    return found


def _collect(values: Iterable, found: list[Tensor], seen: dict[int, Any]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            _collect(value.values(), found, seen)
        elif isinstance(value, (tuple, list)):
            _collect(value, found, seen)
        elif is_dataclass(value) and not isinstance(value, type) and id(value) not in seen:
            seen[id(value)] = value  # it may refer to itself; the reference keeps its id from being reused
            _collect((getattr(value, each.name, None) for each in fields(value)), found, seen)
