"""FSDP2's checkpoints: full and sharded state dicts as accelerate writes them, and torch's distributed checkpoint."""

from __future__ import annotations

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

from benchmarks.checkpoint_modes import Checkpoint, Done, Marks, empty_model, hf_model, materialized
from benchmarks.modes import FSDP2, Plain, build_mode
from benchmarks.workload import Workload


_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


class FSDP2FromMeta(FSDP2):
    """Sharded before it has memory, so that no rank ever holds the whole model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.device = "cpu"
        return materialized(super().wrap(model))


class AlreadySharded(FSDP2):
    """For a model that transformers sharded while loading it."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


def empty_fsdp2(workload: Workload) -> FSDP2:
    return FSDP2FromMeta(empty_model(workload, device="meta"), workload)


class FullCheckpoint(Checkpoint):
    """State dicts gathered to rank 0, which writes a model folder and, by torch.save, the optimizer."""

    def save(self, folder: Path, marks: Marks):
        weights = get_model_state_dict(self.mode.model, options=_FULL)
        if dist.get_rank() == 0:
            self.mode.model.save_pretrained(folder, state_dict=weights)
            marks("pretrained")
        del weights
        state = get_optimizer_state_dict(self.mode.model, self.mode.optimizer, options=_FULL)
        if dist.get_rank() == 0:
            torch.save(state, folder / "optimizer.bin")
        return Done()

    @staticmethod
    def load_broadcast(folder: Path, workload: Workload, marks: Marks) -> Plain:
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

    @staticmethod
    def load_from_pretrained(folder: Path, workload: Workload, marks: Marks) -> Plain:
        """Weights alone: the whole model on every rank, then `fully_shard`."""
        mode = build_mode("fsdp2", hf_model(workload, folder), workload)
        marks("weights")
        return mode

    @staticmethod
    def load_distributed_config(folder: Path, workload: Workload, marks: Marks) -> Plain:
        """Weights alone: transformers' own FSDP2, which shards while it loads."""
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).train()
        mode = AlreadySharded(model, workload)
        marks("weights")
        return mode


class _Distributed(Checkpoint):
    """What the modes share that write with DCP."""

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
        return Done()

    @staticmethod
    def load(folder: Path, workload: Workload, marks: Marks) -> Plain:
        return _load(folder / "pytorch_model_fsdp_0", folder / "optimizer_0", workload, marks)


class DCPCheckpoint(_Distributed):
    """One `dcp.save` of everything."""

    def save(self, folder: Path, marks: Marks):
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(folder))
        return Done()

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
        return _Future(
            dcp.async_save(self.state(), storage_writer=writer, process_group=self.group, async_stager=self.stager)
        )

    def close(self) -> None:
        self.stager.close()


class _Future:
    def __init__(self, future) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


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
        return Done()

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
