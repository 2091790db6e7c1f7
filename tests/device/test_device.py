"""The accelerator's code path, on a device of the CPU's memory (`device.cpp`) that reports races."""

import pytest

from tests.device.launch import run_with_device


@pytest.mark.parametrize("file", ["test_backend.py", "test_semantics.py", "test_streams.py"])
def test_tests_that_need_the_device_pass(file, tmp_path):
    run_with_device(["-m", "pytest", f"tests/device/inside/{file}", "-q", "-x"], tmp_path)


@pytest.mark.parametrize(
    "tests",
    [
        "tests/gpu/test_parity.py -k how_far_ahead",
        *(
            pytest.param(f"tests/gpu/{file}", marks=pytest.mark.full("slow"))
            for file in ("test_parity.py", "test_backends.py", "test_features.py", "test_memory.py", "test_divided.py")
        ),
    ],
)
def test_tests_for_gpus_pass_on_it(tests, tmp_path):
    run_with_device(["-m", "pytest", *tests.split(), "-m", "gpu", "-q", "-x"], tmp_path, timeout=900.0)
