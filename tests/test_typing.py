"""What a type checker, and so an editor, knows of the public names."""

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from hf_zero.config import ZeroConfig, ZeroSettings


ROOT = Path(__file__).parents[1]
needs_mypy = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy: pip install mypy")

SCRIPT = """
import torch
import hf_zero
import hf_zero.trl

model = torch.nn.Linear(2, 2)
sharded = hf_zero.shard(model, stage=2, offload="optimizer", strict=True)
reveal_type(sharded)
reveal_type(hf_zero.ShardedOptimizer(sharded, torch.optim.AdamW, lr=1.0))
reveal_type(hf_zero.ZeroTrainer)
reveal_type(hf_zero.ZeroTrainingArguments(output_dir="out", zero_stage=3))
reveal_type(hf_zero.trl.ZeroSFTTrainer)
reveal_type(hf_zero.ZeroAccelerator(zero_stage=3, zero_offload="optimizer", mixed_precision="bf16"))
with hf_zero.gathered(model, writeback=True) as nothing:
    pass
reveal_type(hf_zero.gathered(model))
reveal_type(sharded.full_grad("weight"))
reveal_type(sharded.computing_in(torch.bfloat16))
reveal_type(sharded.gathered())
reveal_type(sharded.memory())
"""
WRONG = """
import torch
import hf_zero

model = torch.nn.Linear(2, 2)
hf_zero.shard(model, stag=3)
hf_zero.shard(model, offload=3)
hf_zero.gathered(model, write_back=True)
hf_zero.shart(model)
hf_zero.shard(model).units
hf_zero.errors.ConfigErrors
hf_zero.trl.ZeroSFTTrainers
"""


def mypy(folder: Path, script: str) -> list[str]:
    """What mypy says of a script; it does not read the sources of other packages, which takes minutes. What it knows
    of the package it keeps where `make quality` does."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--no-error-summary"]
        + [folder / "script.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert not result.stderr, result.stderr
    return [re.sub(r"^.*script\.py:\d+: ", "", line) for line in result.stdout.splitlines() if "script.py" in line]


@pytest.mark.full("slow")
@needs_mypy
def test_type_checkers_know_the_public_names(tmp_path):
    said = mypy(tmp_path, SCRIPT)
    assert all(line.startswith("note: Revealed type is") for line in said), said
    types = [re.search('"(.*)"', line)[1] for line in said]
    assert types[0] == "hf_zero.engine.sharded_model.ShardedModel"
    assert types[1] == "hf_zero.optim.sharded.ShardedOptimizer"
    assert re.fullmatch(r"def \(.*\) -> hf_zero\.trainer\.trainer\.ZeroTrainer", types[2])
    assert types[3] == "hf_zero.trainer.training_arguments.ZeroTrainingArguments"
    assert re.fullmatch(r"def \(.*\) -> hf_zero\.trl\.\w+\.ZeroSFTTrainer", types[4])
    assert types[5] == "hf_zero.accelerator.accelerator.ZeroAccelerator"
    assert re.match(r"contextlib\._GeneratorContextManager\[None", types[6])
    assert types[7].endswith("Tensor | None") or types[7] == "Any | None"
    assert re.match(r"contextlib\.AbstractContextManager\[None", types[8])
    assert re.match(r"contextlib\.AbstractContextManager\[None", types[9])
    assert types[10] == "hf_zero.engine.memory.MemoryReport"


@needs_mypy
def test_a_setting_that_does_not_exist_is_an_error_before_anything_runs(tmp_path):
    said = mypy(tmp_path, WRONG)
    assert [line.split("  [")[0] for line in said if line.startswith("error")] == [
        'error: Unexpected keyword argument "stag" for "shard"; did you mean "stage"?',
        'error: Argument "offload" to "shard" has incompatible type "int"; expected "str"',
        'error: Unexpected keyword argument "write_back" for "gathered"; did you mean "writeback"?',
        'error: Module has no attribute "shart"',
        'error: "ShardedModel" has no attribute "units"',
        'error: Module has no attribute "ConfigErrors"; maybe "ConfigError"?',
        'error: Module has no attribute "ZeroSFTTrainers"',
    ]


def test_the_typed_settings_are_the_fields_of_the_config():
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    hints = get_type_hints(ZeroConfig)
    by_name = {"stage", "compute_dtype"}  # `shard` names these two itself
    assert get_type_hints(ZeroSettings) == {name: hints[name] for name in fields - by_name}
