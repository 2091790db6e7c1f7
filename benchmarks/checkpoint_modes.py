"""Saving and loading as each library's own Trainer integration does it, behind `save`, `convert` and `load`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import hf_zero
from benchmarks.modes import FSDP2, Plain, build_mode
from benchmarks.workload import Workload


_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


@dataclass
class Marks:
    """Seconds since the start at which this rank reached a point.

    Args:
        folder: what is saved or loaded.
        durable: whether rank 0 flushes the files of `folder` to disk before it notes a point.
    """

    folder: Path
    durable: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    def __call__(self, name: str) -> None:
        if self.durable and dist.get_rank() == 0:
            sync_files(self.folder)
        self.seconds[name] = self.now()

    def now(self) -> float:
        return time.perf_counter() - self.start


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


class Checkpoint:
    """How one mode saves and loads; `load` builds the mode anew from a folder."""

    training: str  # the mode of `benchmarks.modes` whose state is saved
    converts = False  # whether `convert` makes the `from_pretrained` folder after the save

    def __init__(self, mode: Plain) -> None:
        self.mode = mode

    def save(self, folder: Path, marks: Marks) -> Callable[[], object] | None:
        """Returns when training may go on: None if all is written, else a function that waits for it. Marks
        "pretrained" once `self.pretrained(folder)` loads, if that is before the end."""
        raise NotImplementedError

    def convert(self, folder: Path) -> None:
        """Makes the `from_pretrained` folder out of a complete checkpoint, on rank 0 alone."""

    @staticmethod
    def pretrained(folder: Path) -> Path:
        return folder

    def close(self) -> None:
        """Called after the last save."""


def hf_model(folder: Path) -> nn.Module:
    """`from_pretrained` in fp32, ready to train."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def materialized(model: nn.Module) -> nn.Module:
    """Gives a model on "meta" uninitialized parameters, and values for the buffers, which no checkpoint holds."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config=model.config)
    return model


class HFZeroCheckpoint(Checkpoint):
    """All ranks write their ranges into one folder that appears when it is complete, as `ZeroTrainer` saves."""

    training = "hf_zero-3"

    def save(self, folder: Path, marks: Marks):
        return hf_zero.save_checkpoint(self.mode.engine, self.mode.optimizer, folder).wait

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        from transformers import LlamaForCausalLM

        mode = build_mode("hf_zero-3", hf_zero.load_pretrained(LlamaForCausalLM, folder).train(), workload)
        marks("weights")
        hf_zero.load_state(mode.engine, mode.optimizer, folder)
        return mode


class HFZeroAsyncCheckpoint(HFZeroCheckpoint):
    """The same files, written while training goes on."""

    def __init__(self, mode: Plain) -> None:
        super().__init__(mode)
        self.snapshots = hf_zero.Snapshots()

    def save(self, folder: Path, marks: Marks):
        engine, optimizer = self.mode.engine, self.mode.optimizer
        return hf_zero.save_checkpoint(engine, optimizer, folder, background=self.snapshots).wait


class DDPCheckpoint(Checkpoint):
    """Rank 0 writes the model and then the optimizer, as Trainer does; the others go on to the next collective."""

    training = "ddp"

    def save(self, folder: Path, marks: Marks):
        if dist.get_rank() == 0:
            self.mode.model.module.save_pretrained(folder)
            marks("pretrained")
            torch.save(self.mode.optimizer.state_dict(), folder / "optimizer.pt")

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        mode = build_mode("ddp", hf_model(folder), workload)
        marks("weights")
        mode.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
        return mode


class FSDP2FromMeta(FSDP2):
    """Sharded before it has memory, so that no rank ever holds the whole model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.device = "cpu"
        return materialized(super().wrap(model))


def empty_fsdp2(workload: Workload) -> FSDP2:
    return FSDP2FromMeta(workload.build_model("meta"), workload)


class FullCheckpoint(Checkpoint):
    """State dicts gathered to rank 0, which writes a model folder and, by torch.save, the optimizer."""

    training = "fsdp2"

    def save(self, folder: Path, marks: Marks):
        weights = get_model_state_dict(self.mode.model, options=_FULL)
        if dist.get_rank() == 0:
            self.mode.model.save_pretrained(folder, state_dict=weights)
            marks("pretrained")
        del weights
        state = get_optimizer_state_dict(self.mode.model, self.mode.optimizer, options=_FULL)
        if dist.get_rank() == 0:
            torch.save(state, folder / "optimizer.bin")

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        """Rank 0 reads, the others receive."""
        from safetensors.torch import load_file

        mode, is_first = empty_fsdp2(workload), dist.get_rank() == 0
        weights = load_file(folder / "model.safetensors") if is_first else {}
        if is_first:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        set_model_state_dict(mode.model, weights, options=_FROM_FIRST)
        del weights
        marks("weights")
        state = torch.load(folder / "optimizer.bin", weights_only=True) if is_first else {}
        set_optimizer_state_dict(mode.model, mode.optimizer, state, options=_FROM_FIRST)
        return mode


class _Distributed(Checkpoint):
    """What the modes share that write with DCP."""

    training = "fsdp2"
    converts = True

    def convert(self, folder: Path) -> None:
        """Offline consolidation as `accelerate merge-weights` reads it, then `save_pretrained`."""
        from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, _load_state_dict

        weights: dict = {}
        planner = _EmptyStateDictLoadPlanner(keys={"model"})
        _load_state_dict(weights, dcp.FileSystemReader(self.weights_folder(folder)), planner=planner, no_dist=True)
        self.mode.model.save_pretrained(self.pretrained(folder), state_dict=weights["model"])

    @staticmethod
    def weights_folder(folder: Path) -> Path:
        return folder

    @staticmethod
    def pretrained(folder: Path) -> Path:
        return folder / "converted"


class ShardedCheckpoint(_Distributed):
    """Trainer's SHARDED_STATE_DICT: one DCP folder for the weights and one for the optimizer."""

    @staticmethod
    def weights_folder(folder: Path) -> Path:
        return folder / "pytorch_model_fsdp_0"

    def save(self, folder: Path, marks: Marks):
        weights = {"model": get_model_state_dict(self.mode.model)}
        dcp.save(weights, storage_writer=dcp.FileSystemWriter(self.weights_folder(folder)))
        state = {"optimizer": get_optimizer_state_dict(self.mode.model, self.mode.optimizer)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        return _load(folder / "pytorch_model_fsdp_0", folder / "optimizer_0", workload, marks)


class DCPCheckpoint(_Distributed):
    """One `dcp.save` of everything."""

    def save(self, folder: Path, marks: Marks):
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(folder))

    def state(self) -> dict:
        weights = get_model_state_dict(self.mode.model)
        return {"model": weights, "optimizer": get_optimizer_state_dict(self.mode.model, self.mode.optimizer)}

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        return _load(folder, folder, workload, marks)


class AsyncDCPCheckpoint(DCPCheckpoint):
    """`dcp.async_save` with its copies kept from save to save, writing in a thread with a group of its own."""

    def __init__(self, mode: Plain) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(mode)
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(self, folder: Path, marks: Marks):
        writer = dcp.FileSystemWriter(folder)
        settings = {"process_group": self.group, "async_stager": self.stager}
        return dcp.async_save(self.state(), storage_writer=writer, **settings).result

    def close(self) -> None:
        self.stager.close()


class SafetensorsDCPCheckpoint(_Distributed):
    """Weights through HuggingFaceStorageWriter with consolidation, the optimizer by `dcp.save`."""

    converts = False

    def save(self, folder: Path, marks: Marks):
        weights = get_model_state_dict(self.mode.model)
        weights.pop("lm_head.weight")  # tied
        writer = dcp.HuggingFaceStorageWriter(
            self.pretrained(folder), save_distributed=True, enable_consolidation=True
        )
        dcp.save(weights, storage_writer=writer)
        if dist.get_rank() == 0:
            self.mode.model.config.save_pretrained(self.pretrained(folder))
            marks("pretrained")
        state = {"optimizer": get_optimizer_state_dict(self.mode.model, self.mode.optimizer)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        mode = empty_fsdp2(workload)
        weights = get_model_state_dict(mode.model)
        weights.pop("lm_head.weight")
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(folder / "converted"))
        marks("weights")
        return _load_optimizer(mode, folder / "optimizer_0")


def _load(weights_folder: Path, optimizer_folder: Path, workload: Workload, marks: Marks) -> Plain:
    """Into a model sharded on "meta": every rank reads its own parts, in place."""
    mode = empty_fsdp2(workload)
    weights = {"model": get_model_state_dict(mode.model)}
    dcp.load(weights, storage_reader=dcp.FileSystemReader(weights_folder))
    set_model_state_dict(mode.model, weights["model"])
    marks("weights")
    return _load_optimizer(mode, optimizer_folder)


def _load_optimizer(mode: Plain, folder: Path) -> Plain:
    state = {"optimizer": get_optimizer_state_dict(mode.model, mode.optimizer)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    set_optimizer_state_dict(mode.model, mode.optimizer, state["optimizer"])
    return mode


class DeepSpeedCheckpoint(Checkpoint):
    """As Trainer with `stage3_gather_16bit_weights_on_model_save`: gathered weights, then the engine's own folder."""

    training = "deepspeed-3"

    def save(self, folder: Path, marks: Marks):
        engine = self.mode.model
        weights = engine._zero3_consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            engine.module.save_pretrained(folder, state_dict=weights)
            marks("pretrained")
        del weights
        engine.save_checkpoint(str(folder))

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        """Weights and state at once, out of each rank's own files."""
        mode = build_mode("deepspeed-3", materialized(workload.build_model("meta")), workload)
        mode.model.load_checkpoint(str(folder))
        return mode


CHECKPOINTS: dict[str, type[Checkpoint]] = {
    "hf_zero": HFZeroCheckpoint,
    "hf_zero-async": HFZeroAsyncCheckpoint,
    "ddp": DDPCheckpoint,
    "fsdp2-full": FullCheckpoint,
    "fsdp2-sharded": ShardedCheckpoint,
    "dcp": DCPCheckpoint,
    "dcp-async": AsyncDCPCheckpoint,
    "dcp-hf": SafetensorsDCPCheckpoint,
    "deepspeed-3": DeepSpeedCheckpoint,
}
