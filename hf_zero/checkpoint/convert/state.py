"""The optimizer state of other programs, by parameter name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.errors import CheckpointError


# Settings that do not change the result of a step: the resumed run keeps its own.
_HOW = frozenset(("foreach", "fused", "capturable", "differentiable", "params", "param_names"))


@dataclass
class SavedState:
    """The state and the hyperparameters of an optimizer by parameter name."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by state key
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # by state key, for every parameter with state
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # hyperparameters of the parameter's group

    def put(self, name: str, key: str, value: Any) -> None:
        """Adds a value: a tensor, or a number, which may be a 0-d tensor."""
        numbers = self.numbers.setdefault(name, {})
        if isinstance(value, Tensor) and value.dim():
            self.tensors.setdefault(name, {})[key] = value
        elif value is not None:
            numbers[key] = float(value)

    def renamed(self, own: Callable[[str], str]) -> "SavedState":
        """Returns the state with other names for the parameters."""
        return SavedState(*({own(name): value for name, value in of.items()} for of in vars(self).values()))

    def groups(self) -> list[dict[str, Any]]:
        """Returns groups of parameters with equal hyperparameters, as in a manifest. Loading maps them to the groups
        of the resumed run."""
        groups: list[dict[str, Any]] = []
        for name, settings in self.settings.items():
            plain = {key: _plain(value) for key, value in settings.items() if key not in _HOW}
            group = next((each for each in groups if {**each, "param_names": 0} == {**plain, "param_names": 0}), None)
            if group is None:
                groups.append(group := {**plain, "param_names": []})
            group["param_names"].append(name)
        return groups


def state_by_name(subject: Path, saved: Mapping[str, Any], names: Mapping[Any, str]) -> SavedState:
    """Sorts an optimizer's state dict by parameter name. `names` maps parameter indices to names. Raises
    [`CheckpointError`] if it is not a state dict, or an index has no name."""
    if not {"state", "param_groups"} <= set(saved):
        raise CheckpointError(
            f"{subject}: found {sorted(map(str, saved))[:5]}, expected state and param_groups; "
            "pass the state dict of a torch optimizer"
        )
    state = SavedState()
    for group in saved["param_groups"]:
        state.settings.update((names.get(param, param), group) for param in group["params"])
    for param, values in saved["state"].items():
        for key, value in values.items():
            state.put(names.get(param, param), key, value)
    if nameless := [name for name in state.settings | state.numbers if not isinstance(name, str)]:
        raise CheckpointError(
            f"{subject}: its parameters are numbers ({nameless[0]}), expected names; save the state dict returned by "
            "torch's get_optimizer_state_dict"
        )
    return state


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
