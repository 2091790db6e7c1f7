"""Partition of a model into units: its repeated blocks, a large embedding and head, and the root with all other
parameters."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.engine.initial_values import is_bare
from hf_zero.engine.opaque import can_be_moved, is_opaque, is_reordered
from hf_zero.engine.source import COMPUTED, fits, source_of
from hf_zero.errors import UnsupportedError


# Minimum number of elements of an embedding and a head that are units. Smaller ones are not worth separate gathers.
VOCABULARY_NUMEL = 2**24
# The methods of transformers' models that return the embedding and the head, and the classes whose forward they must
# have, because the way in which backward uses the values must be known.
VOCABULARY = {"get_input_embeddings": nn.Embedding, "get_output_embeddings": nn.Linear}
# Libraries whose forwards call the embedding before the blocks and the head after them. Other code may do anything.
KNOWN_LIBRARIES = {"torch", "transformers", "peft", "trl", "accelerate", "hf_zero"}
SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # the supported dtypes of gradients


@dataclass(frozen=True)
class UnitSpec:
    """The description of a unit: its name, the module whose forward uses it, and its parameters by name."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]


@dataclass(frozen=True)
class StackSpec:
    """The description of a stack: blocks that the forward of `owner` calls in order.

    `embedding` (the token embedding) and `head` (the layer that computes logits from the output of `owner`) are either
    both units of their own, or both `None`: then their parameters belong to other units.
    """

    owner: nn.Module
    blocks: list[UnitSpec]
    embedding: UnitSpec | None = None
    head: UnitSpec | None = None

    @property
    def units(self) -> list[UnitSpec]:
        """All units of the stack in order."""
        return [unit for unit in (self.embedding, *self.blocks, self.head) if unit is not None]


@dataclass(frozen=True)
class Partition:
    """The descriptions of all units. Every parameter of the model is in exactly one unit."""

    root: UnitSpec
    stacks: list[StackSpec]

    @property
    def units(self) -> list[UnitSpec]:
        """All units, the root first."""
        return [self.root, *(unit for stack in self.stacks for unit in stack.units)]


def partition(model: nn.Module) -> Partition:
    """Partitions a model into units.

    Blocks are the members of containers (`ModuleList`, `Sequential`) that hold a class named in the model's
    `_no_split_modules`, or of the longest containers if the model names none. A parameter that is shared by two
    blocks, or by a block and a module outside of the blocks, belongs to the root. The embedding and the head belong to
    the root unless both are large and untied, and `KNOWN_LIBRARIES` define the forwards of all modules around the
    blocks. Tied parameters are found by identity."""
    names = canonical_names(model)
    containers = _containers(model)
    users = _count_users(model, containers)
    stacks: dict[nn.Module, list[UnitSpec]] = {}
    taken: set[int] = set()
    for path, container in containers:
        units = []
        for key, block in _members(container):
            owned = {
                names[id(p)]: p
                for p in block.parameters()
                if users[id(p)] == 1 and id(p) not in taken and p.numel() > 0
            }
            if owned:
                units.append(UnitSpec(f"{path}.{key}".lstrip("."), block, owned))
                taken.update(id(p) for p in owned.values())
        if units:
            owner = _caller(model, path)
            stacks.setdefault(owner, []).extend(units)
    rest = {name: p for name, p in model.named_parameters() if id(p) not in taken}
    specs = [_with_vocabulary(model, owner, units, rest) for owner, units in stacks.items()]
    return Partition(UnitSpec("root", model, rest), specs)


def _with_vocabulary(
    model: nn.Module, owner: nn.Module, blocks: list[UnitSpec], rest: dict[str, nn.Parameter]
) -> StackSpec:
    """Describes a stack, including the embedding that its owner calls and the head that is called after the owner if
    both become units. Removes their parameters from `rest`."""
    if not all(_is_known(module) for module in _around(model, {id(spec.module) for spec in blocks})):
        return StackSpec(owner, blocks)
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = (_large(model, name, kind) for name, kind in VOCABULARY.items())
    if embedding not in paths or head not in paths or _caller(model, paths[embedding]) is not owner:
        return StackSpec(owner, blocks)
    if head in set(owner.modules()) or embedding.max_norm is not None:  # called too early; written to
        return StackSpec(owner, blocks)
    own = [{f"{paths[module]}.{key}": p for key, p in module.named_parameters()} for module in (embedding, head)]
    if any(name not in rest for params in own for name in params):
        return StackSpec(owner, blocks)
    for name in [*own[0], *own[1]]:
        del rest[name]
    first, last = (UnitSpec(paths[module], module, params) for module, params in zip((embedding, head), own))
    return StackSpec(owner, blocks, first, last)


def _large(model: nn.Module, method: str, kind: type[nn.Module]) -> Any:
    """Returns the module that `method` of the model returns, if it has the forward of `kind` and a large weight that
    is neither tied nor computed from other parameters; otherwise `None`."""
    module = vocabulary_module(model, method)
    if getattr(type(module), "forward", None) is not kind.forward or any(True for _ in module.children()):
        return None
    weight = module._parameters.get("weight")
    if weight is None or weight.numel() < VOCABULARY_NUMEL:
        return None
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return module if all(names[id(p)] == 1 for p in module.parameters()) else None


def vocabulary_module(model: nn.Module, method: str) -> Any:
    """Returns the module that a method in `VOCABULARY` returns, or `None` if the model has no such module."""
    try:
        return getattr(model, method, lambda: None)()
    except (NotImplementedError, AttributeError):  # raised by transformers' models without such a module
        return None


def _is_known(module: nn.Module) -> bool:
    """Whether one of `KNOWN_LIBRARIES` defines the forward of a module."""
    return str(getattr(module.forward, "__module__", None)).partition(".")[0] in KNOWN_LIBRARIES


def _caller(model: nn.Module, path: str) -> nn.Module:
    """Returns the module whose forward calls the module or container at `path`: the nearest enclosing module that
    defines a forward."""
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        if type(owner).forward is not nn.Module.forward:
            return owner
    return model


def canonical_names(model: nn.Module) -> dict[int, str]:
    """Maps the `id` of every parameter to its first name. Tied parameters have one name."""
    return {id(p): name for name, p in model.named_parameters()}


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise UnsupportedError(
                f"{name or 'model'}: is already compiled, and the engine's hooks would break its graph; shard the "
                "uncompiled model, then call hf_zero.compile_blocks(model)"
            )
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise UnsupportedError(
                f"{name or 'model'}: is wrapped by {type(module).__name__}, which would reduce the gradients "
                "again; shard the wrapped model (its .module) and call that model"
            )


def refuse_what_cannot_be_sharded(
    model: nn.Module, device: torch.device | None = None, *, is_ready: bool = True
) -> None:
    """Raises [`UnsupportedError`] for compiled or wrapped modules, parameters without data, sparse parameters, tensor
    subclasses that are trainable or not dense, trainable parameters whose dtype is not a real floating-point dtype of
    at least 16 bits, and trainable parameters that share memory with other tensors.

    Args:
        model (`nn.Module`): the model.
        device (`torch.device`, *optional*): the device used for training, if it is known.
        is_ready (`bool`): `requires_grad` is final.
    """
    _refuse_wrapped(model)
    if is_ready:
        _refuse_shared_memory(model)
        _refuse_aliases(model)
    has_no_values = is_bare(model)  # will be initialized
    biases = _biases_beside_opaque(model)
    for name, p in model.named_parameters():
        _refuse_unmovable(name, p, device)
        refuse_what_cannot_be_summed(name, p)
        bias = biases.get(id(p))
        if is_ready and bias is not None and bias.requires_grad:
            raise UnsupportedError(
                f"{name}: the bias beside it is trained, but layers with quantized weights write to their biases; "
                "train no bias (LoraConfig(bias='none'))"
            )
        source = source_of(p)
        if source is not None and not fits(p, source):
            raise UnsupportedError(f"{name}: {COMPUTED}")
        if p.device.type == "meta" and source is None and not has_no_values:
            raise UnsupportedError(
                f"{name}: has no data (meta device) and no file to read it from, but other parameters have; load or "
                "initialize the model first"
            )


def _refuse_unmovable(name: str, p: nn.Parameter, device: torch.device | None) -> None:
    """Refuses a parameter whose bytes cannot be moved, or cannot be moved to the device used for training."""
    if not can_be_moved(p):
        library = type(p).__module__.partition(".")[0]
        raise UnsupportedError(
            f"{name}: {type(p).__name__} of {library} cannot be sharded, because its bytes are not one dense, frozen "
            "tensor; load the model without quantization, with bitsandbytes, or without another sharding library"
        )
    if is_reordered(p):
        raise UnsupportedError(
            f"{name}: bitsandbytes reordered it for this CPU during an evaluation, after which gradients cannot be "
            "computed; load the model again and evaluate it with the trainer"
        )
    if is_opaque(p) and device is not None and not is_on(p, device):
        raise UnsupportedError(
            f"{name}: {type(p).__name__} is on {p.device}, but its scales cannot be moved to {device}; "
            "load the model on the device used for training"
        )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuses a trainable parameter that shares memory with another parameter or a buffer: after sharding, the other
    one would no longer follow its updates."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    tensors = (*model.named_parameters(), *model.named_buffers())
    held = sorted(((*_range_of(t), name, id(t)) for name, t in tensors), key=lambda each: each[:2])
    stop, first, one = 0, "", 0  # end, name and id of the previous tensor that ends last
    for start, end, second, other in held:
        if start < min(stop, end) and not trained.isdisjoint((one, other)):
            raise UnsupportedError(
                f"{first}, {second}: share memory without being one parameter, and sharding would separate them; tie "
                "them as one parameter (`decoder.weight = encoder.weight`), compute one from the other in the "
                "forward, or give one its own memory (clone())"
            )
        if end > stop:
            stop, first, one = end, second, other


def _refuse_aliases(model: nn.Module) -> None:
    """Refuses tensors in plain attributes of modules, alone or in a list, tuple or dict, that share memory with a
    trainable parameter: sharding moves the parameter, and the attribute would keep old values."""
    trained: dict[int, list[tuple[int, int, str]]] = {}  # by storage
    for name, p in model.named_parameters():
        if p.requires_grad and (span := _range_of(p)) != (0, 0):
            trained.setdefault(p.untyped_storage()._cdata, []).append((*span, name))
    params = {id(p) for p in model.parameters()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            each = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for tensor in each:
                if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or id(tensor) in params:
                    continue
                if tensor.layout is not torch.strided or not tensor.numel():
                    continue
                for start, stop, name in trained.get(tensor.untyped_storage()._cdata, ()):
                    low = tensor.data_ptr()
                    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
                    if low < stop and start < low + extent * tensor.itemsize:
                        raise UnsupportedError(
                            f"{f'{path}.{key}'.lstrip('.')}: is a view or alias of {name}, kept as a plain attribute, "
                            "and would keep old values when the parameter is sharded; make the view in the forward "
                            "(self.weight.t()), or keep a copy (clone()) if the old values are meant"
                        )


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses where the memory of a tensor begins and ends; `(0, 0)` if it has no memory, or if its
    memory has gaps, which other tensors may use."""
    is_plain = type(tensor) in (nn.Parameter, nn.Buffer, torch.Tensor) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type == "meta" or source_of(tensor) is not None or not tensor.numel():
        return 0, 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return (start, start + extent * tensor.itemsize) if extent == tensor.numel() else (0, 0)


def refuse_what_cannot_be_summed(name: str, param: nn.Parameter) -> None:
    """Refuses a trainable parameter in a dtype whose gradients cannot be averaged over the ranks: complex or 8-bit."""
    if param.requires_grad and param.dtype not in SUMMED:
        remedy = (
            "keep it as real numbers (torch.view_as_real), with one more dimension of 2, or freeze it"
            if param.dtype.is_complex
            else "cast it to bfloat16 or float32, or freeze it"
        )
        raise UnsupportedError(
            f"{name}: is trained in {str(param.dtype).removeprefix('torch.')}, whose gradients cannot be averaged "
            f"over the ranks; {remedy}"
        )


def _biases_beside_opaque(model: nn.Module) -> dict[int, nn.Parameter]:
    """Maps the `id` of every opaque weight to the bias of its module."""
    owned = [module._parameters for module in model.modules() if module._parameters.get("bias") is not None]
    return {id(p): params["bias"] for params in owned for p in params.values() if p is not None and is_opaque(p)}


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device. "cpu" and "cpu:0" are the same."""
    has_same_index = None in (tensor.device.index, device.index) or tensor.device.index == device.index
    return tensor.device.type == device.type and has_same_index


def _no_split_names(model: nn.Module) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _containers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the paths and containers whose members are blocks, outermost first. No container is inside a block of
    another container."""
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and _holds_blocks(module)
    ]
    no_split = _no_split_names(model)
    named = [
        (path, module) for path, module in found if any(type(m).__name__ in no_split for _, m in _members(module))
    ]
    return _outermost(named) if named else _longest(found)


def _longest(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Selects the longest of nested containers. A container with a single block does not count as a repetition."""
    chosen = []
    for path, container in _outermost(found):
        inner = [(p, c) for p, c in found if _is_inside(p, path)]
        longest = max((len(c) for _, c in inner), default=0)
        if inner and longest > len(container):
            chosen += _longest(inner)
        elif len(container) > 1 or inner:
            chosen.append((path, container))
    return chosen


def _holds_blocks(container: nn.Module) -> bool:
    """Whether all members of a container define a forward. The members of a list of lists do not."""
    members = [module for _, module in _members(container)]
    return bool(members) and all(type(module).forward is not nn.Module.forward for module in members)


def _outermost(containers: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    chosen: list[tuple[str, nn.Module]] = []
    for path, container in containers:
        if not any(_is_inside(path, outer) for outer, _ in chosen):
            chosen.append((path, container))
    return chosen


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and (not outer or path.startswith(outer + "."))


def _members(container: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, module) for key, module in container.named_children() if any(True for _ in module.parameters())]


def _count_users(model: nn.Module, containers: list[tuple[str, nn.Module]]) -> dict[int, int]:
    """Counts the users of each parameter: every block that holds it, and all modules outside of the blocks as one."""
    blocks = {id(block): block for _, container in containers for _, block in _members(container)}
    users = Counter(id(p) for block in blocks.values() for p in block.parameters())
    users.update({id(p) for module in _around(model, blocks) for p in module.parameters(recurse=False)})
    return users


def _around(model: nn.Module, blocks: Container[int]) -> dict[nn.Module, None]:
    """Returns the modules that can be reached without entering a block. Some of them may also be inside a block.
    `blocks` holds the `id`s of the blocks."""
    found: dict[nn.Module, None] = {}
    todo = [model]
    while todo:
        module = todo.pop()
        if module not in found and id(module) not in blocks:
            found[module] = None
            todo += module.children()
    return found
