"""The accelerator's code path, on a device of the CPU's memory (`device.cpp`) that reports races."""

import pytest

from tests.device.launch import run_with_device


def test_tests_that_need_the_device_pass_and_some_of_those_for_gpus(tmp_path):
    """In one process, since importing torch takes longer than most of them."""
    tests = ["tests/device/inside", "tests/gpu/test_parity.py", "-k", "inside or how_far_ahead and accelerator"]
    printed = run_with_device(["-m", "pytest", *tests, "-q", "-x"], tmp_path)
    assert "skipped" not in printed and " passed" in printed


@pytest.mark.full("slow")
@pytest.mark.parametrize("room", ["parity", "backends", "features", "memory", "divided"])
def test_tests_for_gpus_pass_on_it(room, tmp_path):
    run_with_device(["-m", "pytest", f"tests/gpu/test_{room}.py", "-m", "gpu", "-q", "-x"], tmp_path, timeout=900.0)
