"""The peers, each at its best documented settings, behind four verbs: micro_batch, forward, backward, update.

A mode is built from a whole fp32 model with the weights all ranks share. `update` clips to a global norm of
`max_grad_norm`, steps a fused AdamW and clears the gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import counters
from benchmarks.workload import Workload
from hf_zero.engine import engine_of


IGNORED = -100  # the label of a token that does not count


class Plain:
    """The training step without any communication: the floor in time. On several ranks the models drift apart."""

    num_sharing = 1  # how many neighbouring ranks are given the same sequences

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        self.device = next(model.parameters()).device.type
        self.workload = workload
        self.model = self.wrap(model)
        self.optimizer = self.build_optimizer()

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def build_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.workload.learning_rate, fused=True)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch; `last` of the step is the one that must communicate."""
        yield

    def forward(self, batch: dict) -> torch.Tensor:
        # fp32 weights and bf16 matmuls: what Trainer's --bf16 does with an unwrapped model or under DDP.
        with torch.autocast(self.device, torch.bfloat16, enabled=self.workload.dtype == "bf16"):
            return self.model(**batch).loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.workload.accumulate).backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counters(self) -> dict[str, float]:
        """Numbers the mode keeps about its own communication."""
        return {}

    def host_nbytes(self) -> int:
        """Bytes of the tensors that the mode's offload puts into main memory, on any device: masters, optimizer state,
        gradients, parameters, and page-locked buffers. Called between backward and update, when all exist."""
        return 0

    def mapped_nbytes(self) -> int:
        """Those bytes of `host_nbytes` that do not come from torch's allocator, which the tensor meter reads."""
        return 0


class DDP(Plain):
    """DistributedDataParallel; gradients live in its buckets, which saves a copy of them."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.model.no_sync():
            yield


class FSDP2(Plain):
    """`fully_shard` on each block and on the root, resharding after forward; bf16 through its own policy."""

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape = self.mesh_shape()
        names = ("replicate", "shard")[-len(shape) :]
        settings = {"mesh": init_device_mesh(self.device, shape, mesh_dim_names=names), **self.settings()}
        if self.workload.dtype == "bf16":
            settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.model.layers:
            fully_shard(block, reshard_after_forward=True, **settings)
        # The root is needed again at once in backward: FSDP2's default keeps it, and so do we.
        return fully_shard(model, **settings)

    def mesh_shape(self) -> tuple[int, ...]:
        return (dist.get_world_size(),)

    def settings(self) -> dict:
        return {}

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        if self.workload.accumulate > 1:
            self.model.set_requires_gradient_sync(last)
        yield

    def forward(self, batch: dict) -> torch.Tensor:
        return self.model(**batch).loss


class FSDP2Hybrid(FSDP2):
    """FSDP2 that shards over the ranks of a host, and replicates over the hosts."""

    def mesh_shape(self) -> tuple[int, ...]:
        num_local = int(os.environ["LOCAL_WORLD_SIZE"])
        return dist.get_world_size() // num_local, num_local


class FSDP2Offload(FSDP2):
    """FSDP2 whose shards of parameters, gradients and state rest on the host, where AdamW updates them."""

    def settings(self) -> dict:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy(pin_memory=self.device != "cpu")}

    def host_nbytes(self) -> int:
        params = list(self.model.parameters())
        return storage_nbytes([*params, *(param.grad for param in params), *state_tensors(self.optimizer)])


class DeepSpeed(Plain):
    """DeepSpeed with buckets that suit models of this size (its default buckets allocate gigabytes)."""

    bucket_numel = 5_000_000

    def __init__(self, model: nn.Module, workload: Workload, *, stage: int) -> None:
        self.stage = stage
        super().__init__(model, workload)

    def wrap(self, model: nn.Module) -> nn.Module:
        import logging
        import warnings

        import deepspeed

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        settings = self.settings(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.workload.learning_rate, fused=True)
        engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self.config(), **settings
        )
        return engine

    def settings(self, model: nn.Module) -> dict:
        """Changes the model, and returns what else `initialize` is given."""
        return {}

    def build_optimizer(self):
        return self.optimizer

    def config(self) -> dict:
        zero = {"stage": self.stage, "reduce_bucket_size": self.bucket_numel, **self.offloaded()}
        if self.stage == 3:
            zero |= {"stage3_prefetch_bucket_size": self.bucket_numel}
        else:
            zero |= {"allgather_bucket_size": self.bucket_numel}
        return {
            "train_micro_batch_size_per_gpu": self.workload.batch,
            "gradient_accumulation_steps": self.workload.accumulate,
            "gradient_clipping": self.workload.max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.workload.dtype == "bf16"},
            "steps_per_print": 10**9,
        }

    def offloaded(self) -> dict:
        return {}

    def forward(self, batch: dict) -> torch.Tensor:
        return self.model(**batch).loss

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        yield
        if not last:
            self.model.step()  # counts the micro-batch; does nothing else before the last

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()  # clips, steps and clears


class DeepSpeedOffload(DeepSpeed):
    """ZeRO-Offload: optimizer and gradients on the host, at stage 3 the parameters too.

    The update is torch's fused AdamW, as everywhere here; DeepSpeed's own CPU optimizer is an extension that has to be
    compiled.
    """

    def offloaded(self) -> dict:
        host = {"device": "cpu", "pin_memory": self.device != "cpu"}
        return {"offload_optimizer": host} | ({"offload_param": host} if self.stage == 3 else {})

    def host_nbytes(self) -> int:
        optimizer, params = self.optimizer, self.model.parameters()
        masters = [
            *getattr(optimizer, "single_partition_of_fp32_groups", ()),
            *getattr(optimizer, "fp32_partitioned_groups_flat", ()),
        ]
        gradients = [*(master.grad for master in masters), getattr(optimizer, "grad_partitions_flat_buffer", None)]
        shards = [getattr(param, "ds_tensor", None) for param in params]
        return storage_nbytes([*masters, *shards, *gradients, *state_tensors(optimizer.optimizer)])


class DeepSpeedTiled(DeepSpeed):
    """The loss of a tile of the sequence at a time, backward within forward (arXiv 2506.13996, section 3.1)."""

    tile_numel = 2**20  # logits of a tile: as many bytes as hf_zero's ranges of the vocabulary take on a CPU

    def settings(self, model: nn.Module) -> dict:
        model.forward = functools.partial(self.tiled_forward, model)
        return {}

    def tiled_forward(self, model: nn.Module, input_ids, labels, position_ids=None):
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
        from transformers.modeling_outputs import CausalLMOutputWithPast

        hidden = model.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        num_tiles = max(1, hidden.shape[:2].numel() * self.workload.shape.vocab // self.tile_numel)
        # the head is the embedding, whose gradient is complete when the backward has come to the latter
        model.lm_head.weight.ds_grad_is_ready = False
        loss = TiledFusedLogitsLoss.apply(_summed_loss, model, hidden, labels, None, num_tiles, [], "sum")
        model.lm_head.weight.ds_grad_is_ready = True
        return CausalLMOutputWithPast(loss=loss / (labels != IGNORED).sum())

    def batch_of(self, batch: dict) -> dict:
        return {**batch, "labels": nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]}

    def forward(self, batch: dict) -> torch.Tensor:
        return self.model(**self.batch_of(batch)).loss


class DeepSpeedUlysses(DeepSpeedTiled):
    """The same with sequences that all ranks share: each rank has a part of the positions, and some of the heads."""

    @property
    def num_sharing(self) -> int:
        return dist.get_world_size()

    def settings(self, model: nn.Module) -> dict:
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed("gloo")  # it takes the group that there is
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=self.num_sharing,
            micro_batch_size=self.workload.batch,
        )
        return {**super().settings(model), "mpu": mpu}

    def batch_of(self, batch: dict) -> dict:
        whole = super().batch_of(batch)
        whole["position_ids"] = torch.arange(whole["labels"].shape[1]).expand_as(whole["labels"])
        return {name: values.chunk(self.num_sharing, 1)[dist.get_rank()] for name, values in whole.items()}


def _summed_loss(model: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(hidden).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


class HFZero(Plain):
    """hf_zero at one stage; `options` go to `hf_zero.shard` as they are, but for dtypes, which have torch's names, and
    `in_backward`: no clipping, and the update happens in backward."""

    def __init__(self, model: nn.Module, workload: Workload, *, stage: int, options: dict | None = None) -> None:
        self.stage, self.options = stage, dict(options or {})
        self.in_backward = self.options.pop("in_backward", False)
        for name in (name for name in self.options if name.endswith("_dtype")):
            self.options[name] = getattr(torch, self.options[name])
        self.num_sharing = self.options.get("sequence_parallel", 1)
        super().__init__(model, workload)

    def wrap(self, model: nn.Module) -> nn.Module:
        import hf_zero

        compute_dtype = torch.bfloat16 if self.workload.dtype == "bf16" else None
        self.engine = engine_of(hf_zero.shard(model, stage=self.stage, compute_dtype=compute_dtype, **self.options))
        return model

    def build_optimizer(self):
        import hf_zero

        return hf_zero.ShardedOptimizer(self.engine, torch.optim.AdamW, lr=self.workload.learning_rate, fused=True)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with self.optimizer.in_backward() if last and self.in_backward else contextlib.nullcontext():
            yield

    def forward(self, batch: dict) -> torch.Tensor:
        return self.model(**batch).loss

    def update(self) -> None:
        if not self.in_backward:
            self.optimizer.clip_grad_norm_(self.workload.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counters(self) -> dict[str, float]:
        return dict(self.engine.comm.counters.sent_nbytes)

    def host_nbytes(self) -> int:
        state = [self.optimizer.state.get(run.param, {}) for run in self.optimizer.slices if run.unit.is_offloaded]
        return self.mapped_nbytes() + storage_nbytes(value for values in state for value in values.values())

    def mapped_nbytes(self) -> int:
        return counters.resident_nbytes_at(self.engine.bus._memory)


# The class of each family of modes, and its stages.
FAMILIES: dict[str, tuple[type[Plain], tuple[int, ...]]] = {
    "plain": (Plain, ()),
    "ddp": (DDP, ()),
    "fsdp2": (FSDP2, ()),
    "fsdp2-hybrid": (FSDP2Hybrid, ()),
    "fsdp2-offload": (FSDP2Offload, ()),
    "deepspeed": (DeepSpeed, (1, 2, 3)),
    "deepspeed-offload": (DeepSpeedOffload, (2, 3)),
    "deepspeed-tiled": (DeepSpeedTiled, (3,)),
    "deepspeed-ulysses": (DeepSpeedUlysses, (3,)),
    "hf_zero": (HFZero, (0, 1, 2, 3)),
}
ALL_MODES = tuple(
    name for family, (_, stages) in FAMILIES.items() for name in [f"{family}-{stage}" for stage in stages] or [family]
)
CHECKPOINTING = "+checkpointing"  # at the end of a name: gradient checkpointing of every block


@dataclass(frozen=True)
class ModeName:
    family: str
    stage: int | None = None
    options: dict = field(default_factory=dict)
    checkpointing: bool = False


def parse_mode(name: str) -> ModeName:
    """Reads a mode's name: one of `ALL_MODES`, for hf_zero with options of `hf_zero.shard` as `@name=value`, or
    `@in_backward=True`: gradients are not clipped, and the update happens in backward. With `+checkpointing` after
    any name, every block is recomputed in backward.

    Raises:
        ValueError: for any other name, listing the modes.
    """
    checkpointing = name.endswith(CHECKPOINTING)
    base, *options = name.removesuffix(CHECKPOINTING).split("@")
    if base not in ALL_MODES or (options and not base.startswith("hf_zero")):
        raise ValueError(f"unknown mode {name!r}; the modes are {', '.join(ALL_MODES)}")
    if base in FAMILIES:
        return ModeName(base, checkpointing=checkpointing)
    family, _, stage = base.rpartition("-")
    pairs = [option.partition("=") for option in options]
    return ModeName(family, int(stage), {key: _value(text) for key, _, text in pairs}, checkpointing)


def build_mode(name: str, model: nn.Module, workload: Workload) -> Plain:
    """Builds a mode by its name from a whole fp32 model."""
    mode = parse_mode(name)
    settings = {} if mode.stage is None else {"stage": mode.stage}
    if mode.options:
        settings["options"] = mode.options
    return FAMILIES[mode.family][0](model, workload, **settings)


def split_modes(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """Reads comma-separated modes; skips those whose package is not installed, with a message."""
    names = []
    for name in dict.fromkeys(name.strip() for name in text.split(",") if name.strip()):
        try:
            family = parse_mode(name).family
        except ValueError as error:
            parser.error(str(error))
        if is_installed(family):
            names.append(name)
    return names


def is_installed(family: str) -> bool:
    """Whether the package that a family of modes needs is installed; prints a message if not."""
    package = family.partition("-")[0]
    if package != "deepspeed" or importlib.util.find_spec(package):
        return True
    print(f"{family}: skipped, the package {package!r} is not installed (extra: bench)", file=sys.stderr)
    return False


def _value(text: str) -> bool | int | float | str:
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def storage_nbytes(tensors: Iterable) -> int:
    """Bytes of the storages of tensors in main memory, each once; other objects do not count."""
    storages = {}
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if torch.is_tensor(tensor) and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_tensors(optimizer) -> Iterator:
    for values in optimizer.state.values():
        yield from values.values()
