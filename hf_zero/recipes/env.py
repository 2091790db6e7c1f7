"""The tool `env`: prints versions, devices and free memory, for bug reports."""

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
NAMED = ("torch", "transformers", "accelerate")  # also of a copy of the repository that is not installed
FOLDERS = {
    "disk here": Path(),
    "disk of HF_HOME": Path(constants.HF_HOME),
    "temporary files": Path(tempfile.gettempdir()),
}
SHARED_MEMORY = Path("/dev/shm")  # of Linux
# Printed if they are set. None of them contains a token.
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
    """Yields facts about this machine and its packages, as pairs of name and text."""
    yield "hf_zero", f"{sys.modules['hf_zero'].__version__} ({Path(__file__).parents[1]})"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for name in dict.fromkeys([*NAMED, *_requirements()]):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "processors", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield "devices", "none: ranks train on the CPU"
    else:
        for index in range(torch.accelerator.device_count()):
            yield f"device {index}", _device(torch.device(accelerator.type, index))
    yield "backend", _backend(accelerator)
    memory = psutil.virtual_memory()
    yield "memory", f"{size_text(memory.available)} free of {size_text(memory.total)}"
    for name, folder in (FOLDERS | ({"shared memory": SHARED_MEMORY} if SHARED_MEMORY.is_dir() else {})).items():
        # of a folder that does not exist yet, its nearest parent
        usage = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
        yield name, f"{size_text(usage.free)} free of {size_text(usage.total)} ({folder})"
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _device(device: torch.device) -> str:
    try:
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        kind = ".".join(map(str, module.get_device_capability(device))) if device.type == "cuda" else device.type
        return f"{module.get_device_name(device)} ({kind}), {size_text(free)} free of {size_text(total)}"
    except (AttributeError, RuntimeError) as error:  # a backend without these functions, or a broken driver
        return f"{device}: {' '.join(str(error).split())}"


def _backend(accelerator: torch.device | None) -> str:
    if accelerator is not None and accelerator.type == "cuda":
        return f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}"
    return "gloo" if dist.is_available() and dist.is_gloo_available() else "none: this torch was built without gloo"


def _requirements() -> list[str]:
    """Returns the packages that the installed package and its extras require."""
    try:
        texts = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    return [name for name in (Requirement(text).name for text in texts) if name != DISTRIBUTION]
