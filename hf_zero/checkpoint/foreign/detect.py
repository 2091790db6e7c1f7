"""Detects the program that made a checkpoint, and what of a run the folder holds."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.checkpoint.foreign import dcp, deepspeed, whole
from hf_zero.checkpoint.foreign.parts import ForeignState, ForeignTensor
from hf_zero.checkpoint.format import read_json
from hf_zero.checkpoint.manifest import manifest_path


@dataclass(frozen=True)
class ForeignFormat:
    """The format of another program's checkpoints.

    Args:
        name (`str`): for messages.
        read_weights (`Callable`, *optional*): a folder's weights; `None` where they are a model folder's safetensors.
        read_state (`Callable`): a folder's optimizer state, given this run's optimizer groups.
    """

    name: str
    read_weights: Callable[[Path], dict[str, ForeignTensor]] | None
    read_state: Callable[[Path, Sequence[dict]], ForeignState]


DEEPSPEED = ForeignFormat("DeepSpeed ZeRO", deepspeed.read_weights, deepspeed.read_state)
FSDP = ForeignFormat("FSDP", dcp.fsdp_weights, dcp.fsdp_state)
DCP = ForeignFormat("torch distributed checkpoint", dcp.read_weights, dcp.read_state)
TRAINER = ForeignFormat("Trainer", None, whole.trainer_state)


def detect(folder: str | os.PathLike) -> ForeignFormat | None:
    """Detects whose checkpoint a folder is, by the files in it. Nothing is opened but DeepSpeed's `latest`.

    Args:
        folder (`str` or `os.PathLike`): such as `checkpoint-500`.

    Returns:
        [`ForeignFormat`], or `None` for a checkpoint of hf_zero's own, for weights alone and for what is not known.
    """
    folder = Path(folder)
    if manifest_path(folder).exists():
        return None
    if deepspeed.tag_folder(folder) is not None:
        return DEEPSPEED
    sharded, full = folder / f"{dcp.FSDP_WEIGHTS}_0" / dcp.INDEX_NAME, folder / f"{dcp.FSDP_WEIGHTS}.bin"
    if sharded.exists() or full.exists():
        return FSDP
    if (folder / dcp.INDEX_NAME).exists():
        return DCP
    return TRAINER if (folder / whole.OPTIMIZER_NAME).exists() else None


@dataclass(frozen=True)
class Carried:
    """The facts of a run in a foreign checkpoint, beside weights and optimizer state.

    Args:
        num_steps (`int`, *optional*): optimizer steps taken, where a file says it.
        position (`bool`): `trainer_state.json`, from which Trainer finds its place in the data.
        scheduler (`bool`): `scheduler.pt`; without it a schedule can only be moved on to `num_steps`.
        rng_ranks (`int`): ranks whose random states were saved; Trainer takes them up when it runs on as many.
    """

    num_steps: int | None
    position: bool
    scheduler: bool
    rng_ranks: int


def carried(folder: str | os.PathLike) -> Carried:
    """Returns what could be taken over besides weights and optimizer state.

    Raises:
        `CheckpointError`: a damaged DeepSpeed checkpoint.
    """
    folder = Path(folder)
    position = folder / "trainer_state.json"
    num_steps = None
    if position.exists():
        num_steps = read_json(position).get("global_step")
    elif detect(folder) is DEEPSPEED:
        num_steps = deepspeed.num_steps(folder)
    rng = [path for path in folder.glob("rng_state*.pth") if re.fullmatch(r"rng_state(_\d+)?\.pth", path.name)]
    return Carried(num_steps, position.exists(), (folder / "scheduler.pt").exists(), len(rng))
