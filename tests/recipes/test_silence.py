"""What other libraries say at a start: nothing that nobody can help."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hf_zero.recipes import silence


ROOT = Path(__file__).parents[2]


SAID = {
    "torchao": "Failed to load /somewhere/torchao/_C_mxfp8.so: Could not load this library",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community: no kernels",
    "bitsandbytes.autograd._functions": "MatMul8bitLt: inputs will be cast from torch.bfloat16 to float16",
    "torch.utils._pytree": "<enum 'Kind'> is an Enum subclass and is now natively supported",
    "transformers.tokenization_utils_base": "Token indices sequence length is longer than the specified maximum (20)",
}


@pytest.fixture(autouse=True)
def _silenced():
    with warnings.catch_warnings():
        silence.silence()
        yield


@pytest.mark.parametrize("name", silence.LOGGED)
def test_one_warning_of_a_logger_is_not_printed_and_all_else_is(name):
    printed, logger = [], logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())
    logger.addHandler(handler)
    try:
        logger.warning("%s", SAID[name])
        logger.error(SAID[name])
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert printed == [SAID[name], "something else"]


@pytest.mark.parametrize(
    ("said", "is_printed"),
    [
        ("'pin_memory' argument is set as true but no accelerator is found, then", False),
        ("'pin_memory' argument is wrong", True),
        ("`gradient_checkpointing_enable` is deprecated and will be removed in v6.", False),
        ("`learning_rate` is deprecated", True),
    ],
)
def test_of_warnings_only_those_are_printed_that_somebody_can_help(said, is_printed):
    with warnings.catch_warnings(record=True, action="always") as printed:
        silence.silence()
        warnings.warn(said, FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in printed] == [said] * is_printed


@pytest.mark.full("slow")
def test_importing_what_a_task_needs_prints_nothing():
    """In the order of the command line: silence first."""
    script = (
        "from hf_zero.recipes import cli, launch\n"
        "cli.silence()\n"
        "from hf_zero.recipes import classify, run, sft, trl_tasks\n"
        "import peft, transformers.trainer\n"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout + result.stderr == ""
