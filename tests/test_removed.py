"""What was removed is rejected with one line that names the alternative, wherever settings are given."""

import re

import pytest

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.recipes.run_config import RunConfig, make_parser
from hf_zero.recipes.tasks import TASKS, TOOLS
from hf_zero.removed import REMOVED
from tests import models


pytestmark = pytest.mark.quick

NAMES = [name for name in REMOVED if "=" not in name]
FLAGS = [name for name in NAMES if name.startswith("zero_")]


def test_no_removed_name_is_in_use():
    known = {action.dest for action in make_parser("classify")._actions} | {*TASKS, *TOOLS}
    known |= {f"zero_{name}" for name in vars(ZeroConfig())}
    assert not known & set(REMOVED)


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_name_is_refused_with_the_alternative(name, tmp_path):
    line = f".*{name}.* it was removed; {re.escape(REMOVED[name])}"
    path = tmp_path / "run.yaml"
    path.write_text(f"{name}: 1\n", encoding="utf-8")
    for argv in ([f"--{name}=1"], [f"--{name.replace('_', '-')}", "1"], ["--config", str(path)]):
        with pytest.raises(ConfigError, match=line.replace(name, re.sub("_", "[_-]", name), 1)):
            RunConfig.parse("classify", argv)


@pytest.mark.parametrize("name", FLAGS)
def test_a_removed_argument_is_refused_with_the_alternative(name, tmp_path):
    with pytest.raises(ConfigError, match=f"^{name}: it was removed; {re.escape(REMOVED[name])}"):
        hf_zero.ZeroTrainingArguments(str(tmp_path), **{name: 1})
    with pytest.raises(ConfigError, match=f"^{name}: it was removed"):
        hf_zero.ZeroAccelerator(**{name: 1})
    with pytest.raises(ConfigError, match=f"^{name.removeprefix('zero_')}: it was removed"):
        hf_zero.shard(models.build("mlp"), **{name.removeprefix("zero_"): 1})


@pytest.mark.parametrize("what", [name for name in REMOVED if "=" in name])
def test_a_removed_value_is_refused_with_the_alternative(what, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: out\n{what.replace('=', ': ')}\n", encoding="utf-8")
    for argv in ([f"--{what}"], ["--config", str(path)]):
        with pytest.raises(ConfigError, match=f"^{what}: it was removed; {re.escape(REMOVED[what])}"):
            RunConfig.parse("classify", argv).training_arguments()
