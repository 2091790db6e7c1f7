"""The tool `env`: prints versions, devices, free memory and missing packages, for bug reports."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from huggingface_hub import constants
from packaging.requirements import Requirement

from hf_zero.errors import size_text


POSITIONAL = ()

DISTRIBUTION = "hf-zero"
NAMED = ("torch", "transformers", "accelerate")  # also where a copy of the repository runs that nobody has installed
SHARED_MEMORY = Path("/dev/shm")
# Never a token: only these are printed, and only where they are set.
VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES OMP_NUM_THREADS GLOO_SOCKET_IFNAME "
    "NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_DEBUG PYTORCH_ALLOC_CONF HF_HOME HF_HUB_OFFLINE "
    "HF_ENDPOINT ACCELERATE_MIXED_PRECISION ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_FSDP"
).split()


@dataclass
class Arguments:
    """`env` takes nothing."""


def run(arguments: Arguments) -> None:
    """Prints one line per fact."""
    for name, value in facts():
        print(f"{name:24}{value}")


def facts() -> Iterator[tuple[str, str]]:
    """Yields all facts as name and text."""
    yield "hf_zero", f"{sys.modules['hf_zero'].__version__} ({Path(__file__).parents[1]})"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for name in dict.fromkeys([*NAMED, *(requirement.name for requirement in _requirements())]):
        if version := _version(name):
            yield name, version
    yield from _devices()
    yield from _memory()
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]
    yield "missing", "; ".join(_missing()) or "nothing"


def _devices() -> Iterator[tuple[str, str]]:
    can_ask = hasattr(os, "sched_getaffinity")
    yield "processors", f"{len(psutil.Process().cpu_affinity()) if can_ask else os.cpu_count()}"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield "devices", "none: ranks train on the CPU"
    else:
        for index in range(torch.accelerator.device_count()):
            yield f"device {index}", _device(torch.device(accelerator.type, index))
    yield "backend", _backend(accelerator)


def _device(device: torch.device) -> str:
    try:
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        kind = ".".join(map(str, module.get_device_capability(device))) if device.type == "cuda" else device.type
        return f"{module.get_device_name(device)} ({kind}), {size_text(free)} free of {size_text(total)}"
    except (AttributeError, RuntimeError) as error:  # a backend that does not tell, or a driver that is broken
        return f"{device}: {' '.join(str(error).split())}"


def _backend(accelerator: torch.device | None) -> str:
    if not dist.is_available():
        return "none: this torch was built without torch.distributed"
    if accelerator is not None and accelerator.type == "cuda":
        return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}"
    return "gloo" if dist.is_gloo_available() else "none: this torch was built without gloo"


def _memory() -> Iterator[tuple[str, str]]:
    memory = psutil.virtual_memory()
    yield "memory", f"{size_text(memory.available)} free of {size_text(memory.total)}"
    folders = {"disk here": Path.cwd(), "disk of HF_HOME": Path(constants.HF_HOME)}
    folders["temporary files"] = Path(tempfile.gettempdir())
    if SHARED_MEMORY.is_dir():
        folders["shared memory"] = SHARED_MEMORY
    for name, folder in folders.items():
        # of a folder that is still to be made, the nearest parent that there is
        usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
        yield name, f"{size_text(usage.free)} free of {size_text(usage.total)} ({folder})"


def _missing() -> Iterator[str]:
    """Yields packages that are missing or too old, with the command that installs them."""
    requirements = _requirements()
    if not requirements:
        yield f"{DISTRIBUTION} is not installed as a package: pip install -e ."
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or [] if requirements else []
    for extra in ("", *extras):
        own = [each for each in requirements if _applies(each, extra) and not (extra and _applies(each, ""))]
        if names := sorted({each.name for each in own if not _fits(each)}):
            what = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
            yield f"{', '.join(names)} (pip install {what})"


def _requirements() -> list[Requirement]:
    """Returns the requirements of the installed package, without itself."""
    try:
        texts = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return [each for each in map(Requirement, texts) if each.name != DISTRIBUTION]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _fits(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
