"""Optimizer state as it is saved: by parameter name, independent of the number of ranks and the stage."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.engine.flat import NamedShard
from hf_zero.errors import CheckpointError
from hf_zero.optim.flat_slices import FlatSlice


# Lookup tables of 8-bit optimizers. They are not saved, because the optimizer recreates them.
TABLES = ("qmap", "qmap1", "qmap2")


# Hyperparameters that only some optimizers have.
FAMILIES = ("betas", "momentum", "alpha", "etas", "rho", "lr_decay")
# Hyperparameters that distinguish optimizers with the same kind of state.
SWITCHES = ("decoupled_weight_decay", "amsgrad", "nesterov", "centered", "maximize")


def describe_shards(shards: dict[str, Any] | None) -> str:
    if not isinstance(shards, dict):
        return "no sharded optimizer"
    ranks = f"rank {shards['rank']} of {shards['num_ranks']} at stage {shards['stage']}"
    return f"{ranks} with {len(shards['ranges'])} ranges of parameters"


def state_fits(param: nn.Parameter, values: dict) -> bool:
    """Whether a saved state fits a slice: elementwise state is 1-D or has the shape of the parameter."""
    shaped = [value for value in values.values() if isinstance(value, Tensor) and value.dim() == param.dim() > 0]
    return not shaped or any(value.shape == param.shape for value in shaped)


def taken_over(value, device: torch.device, numbers: bool):
    """Returns a copy of a saved value on the device where `torch.optim.Optimizer.load_state_dict` puts it: that of the
    parameter for tensors; scalars are only moved with `numbers`."""
    if not isinstance(value, Tensor):
        return value
    moved = value.to(device) if numbers or value.dim() else value
    return value.clone() if moved is value else moved


def plain_number(value: Any) -> Any:
    """Returns a hyperparameter (or a tuple of them) as a number. Capturable optimizers store hyperparameters in
    tensors."""
    if isinstance(value, tuple):
        return tuple(map(plain_number, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def regrouped(groups: list[dict], names: list[list[str]]) -> list[dict]:
    """Returns the saved groups unchanged if they have the same parameters as this run's, else split like this
    run's."""
    if [sorted(group["param_names"]) for group in groups] == [sorted(own) for own in names]:
        return groups
    of = {name: {**group, "param_names": []} for group in groups for name in group["param_names"]}
    if sorted(of) != sorted(chain.from_iterable(names)):
        raise CheckpointError(
            f"optimizer groups: the checkpoint has {len(groups)} with {[len(g['param_names']) for g in groups]} "
            f"parameters, this run {len(names)} with {[len(own) for own in names]}; "
            "resume with the settings of the run that saved it"
        )
    for first, name in ((own[0], name) for own in names for name in own):
        for key in of[first].keys() | of[name].keys():
            if of[first].get(key) != of[name].get(key):
                raise CheckpointError(
                    f"optimizer groups: {key} is {of[first].get(key)} for {first}, {of[name].get(key)} for {name}, "
                    "which are in one group here; use the groups of the run that saved it"
                )
    return [{**of[own[0]], "param_names": own} if own else {"param_names": []} for own in names]


def refuse_other_kind(own: dict, saved: dict) -> None:
    """Raises [`CheckpointError`] for hyperparameters of another optimizer, which has no distinctive state (SGD)."""
    for key in FAMILIES:
        if (key in own) is not (key in saved):
            saved_by, here = (f"without {key}", f"has {key}={own[key]}") if key in own else (f"with {key}", "has none")
            raise CheckpointError(
                f"optimizer groups: the state was saved by an optimizer {saved_by}, this run's {here}; "
                "resume with the optimizer that it was saved with"
            )
    for key in SWITCHES:
        if key in own and key in saved and bool(own[key]) != bool(saved[key]):
            raise CheckpointError(
                f"optimizer groups: the state was saved with {key}={saved[key]}, this run's optimizer has {own[key]}; "
                "resume with the optimizer that it was saved with"
            )


def plain_tensors(state: dict, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors of a slice's state. Composite tensors are split into their parts.

    A quantized tensor consists of codes and scales. A tensor with several rows for the slice (AdEMAMix stacks its two
    averages) is split into rows, which can be split further like the slice. `is_whole`: the slice is a full parameter,
    whose state may have any shape."""
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value):
            yield from ((f"{key}_{part}", getattr(value, part)) for part in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor) and value.dim() == 2 and not is_whole:
            yield from ((f"{key}_{index}", row) for index, row in enumerate(value))
        elif isinstance(value, Tensor):
            yield key, value


def _is_number(value, flat_slice: FlatSlice) -> bool:
    """Whether a state value is a scalar for the slice, such as Adam's step count."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or (value.numel() == 1 and value.shape != flat_slice.param.shape)
    return isinstance(value, (int, float))


def shards_of(flat_slice: FlatSlice, state: dict, only: tuple[int, int]) -> Iterator[tuple[str, NamedShard]]:
    """Yields the tensors of a slice's state by parameter, restricted to the range `only`.

    Elementwise state is yielded in ranges of the parameters. State of another shape belongs to a slice of one
    parameter: it has a value for each block of the slice, or belongs to the slice as a unit, and is saved by the rank
    that saves the first element. Raises [`CheckpointError`] for other state of several parameters."""
    found = {key: value for key, value in state.items() if not _is_number(value, flat_slice)}
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
    """Returns state that is not shaped like the slice: that of a full parameter, or one value per block."""
    index = flat_slice.indices[0]
    span, info = flat_slice.flat.layout.spans[index], flat_slice.flat.infos[index]
    if (flat_slice.start, flat_slice.stop) == (span.offset, span.stop):
        return NamedShard(info.name, tensor.shape, 0, tensor.reshape(-1))
    block = (flat_slice.stop - flat_slice.start) // tensor.numel()
    shape = torch.Size([span.numel // block])
    return NamedShard(info.name, shape, (flat_slice.start - span.offset) // block, tensor)


def numbers_of(flat_slice: FlatSlice, state: dict) -> dict[str, float]:
    """Returns the state that is one number per parameter. Raises [`CheckpointError`] for state that is neither a
    tensor nor a number."""
    for key, value in state.items():
        if value is not None and not isinstance(value, (Tensor, int, float)):
            raise CheckpointError(
                f"optimizer state {key!r} of {', '.join(flat_slice.names)}: a {type(value).__name__} cannot be saved; "
                "keep tensors and numbers in the state"
            )
    return {key: float(value) for key, value in state.items() if _is_number(value, flat_slice)}


def set_numbers(flat_slice: FlatSlice, state: dict, values: dict[str, float], optimizer: str) -> None:
    """Writes saved scalars into a slice's state. Raises [`CheckpointError`] for scalars that the state does not
    have."""
    for key, value in values.items():
        if key not in state:
            raise CheckpointError(
                f"{flat_slice.names[0]}: the checkpoint has optimizer state {key!r}, {optimizer} has {sorted(state)}; "
                "resume with the optimizer that saved it"
            )
        old = state[key]
        state[key] = torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)


def part_of(value, param: Tensor, window: slice):
    """Returns a range of a state value with the shape of the slice, or with rows of this shape; otherwise a copy."""
    if not isinstance(value, Tensor):
        return value
    is_cut = param.dim() == 1 and value.dim() in (1, 2) and value.shape[-1:] == param.shape
    return value[..., window].contiguous() if is_cut else value.clone()


def is_plain(value) -> bool:
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
