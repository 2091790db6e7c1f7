"""Checkpoints of DeepSpeed, FSDP and `torch.distributed.checkpoint`, which `hf-zero convert` reads."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hf_zero.checkpoint.convert import dcp, deepspeed
from hf_zero.checkpoint.convert.state import SavedState
from hf_zero.checkpoint.manifest import is_saved_here
from hf_zero.errors import CheckpointError


class OtherProgramError(CheckpointError):
    """A checkpoint of another program, which must be converted first."""


@dataclass(frozen=True)
class Program:
    """Another program that writes training checkpoints."""

    name: str
    read: Callable[[Path], tuple[dict[str, Tensor], SavedState]]  # weights and optimizer state by parameter name


def program_of(folder: str | os.PathLike) -> Program | None:
    """Returns the program that wrote a checkpoint, or `None` for other folders. Looks at the names of files, and into
    DeepSpeed's `latest`. Raises [`OtherProgramError`] for weights of torch's `HuggingFaceStorageWriter`."""
    folder = Path(folder)
    if is_saved_here(folder):
        return None
    if deepspeed.tag_folder(folder) is not None:
        return Program("DeepSpeed ZeRO", deepspeed.read)
    if (folder / f"{dcp.FSDP_WEIGHTS}_0" / dcp.INDEX_NAME).exists() or (folder / f"{dcp.FSDP_WEIGHTS}.bin").exists():
        return Program("FSDP", dcp.read)
    if any(file for part in dcp.SAFETENSORS for file in folder.glob(part)):
        raise OtherProgramError(
            f"{folder}: was written by torch's HuggingFaceStorageWriter, whose format has no optimizer state; resume "
            "from a checkpoint of dcp.save's default writer, or start a new run from weights that were saved with "
            "enable_consolidation=True"
        )
    return Program("torch.distributed.checkpoint", dcp.read) if (folder / dcp.INDEX_NAME).exists() else None
