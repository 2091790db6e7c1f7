"""A library that changed under us is an error at import, not a silent difference."""

import inspect
import tomllib
from pathlib import Path

import pytest
from accelerate import Accelerator
from packaging.requirements import Requirement
from transformers import Trainer
from trl import DPOTrainer

from hf_zero.accelerator import ZeroAccelerator, accelerator
from hf_zero.compat import check_overrides
from hf_zero.errors import ConfigError
from hf_zero.trainer import trainer
from hf_zero.trainer.trainer import ZeroTrainerMixin
from hf_zero.trl import ZeroTrlTrainerMixin, mixin


pytestmark = pytest.mark.quick


OVERRIDING = [
    (ZeroTrainerMixin, Trainer, trainer.OVERRIDES),
    (ZeroAccelerator, Accelerator, accelerator.OVERRIDES),
    (ZeroTrlTrainerMixin, DPOTrainer, mixin.OVERRIDES),
]


@pytest.mark.parametrize("own, base, checked", OVERRIDING)
def test_every_override_is_checked(own, base, checked):
    overridden = {name for name in vars(own) if hasattr(base, name) and not name.startswith("__")}
    assert overridden == set(checked)


def make(**methods):
    return type("Made", (), methods)


class Base:
    def save(self, folder, internal=False):
        """As another library has it."""
        return folder, internal


class Same:
    def save(self, folder: str | None, internal: bool = True):
        """The same parameters: types and defaults are ours to choose."""


class Renamed:
    def store(self, folder):
        """Nothing of this name exists in the base."""


def test_the_same_parameters_pass_and_change_nothing():
    before = Same.save
    check_overrides(Same, Base, ("save",))
    assert Same.save is before


def test_a_parameter_that_is_gone_is_refused_with_both_signatures_and_versions():
    theirs = make(save=lambda self, folder: None)
    with pytest.raises(ConfigError, match=r"Made.save takes \(self, folder\) in transformers 5.*accelerate 1") as e:
        check_overrides(Same, theirs, ("save",))
    assert "(self, folder, internal)" in str(e.value)


def test_a_method_that_is_gone_is_refused():
    with pytest.raises(ConfigError, match="Base.store does not exist"):
        check_overrides(Renamed, Base, ("store",))


def test_parameters_may_be_added_behind_ours_but_not_before_them():
    check_overrides(Same, make(save=lambda self, folder, internal, kind="whole", *, safe=True: None), ("save",))
    with pytest.raises(ConfigError, match=r"Made.save takes \(self, folder, kind, internal\)"):
        check_overrides(Same, make(save=lambda self, folder, kind, internal: None), ("save",))


@pytest.mark.parametrize("own, base, checked", OVERRIDING)
def test_overrides_take_every_positional_argument_of_the_original(own, base, checked):
    for name in set(checked) - {"torch_device_mesh", "_run_epoch"}:  # a property; Trainer passes all by name
        known = inspect.signature(getattr(base, name)).parameters.values()
        num_positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in known)
        inspect.signature(getattr(own, name)).bind(*range(num_positional))


REPLACED = {
    "torch_device_mesh",  # a property
    "_move_model_to_device",
    "save_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_best_model",
    "create_model_card",  # hands on positional arguments too
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_state_dict",
    "_save",
}


@pytest.mark.parametrize("own, checked", [(own, checked) for own, _, checked in OVERRIDING])
def test_overrides_that_call_the_original_hand_on_what_they_do_not_know(own, checked):
    for name in set(checked) - REPLACED:
        kinds = {parameter.kind for parameter in inspect.signature(getattr(own, name)).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD in kinds, f"{own.__name__}.{name} takes no **kwargs"


def test_what_is_tested_is_within_the_bounds_and_the_bounds_end():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["trl"]]
    bounds = {Requirement(line).name: Requirement(line).specifier for line in lines}
    pins = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in ("torch", "transformers", "accelerate", "datasets", "trl"):
        assert bounds[name].contains(pins[name])
        assert any(part.operator == "<" for part in bounds[name]), f"{name} has no upper bound"
