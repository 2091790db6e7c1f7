"""Builds the test device with the compiler of this machine: `python -m tests.device.build`, about half a minute."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from torch.utils import cpp_extension
from torch.version import __version__


SOURCES = Path(__file__).parent
LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")


def why_not() -> str | None:
    """Returns why the test device cannot be built here; `None` where it can."""
    if sys.platform != "linux":
        return "the test device needs Linux"
    try:
        subprocess.run([cpp_extension.get_cxx_compiler(), "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return f"the test device needs a C++ compiler, and {cpp_extension.get_cxx_compiler()} does not run"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the test device needs Python's headers (python3-dev)"
    return None


def build() -> Path:
    """Builds the test device where this version of it is not built yet, and returns its library."""
    files = sorted(SOURCES.glob("*.h")) + sorted(SOURCES.glob("*.cpp"))
    told = "".join([__version__, sys.version, *(file.read_text(encoding="utf-8") for file in files)])
    name = f"hf_zero-test-device-{os.getuid()}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    library = Path(tempfile.gettempdir(), name, "toy_device.so")
    library.parent.mkdir(mode=0o700, exist_ok=True)
    with open(library.parent / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers of pytest ask at once
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    include = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    command = [cpp_extension.get_cxx_compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [str(SOURCES / "device.cpp"), "-o", str(unfinished), *(f"-I{path}" for path in include)]
    command += [f"-L{path}" for path in cpp_extension.library_paths()] + [f"-l{name}" for name in LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the test device cannot be built:\n{' '.join(command)}\n{done.stderr[-4000:]}")
    unfinished.replace(library)


if __name__ == "__main__":
    print(build())
