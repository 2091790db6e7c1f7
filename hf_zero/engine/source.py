"""Lazily loaded parameters. They are on the meta device and have a source from which any range can be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from hf_zero.errors import UnsupportedError


class Source(Protocol):
    """The files that hold the values of one parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, out: Tensor, dtype: torch.dtype) -> None:
        """Fills `out`, 1-D, with elements [start, start + out.numel()) of the flattened parameter.

        Args:
            start (`int`): first element.
            out (`Tensor`): any dtype and device.
            dtype (`torch.dtype`): the dtype of the parameter. Values are rounded to it before they are copied to
                `out`.
        """


SOURCE_ATTRIBUTE = "_hf_zero_source"
COMPUTED = (
    "was computed from weights that are still in files (resized, or initialized from other weights); "
    "call hf_zero.materialize(model) first"
)


def set_source(param: nn.Parameter, source: Source) -> None:
    """Attaches a source to a parameter on the meta device. The values are read when the model is sharded."""
    setattr(param, SOURCE_ATTRIBUTE, source)


def source_of(param: Tensor) -> Source | None:
    """Returns the source of a parameter, or `None` if it has none or its values have been read."""
    return getattr(param, SOURCE_ATTRIBUTE, None)


def has_sources(model: nn.Module) -> bool:
    """Whether any parameter has values that have not been read yet. Such a model can be sharded, but not run or
    moved."""
    return any(source_of(p) is not None for p in model.parameters())


def materialize(model: nn.Module) -> nn.Module:
    """Reads all values that are still in files, so that the model can be used without sharding.

    Args:
        model (`nn.Module`): a model that `hf_zero.load_pretrained` returned. Parameters keep their identity.

    Returns:
        `nn.Module`: the same model, with all values on the CPU.

    Raises:
        `UnsupportedError`: if a parameter was resized before its values were read.
        `CheckpointError`: if the files can no longer be read.
    """
    for name, param in model.named_parameters():
        source = source_of(param)
        if source is not None:
            if not fits(param, source):
                raise UnsupportedError(f"{name}: {COMPUTED}")
            values = torch.empty(param.shape, dtype=param.dtype)
            source.read(0, values.view(-1), param.dtype)
            give_data(param, values)
            forget_source(param)
    return model


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Replaces parameters that are still in files by placeholders on the CPU inside the context, for code that adds
    parameters to the model.

    For example, PEFT creates an adapter on the device of the weight that it adapts, which must not be the meta device:

        with hf_zero.placeholders(model):
            model = get_peft_model(model, LoraConfig(...))

    Placeholders read NaN. A new parameter that contains NaN was therefore computed from weights that have not been
    read.

    Args:
        model (`nn.Module`): a model that `hf_zero.load_pretrained` returned. Other models are not changed.

    Raises:
        `UnsupportedError`: if a parameter that was added or replaced was computed from a placeholder.
    """
    lazy = [param for param in model.parameters() if source_of(param) is not None]
    for param in lazy:
        nothing = float("nan") if param.is_floating_point() else 0
        _swap(param, torch.full((), nothing, dtype=param.dtype).expand(param.shape))
    try:
        yield
    finally:
        for param in lazy:
            _swap(param, torch.empty(param.shape, dtype=param.dtype, device="meta"))
    for name, param in model.named_parameters() if lazy else ():
        source = source_of(param)
        is_new = source is None and param.is_floating_point() and param.device.type != "meta"
        if (is_new and bool(param.isnan().any())) or (source is not None and not fits(param, source)):
            raise UnsupportedError(f"{name}: {COMPUTED}")


def fits(param: nn.Parameter, source: Source) -> bool:
    """Whether a parameter still has the shape that its source describes."""
    return tuple(param.shape) == tuple(source.shape)


def can_give(param: nn.Parameter, data: Tensor) -> bool:
    """Whether torch can set `param.data` to a plain tensor. It cannot if they are on different
    devices, and one is the meta device or has a backend that is not part of torch."""
    return param.device.type == data.device.type or torch._has_compatible_shallow_copy_type(param, data)


def give_data(param: nn.Parameter, data: Tensor) -> None:
    """Sets `param.data`, even if torch refuses that. The parameter keeps its identity."""
    if can_give(param, data):
        param.data = data
    else:
        _swap(param, data)


def _swap(param: nn.Parameter, data: Tensor) -> None:
    """Sets `param.data` by swapping tensors, keeping the parameter's attributes."""
    attributes = dict(param.__dict__)
    torch.utils.swap_tensors(param, nn.Parameter(data, requires_grad=param.requires_grad))
    param.__dict__.update(attributes)


def forget_source(param: Tensor) -> None:
    """Removes the source of a parameter whose values have been read."""
    param.__dict__.pop(SOURCE_ATTRIBUTE, None)
