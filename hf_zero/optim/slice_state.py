"""An optimizer's state by parameter name, for any number of ranks and any stage."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.engine.flat import NamedShard
from hf_zero.errors import CheckpointError
from hf_zero.optim.flat_slices import FlatSlice


# The tables by which 8-bit optimizers decode: they follow from the optimizer.
TABLES = ("qmap", "qmap1", "qmap2")


def plain_tensors(state: dict, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors of one slice's state; a composite tensor is given as its parts.

    A quantized tensor consists of codes and scales. A tensor with several rows for the slice (AdEMAMix keeps both of
    its averages in one) consists of these rows, each of which can be cut where the slice can.

    Args:
        state (`dict`): by key.
        is_whole (`bool`): it belongs to a whole parameter, and is in whatever shape the optimizer likes.
    """
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield from _parts(key, value, is_whole)


def _parts(key: str, value: Tensor, is_whole: bool) -> Iterator[tuple[str, Tensor]]:
    if is_traceable_wrapper_subclass(value):
        for part in value.__tensor_flatten__()[0]:
            yield f"{key}_{part}", getattr(value, part)
    elif value.dim() == 2 and not is_whole:
        for index, row in enumerate(value):
            yield f"{key}_{index}", row
    else:
        yield key, value


def is_number(value, flat_slice: FlatSlice) -> bool:
    """Whether a state value is one number for the whole slice, such as Adam's step count."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or (value.numel() == 1 and value.shape != flat_slice.param.shape)
    return isinstance(value, (int, float))


def state_shards(flat_slice: FlatSlice, state: dict, only: tuple[int, int]) -> Iterator[tuple[str, NamedShard]]:
    """Yields the tensors of a slice's state, by parameter, as far as they belong to the range `only`.

    What has a value for each element is given as the parameter's. What is not so shaped belongs to a slice of one
    parameter: it has a value for each of the slice's blocks, or is the slice's, and whose is the first element's.

    Raises:
        `CheckpointError`: for state of several parameters at once.
    """
    found = {key: value for key, value in state.items() if not is_number(value, flat_slice)}
    for key, tensor in plain_tensors(found, flat_slice.is_whole):
        if key.endswith(TABLES):
            continue
        if tensor.shape == flat_slice.param.shape:
            for shard in flat_slice.named(tensor, only):
                yield key, shard
        elif len(flat_slice.indices) > 1:
            raise CheckpointError(
                f"optimizer state {key!r}: has shape {list(tensor.shape)} over {', '.join(flat_slice.names)}, "
                f"which are updated as {list(flat_slice.param.shape)}; set `whole_parameters = True` on the "
                "optimizer's class"
            )
        elif only[0] <= flat_slice.start < only[1]:
            yield key, _unlike_parameter(flat_slice, tensor)


def _unlike_parameter(flat_slice: FlatSlice, tensor: Tensor) -> NamedShard:
    """Returns state that is not shaped like the slice: the parameter's, or a part of it by blocks."""
    index = flat_slice.indices[0]
    span, info = flat_slice.flat.layout.spans[index], flat_slice.flat.infos[index]
    if (flat_slice.start, flat_slice.stop) == (span.offset, span.stop):
        return NamedShard(info.name, tensor.shape, 0, tensor.reshape(-1))
    block = (flat_slice.stop - flat_slice.start) // tensor.numel()
    shape = torch.Size([span.numel // block])
    return NamedShard(info.name, shape, (flat_slice.start - span.offset) // block, tensor)


def numbers(flat_slice: FlatSlice, state: dict) -> dict[str, float]:
    """Returns the state that is one number per parameter.

    Raises:
        `CheckpointError`: for state that is neither tensor nor number.
    """
    for key, value in state.items():
        if value is not None and not isinstance(value, (Tensor, int, float)):
            raise CheckpointError(
                f"optimizer state {key!r} of {', '.join(flat_slice.names)}: a {type(value).__name__} cannot be saved; "
                "keep tensors and numbers in the state"
            )
    return {key: float(value) for key, value in state.items() if is_number(value, flat_slice)}


def set_numbers(flat_slice: FlatSlice, state: dict, values: dict[str, float], optimizer: str) -> None:
    """Writes saved numbers into a slice's state.

    Raises:
        `CheckpointError`: for numbers that it has no place for.
    """
    for key, value in values.items():
        if key not in state:
            raise CheckpointError(
                f"{flat_slice.names[0]}: the checkpoint has optimizer state {key!r}, {optimizer} has {sorted(state)}; "
                "resume with the optimizer that saved it"
            )
        old = state[key]
        state[key] = torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)


def part_of(value, param: Tensor, window: slice):
    """Returns a window of a state value that is shaped like the slice, or has rows that are; a copy of another."""
    if not isinstance(value, Tensor):
        return value
    is_cut = param.dim() == 1 and value.dim() in (1, 2) and value.shape[-1:] == param.shape
    return value[..., window].contiguous() if is_cut else value.clone()


def group_as_json(group: dict) -> dict:
    """The hyperparameters that JSON knows; those that are 0-d tensors as numbers."""
    plain = {}
    for key, value in group.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if key != "params" and _is_plain(value):
            plain[key] = value
    return plain


def set_group(group: dict, saved: dict) -> None:
    """Takes over what `group_as_json` gave; a hyperparameter that is a tensor stays one."""
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def check_groups(groups: list[dict], names: list[list[str]]) -> None:
    """Refuses saved groups that are not these in number or in parameters.

    Raises:
        `CheckpointError`: saying how many each has.
    """
    if [sorted(group["param_names"]) for group in groups] != [sorted(own) for own in names]:
        raise CheckpointError(
            f"optimizer groups: the checkpoint has {len(groups)} with {[len(g['param_names']) for g in groups]} "
            f"parameters, this run {len(names)} with {[len(own) for own in names]}; "
            "resume with the settings of the run that saved it"
        )


def _is_plain(value) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
