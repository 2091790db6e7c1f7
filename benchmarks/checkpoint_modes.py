"""Saving and loading, each as the library's own Trainer path does it, behind `save`, `convert` and `load`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.modes import Plain, build_mode
from benchmarks.workload import Workload


@dataclass
class Marks:
    """Seconds since the start at which this rank reached a point.

    Args:
        folder: what is saved or loaded.
        durable: flush the files of `folder` to disk before each point is noted (by rank 0, which others then wait for
            at the last one).
    """

    folder: Path
    durable: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def __call__(self, name: str) -> None:
        if self.durable and dist.get_rank() == 0:
            sync_files(self.folder)
        self.seconds[name] = time.perf_counter() - self.start


def sync_files(folder: Path) -> None:
    """Flushes every file and folder below `folder`, and its name in the folder above."""
    _sync(folder.parent)
    for parent, _, names in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):  # a file of a save that is still going on
                _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Done:
    """The handle of a save that was over when `save` returned."""

    def wait(self) -> None:
        pass


class Checkpoint:
    """How one mode saves; `loaders` of its name are methods `load_*` that build the mode anew from a folder."""

    converts = False  # a `from_pretrained` folder takes `convert` after the save
    watched = False  # such a folder appears whole at some moment before the end, nobody says when

    def __init__(self, mode: Plain) -> None:
        self.mode = mode

    def save(self, folder: Path, marks: Marks):
        """Returns a handle when training may go on. Marks "pretrained" once `folder/self.pretrained` loads."""
        raise NotImplementedError

    def convert(self, folder: Path) -> None:
        """Rank 0 alone: makes the `from_pretrained` folder out of a complete checkpoint."""

    @staticmethod
    def pretrained(folder: Path) -> Path:
        return folder

    def close(self) -> None:
        """After the last save."""


def hf_model(workload: Workload, folder: Path) -> nn.Module:
    """`from_pretrained` in fp32, ready to train."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def empty_model(workload: Workload, *, device: str) -> nn.Module:
    """The model without a second spent on values; on "meta" not even memory. Tied, buffers not yet right there."""
    model = workload.build_model("meta")
    return model if device == "meta" else materialized(model)


def materialized(model: nn.Module) -> nn.Module:
    """Uninitialised memory for parameters on "meta", values for the buffers, which no checkpoint holds."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config=model.config)
    return model


class HFZeroCheckpoint(Checkpoint):
    """All ranks write their ranges; the model folder first, the optimizer state beside it."""

    def save(self, folder: Path, marks: Marks):
        from benchmarks import hf_zero_calls

        hf_zero_calls.save_weights(self.mode.engine, folder)
        marks("pretrained")
        hf_zero_calls.save_optimizer(self.mode.engine, self.mode.optimizer, folder)
        return Done()

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        from transformers import LlamaForCausalLM

        from benchmarks import hf_zero_calls

        mode = build_mode("hf_zero-3", hf_zero_calls.load_model(LlamaForCausalLM, folder).train(), workload)
        marks("weights")
        hf_zero_calls.load_optimizer(mode.engine, mode.optimizer, folder)
        return mode


class HFZeroWholeCheckpoint(HFZeroCheckpoint):
    """The same files in one folder that appears when it is complete, as `ZeroTrainer` saves."""

    def save(self, folder: Path, marks: Marks):
        from benchmarks import hf_zero_calls

        handle = hf_zero_calls.save_whole(self.mode.engine, self.mode.optimizer, folder)
        marks("pretrained")
        return handle


class HFZeroAsyncCheckpoint(HFZeroCheckpoint):
    """The same files, written while training goes on."""

    watched = True

    def save(self, folder: Path, marks: Marks):
        from benchmarks import hf_zero_calls

        return hf_zero_calls.save_in_background(self.mode.engine, self.mode.optimizer, folder)


class DDPCheckpoint(Checkpoint):
    """Rank 0 writes the model and then the optimizer, as Trainer does; the others go on to the next collective."""

    def save(self, folder: Path, marks: Marks):
        if dist.get_rank() == 0:
            self.mode.model.module.save_pretrained(folder)
            marks("pretrained")
            torch.save(self.mode.optimizer.state_dict(), folder / "optimizer.pt")
        return Done()

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        mode = build_mode("ddp", hf_model(workload, folder), workload)
        marks("weights")
        mode.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
        return mode


class DeepSpeedCheckpoint(Checkpoint):
    """As Trainer with `stage3_gather_16bit_weights_on_model_save`: gathered weights, then the engine's own folder."""

    def save(self, folder: Path, marks: Marks):
        engine = self.mode.model
        weights = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            engine.module.save_pretrained(folder, state_dict=weights)
            marks("pretrained")
        del weights
        engine.save_checkpoint(str(folder))
        return Done()

    @staticmethod
    def load_load_checkpoint(folder: Path, workload: Workload, marks: Marks) -> Plain:
        """Weights and state at once, out of each rank's own files."""
        mode = build_mode("deepspeed-3", empty_model(workload, device="cpu"), workload)
        mode.model.load_checkpoint(str(folder))
        return mode

    @staticmethod
    def load_zero_init(folder: Path, workload: Workload, marks: Marks) -> Plain:
        """Weights alone: `from_pretrained` under `zero.Init` partitions them as they are read."""
        from transformers.integrations import HfDeepSpeedConfig

        from benchmarks.modes import DeepSpeed

        probe = object.__new__(DeepSpeed)
        probe.workload, probe.stage = workload, 3
        keep = HfDeepSpeedConfig(probe.config())  # transformers holds it weakly
        mode = build_mode("deepspeed-3", hf_model(workload, folder), workload)
        marks("weights")
        del keep
        return mode


Loader = Callable[[Path, Workload, Marks], Plain]


def loader_of(checkpoint: type[Checkpoint], name: str) -> Loader:
    return getattr(checkpoint, name if name == "load" else f"load_{name}")
