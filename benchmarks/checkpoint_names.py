"""The modes of `benchmarks.checkpoint`: what trains, what saves, how it loads; nothing is imported for it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class SavingMode:
    """One way to save and load.

    Args:
        training: the mode of `benchmarks.modes` whose state is saved.
        implementation: "module:class" of the `Checkpoint`.
        loaders: the ways to load it, each measured in fresh ranks; the first one resumes.
        is_async: saving goes on after `save` returned.
        package: what must be installed.
    """

    training: str
    implementation: str
    loaders: tuple[str, ...] = ("load",)
    is_async: bool = False
    package: str | None = None


_HERE, _TORCH = "benchmarks.checkpoint_modes", "benchmarks.checkpoint_dcp"
SAVING_MODES = {
    "hf_zero": SavingMode("hf_zero-3", f"{_HERE}:HFZeroCheckpoint"),
    "hf_zero-whole": SavingMode("hf_zero-3", f"{_HERE}:HFZeroWholeCheckpoint"),
    "hf_zero-async": SavingMode("hf_zero-3", f"{_HERE}:HFZeroAsyncCheckpoint", is_async=True),
    "ddp": SavingMode("ddp", f"{_HERE}:DDPCheckpoint"),
    "fsdp2-full": SavingMode(
        "fsdp2", f"{_TORCH}:FullCheckpoint", loaders=("broadcast", "from_pretrained", "distributed_config")
    ),
    "fsdp2-sharded": SavingMode("fsdp2", f"{_TORCH}:ShardedCheckpoint"),
    "dcp": SavingMode("fsdp2", f"{_TORCH}:DCPCheckpoint"),
    "dcp-async": SavingMode("fsdp2", f"{_TORCH}:AsyncDCPCheckpoint", is_async=True),
    "dcp-hf": SavingMode("fsdp2", f"{_TORCH}:SafetensorsDCPCheckpoint"),
    "deepspeed-3": SavingMode(
        "deepspeed-3", f"{_HERE}:DeepSpeedCheckpoint", loaders=("load_checkpoint", "zero_init"), package="deepspeed"
    ),
}


def is_ours(name: str) -> bool:
    return name.startswith("hf_zero")


def why_left_out(name: str) -> str | None:
    """Why a mode cannot run here; `None` where it can."""
    package = SAVING_MODES[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        return f"the package {package!r} is not installed (extra: bench)"
    return None
