"""An optimizer's state by parameter name, as other programs saved it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.errors import CheckpointError


# Settings that say how a step is computed, not what it computes: the run that goes on keeps its own.
_HOW = frozenset(("foreach", "fused", "capturable", "differentiable", "params", "param_names"))


@dataclass
class SavedState:
    """The state and the hyperparameters of an optimizer by parameter name."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by state key
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # likewise, of every parameter that has state
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # the hyperparameters of its group

    def put(self, name: str, key: str, value: Any) -> None:
        """Adds a state value; one that is a single number counts as a number."""
        numbers = self.numbers.setdefault(name, {})
        if isinstance(value, Tensor) and value.dim():
            self.tensors.setdefault(name, {})[key] = value
        elif value is not None:
            numbers[key] = float(value)

    def renamed(self, own: Callable[[str], str]) -> "SavedState":
        """Returns the state with other names for the parameters."""
        return SavedState(*({own(name): value for name, value in of.items()} for of in vars(self).values()))

    def groups(self) -> list[dict[str, Any]]:
        """Returns groups of parameters with equal hyperparameters, as they stand in a manifest. Loading divides them
        over the groups of the run that goes on."""
        groups: list[dict[str, Any]] = []
        for name, settings in self.settings.items():
            plain = {key: _plain(value) for key, value in settings.items() if key not in _HOW}
            group = next((each for each in groups if {**each, "param_names": 0} == {**plain, "param_names": 0}), None)
            if group is None:
                groups.append(group := {**plain, "param_names": []})
            group["param_names"].append(name)
        return groups


def state_by_name(subject: Path, saved: Mapping[str, Any], names: Mapping[Any, str]) -> SavedState:
    """Sorts an optimizer's state dict by parameter name. `names` has those of numbered parameters. Raises
    [`CheckpointError`] where it is no state dict, or numbers parameters that have no names."""
    if not {"state", "param_groups"} <= set(saved):
        raise CheckpointError(
            f"{subject}: found {sorted(map(str, saved))[:5]}, wanted state and param_groups; "
            "give the state dict of a torch optimizer"
        )
    state = SavedState()
    for group in saved["param_groups"]:
        state.settings.update((names.get(param, param), group) for param in group["params"])
    for param, values in saved["state"].items():
        for key, value in values.items():
            state.put(names.get(param, param), key, value)
    if nameless := [name for name in state.settings | state.numbers if not isinstance(name, str)]:
        raise CheckpointError(
            f"{subject}: its parameters are numbers ({nameless[0]}), expected names; save the state dict that torch's "
            "get_optimizer_state_dict gives"
        )
    return state


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
