"""Processes that have the test device.

A process with an accelerator is another for torch, for Trainer and for every test, so it is never this one. torch
imports the backends that installed packages name ("torch.backends" entry points): a folder on `PYTHONPATH` stands for
such a package, and so processes that these processes start have the device, too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.backend import NAME, VARIABLE
from tests.device.build import build, why_not


ROOT = Path(__file__).parents[2]


def run_with_device(arguments: list[str], folder: Path, timeout: float = 300.0) -> str:
    """Runs `python ARGUMENTS` in the repository's root with the test device. Returns its output, and fails where it
    fails. Skips the test where the device cannot be built.

    Args:
        folder (`Path`): where the package that names the backend is made.
    """
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    package = folder / "hf_zero_test_device-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: hf_zero_test_device\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{NAME} = tests.device.backend:register\n")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": path, VARIABLE: str(build()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    return done.stdout
