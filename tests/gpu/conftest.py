"""The device of a test: CUDA where there is one. In the full tier the same tests run on the CPU, so that they work the
first time that they meet a device."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full("slow"))]
)
def device(request) -> Iterator[torch.device]:
    """The device, which repeats its bits as long as the test lasts."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def delays(device) -> tuple[str, ...]:
    """What can be made late on this device, see `benchmarks.exact`."""
    return ("none", "host") if device.type == "cpu" else ("none", "compute", "copy", "host")
