"""A library that changed under us is an error at import, not a silent difference."""

import pytest
from accelerate import Accelerator
from transformers import Trainer

from hf_zero.accelerator import ZeroAccelerator, accelerator
from hf_zero.compat import check_overrides
from hf_zero.errors import ConfigError
from hf_zero.trainer import trainer
from hf_zero.trainer.trainer import ZeroTrainerMixin


pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "own, base, checked",
    [(ZeroTrainerMixin, Trainer, trainer.OVERRIDES), (ZeroAccelerator, Accelerator, accelerator.OVERRIDES)],
)
def test_every_override_is_checked(own, base, checked):
    overridden = {name for name in vars(own) if hasattr(base, name) and not name.startswith("__")}
    assert overridden == set(checked)


class Base:
    def save(self, folder, internal=False):
        """As another library has it."""


class Same:
    def save(self, folder: str | None, internal: bool = True):
        """The same parameters: types and defaults are ours to choose."""


class Fewer:
    def save(self, folder):
        """A parameter is missing."""


class Renamed:
    def store(self, folder):
        """Nothing of this name exists in the base."""


def test_the_same_parameters_pass():
    check_overrides(Same, Base, ("save",))


def test_other_parameters_are_refused_with_both_signatures_and_versions():
    with pytest.raises(
        ConfigError, match=r"Base.save takes \(self, folder, internal\) in transformers 5.*accelerate 1"
    ) as e:
        check_overrides(Fewer, Base, ("save",))
    assert "(self, folder)" in str(e.value)


def test_a_method_that_is_gone_is_refused():
    with pytest.raises(ConfigError, match="Base.store does not exist"):
        check_overrides(Renamed, Base, ("store",))
