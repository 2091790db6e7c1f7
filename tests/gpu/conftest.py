"""The device of a test: the accelerator, if there is one, which is CUDA's or the test device (`tests/device`). In the
full tier the same tests run on the CPU, so that they work the first time that they meet a device."""

from collections.abc import Iterator

import pytest
import torch

from tests.device import backend


ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)


@pytest.fixture(
    params=[pytest.param("accelerator", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full("slow"))]
)
def device(request) -> Iterator[torch.device]:
    """The device, which repeats its bits as long as the test lasts."""
    if request.param == "accelerator" and ACCELERATOR is None:
        pytest.skip("torch sees no accelerator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield torch.device("cpu") if request.param == "cpu" else torch.device(ACCELERATOR.type, 0)
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _no_reports() -> Iterator[None]:
    """On the test device, nothing is used before it is there."""
    if ACCELERATOR is None or ACCELERATOR.type != backend.NAME:
        yield
        return
    backend.take_reports()
    yield
    reports = backend.take_reports()
    assert not reports, "\n".join(reports)


@pytest.fixture
def delays(device) -> tuple[str, ...]:
    """What can be made late on this device, see `tests.gpu.late.slowed`."""
    return ("none", "compute", "copy", "host") if device.type == "cuda" else ("none", "host")
