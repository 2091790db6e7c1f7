"""Files of `torch.save` that hold a whole state: FSDP's FULL_STATE_DICT, and `optimizer.pt` of a plain Trainer run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.checkpoint.foreign.parts import ForeignState, ForeignTensor
from hf_zero.checkpoint.foreign.trusted import load_mapped
from hf_zero.errors import CheckpointError


OPTIMIZER_NAME = "optimizer.pt"


def full_weights(path: Path) -> dict[str, ForeignTensor]:
    """The tensors of a file that holds a model's state dict."""
    return {name: ForeignTensor.of(tensor) for name, tensor in load_mapped(path).items() if isinstance(tensor, Tensor)}


def full_state(path: Path, groups: Sequence[dict]) -> ForeignState:
    """The optimizer state of a file that holds an optimizer's state dict, its parameters numbered or named."""
    return state_by_name(path, load_mapped(path), groups)


def trainer_state(folder: Path, groups: Sequence[dict]) -> ForeignState:
    """The optimizer state of a plain Trainer run."""
    return full_state(folder / OPTIMIZER_NAME, groups)


def state_by_name(subject: Path, saved: Mapping[str, Any], groups: Sequence[dict]) -> ForeignState:
    """Sorts an optimizer's state dict by parameter name.

    A plain optimizer numbers its parameters through its groups. Trainer makes the same groups from the same model, in
    the model's order, so the numbers are those of this run's groups; shapes are compared when the state is read.

    Args:
        subject (`Path`): where it is from, for messages.
        saved (`Mapping`): "state" and "param_groups".
        groups (`Sequence[dict]`): this run's groups, with "param_names".

    Raises:
        `CheckpointError`: it is no state dict, or numbers other parameters than this run has.
    """
    if not {"state", "param_groups"} <= set(saved):
        raise CheckpointError(
            f"{subject}: found {sorted(map(str, saved))[:5]}, wanted state and param_groups; "
            "give the state dict of a torch optimizer"
        )
    names, state = _names(subject, saved["param_groups"], groups), ForeignState()
    for group in saved["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for param in group["params"]:
            state.settings[names.get(param, param)] = settings
    for param, values in saved["state"].items():
        for key, value in values.items():
            state.put(str(names.get(param, param)), key, _value(value))
    return state


def _names(subject: Path, saved_groups: Sequence[dict], groups: Sequence[dict]) -> dict[Any, str]:
    """The name of each number, where parameters are numbered."""
    if not any(isinstance(param, int) for group in saved_groups for param in group["params"]):
        return {}
    if all("param_names" in group for group in saved_groups):
        pairs = [(group["params"], group["param_names"]) for group in saved_groups]
    else:
        pairs = [(saved["params"], own["param_names"]) for saved, own in zip(saved_groups, groups)]
        found = [len(group["params"]) for group in saved_groups]
        if found != [len(group["param_names"]) for group in groups]:
            raise CheckpointError(
                f"{subject}: its groups have {found} parameters, this run's "
                f"{[len(group['param_names']) for group in groups]}; "
                "resume with the trainable parameters and groups of the run that saved it"
            )
    return {param: name for params, names in pairs for param, name in zip(params, names, strict=True)}


def _value(value: Any) -> ForeignTensor | float:
    if isinstance(value, ForeignTensor) or not isinstance(value, Tensor):
        return value
    return ForeignTensor.of(value) if value.dim() else float(value)
