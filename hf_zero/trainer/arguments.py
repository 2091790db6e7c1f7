"""The flags of ZeRO and early checks. This module does not import `TrainingArguments`, which takes seconds."""

import inspect
import os
import re
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hf_zero.accelerator.environment import launched_ranks, refuse_other_engines, refuse_other_world
from hf_zero.activation import refuse_group_size
from hf_zero.comm.groups import refuse_uneven
from hf_zero.comm.ranks import take_timeout
from hf_zero.config import GATHER_DTYPES, REDUCE_DTYPES, STAGES, ZeroConfig, choose, is_count
from hf_zero.errors import ConfigError
from hf_zero.parent import end_with_launcher
from hf_zero.removed import refuse_removed
from hf_zero.trainer.checks import check_arguments, check_output_dir


if TYPE_CHECKING:  # gives type checkers the base class that the mixin expects
    from transformers import TrainingArguments as _Arguments
else:
    _Arguments = object

Class = TypeVar("Class")


def helped(cls: type[Class]) -> type[Class]:
    """Sets the help texts of dataclass fields from the `Args` section of the class docstring."""
    texts = re.findall(r"^    (\w+) \(.*?\): (.*(?:\n        .*)*)", inspect.cleandoc(cls.__doc__ or ""), re.MULTILINE)
    by_name = {name: " ".join(text.replace("`", "").split()) for name, text in texts}
    for each in fields(cls):  # type: ignore[arg-type]
        if text := by_name.get(each.name):
            each.metadata = MappingProxyType({"help": text[0].upper() + text[1:]})
    return cls


@helped
@dataclass
class ZeroArgumentsMixin(_Arguments):
    """The ZeRO settings: a mixin for any subclass of `TrainingArguments`, placed before it in the list of bases.

    Args:
        zero_stage (`int`): what is partitioned over the ranks: 0 nothing, 1 the optimizer state, 2 also the gradients,
            3 also the parameters.
        zero_reduce_dtype (`str`): dtype in which gradients are summed over the ranks: fp32, bf16 or int8. With int8,
            gradients are quantized on the wire (one scale per 256 values) and accumulated in fp32. Ranks that share
            memory on one host send nothing.
        zero_gather_dtype (`str`, *optional*): set to int8 to gather the parameters in 8 bits at stage 3 (one scale
            per 256 values). All ranks compute with the rounded values; masters and checkpoints stay exact. By default
            parameters are gathered in their own dtype.
        zero_bucket_mb (`str`): size in MiB of each communication buffer for ranks that send messages. auto chooses it
            by the kind of link.
        zero_prefetch_units (`int`): number of blocks to gather ahead of use at stage 3. 0 saves the memory of one
            block.
        zero_keep_gathered (`str`): number of additional blocks that stay gathered between forward and backward at
            stage 3; each takes the memory of one block. auto uses up to half of the free memory.
        zero_shared_memory (`bool`): let CPU ranks on one host exchange values through shared memory instead of
            messages.
        zero_shard_size (`str`, *optional*): number of neighboring ranks that form a shard group. Every group holds a
            full replica, and parameters are gathered within the group. auto uses the ranks of one host, or of as few
            hosts as can hold the model states. By default all ranks form one group.
        zero_offload (`str`): what to keep in host memory: none; optimizer (masters, optimizer state and gradients;
            the CPU updates them); or params (at stage 3, the parameters too).
        zero_offload_fraction (`float`): fraction of the model to offload, rounded to whole blocks.
        zero_offload_dir (`str`, *optional*): folder on an NVMe disk for the offloaded state. Without it the state
            stays in host memory.
        zero_autocast (`bool`): with `--bf16` or `--fp16`, use autocast as `Trainer` does: parameters keep the dtype
            that they were loaded in and are cast at each use. By default hf_zero computes with half-precision copies
            of fp32 masters. Autocast needs more memory, since autograd keeps the casts.
        zero_offload_activations (`bool`): keep the inputs of checkpointed blocks in host memory between forward and
            backward, and without gradient checkpointing every saved tensor. Tensors of less than 1 MiB stay on the
            device.
        zero_partition_activations (`bool`): partition the inputs of checkpointed blocks over the tensor-parallel
            ranks. Requires `--gradient_checkpointing`.
        zero_chunked_loss (`str`): compute the loss of a language model over one part of the vocabulary at a time: on,
            off, or auto, which applies it where the logits would be larger than the largest block.
        zero_tiled_mlp (`str`): number of tiles into which the MLP of a block splits the tokens of a micro-batch. Tiles
            are computed one at a time and recomputed in the backward. auto limits a tile to as many tokens as the
            model has hidden features; 1 disables tiling.
        zero_sequence_parallel (`int`): number of neighboring ranks that share each sequence. They receive the same
            batches; each computes a part of every sequence and a subset of the attention heads.
        zero_resume_strict (`bool`): fail if the newest checkpoint is damaged. By default hf_zero logs the damage and
            resumes from the newest intact checkpoint.
        zero_async_save (`bool`): save checkpoints in the background. Training waits only while the shards are copied.
        zero_nonfinite (`str`): what to do when a gradient is infinite or NaN: stop the run before the step, skip the
            step on all ranks, or ignore it.
    """

    zero_stage: int = 3
    zero_reduce_dtype: str = "fp32"
    zero_gather_dtype: str | None = None
    zero_bucket_mb: str = "auto"
    zero_prefetch_units: int = 1
    zero_keep_gathered: str = "0"
    zero_shared_memory: bool = True
    zero_shard_size: str | None = None
    zero_offload: str = "none"
    zero_offload_fraction: float = 1.0
    zero_offload_dir: str | None = None
    zero_autocast: bool = False
    zero_offload_activations: bool = False
    zero_partition_activations: bool = False
    zero_chunked_loss: str = "auto"
    zero_tiled_mlp: str = "1"
    zero_sequence_parallel: int = 1
    zero_resume_strict: bool = False
    zero_async_save: bool = False
    zero_nonfinite: str = "stop"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(ZeroArgumentsMixin)]
        if any(base.__name__ == "TrainingArguments" for base in before):  # our `__post_init__` would not run
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigError(
                f"{cls.__name__}({bases}): ZeroArgumentsMixin must come before the class that it is mixed into"
            )

    def __new__(cls, *args, **kwargs):
        # runs before `__init__`, whose TypeError names no alternative; subclasses may define fields with these names
        refuse_removed(kwargs.keys() - {each.name for each in fields(cls)})
        return super().__new__(cls)

    def __post_init__(self):
        end_with_launcher()
        self._take_launchers_precision()
        self.zero_config()
        refuse_other_engines(vars(self))
        self._refuse_unsupported()
        check_arguments(vars(self))
        launched = launched_ranks()
        if launched > 1 and not torch.accelerator.is_available():
            self.use_cpu = True  # otherwise, every rank would assume that it is the only one
        if self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            raise ConfigError("fp16: this process trains on the CPU, which has no fp16 training; use --bf16")
        try:
            super().__post_init__()
        except ValueError as error:  # keeps the text of checks that transformers makes
            raise ConfigError(" ".join(str(error).split())) from error
        if dist.is_initialized():
            take_timeout(dist.group.WORLD, float(self.ddp_timeout))  # accelerate sets it only on accelerators
        check_output_dir(self.output_dir)
        refuse_other_world(launched, self.world_size)
        if self.n_gpu > 1:
            raise ConfigError(
                f"one process sees {self.n_gpu} GPUs, but hf_zero needs one process per GPU; start with torchrun "
                f"--nproc_per_node {self.n_gpu}, or set CUDA_VISIBLE_DEVICES=0"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields without tokens: pickled arguments are saved beside every model."""
        return _without_tokens(vars(self))

    @property
    def place_model_on_device(self) -> "_OnlyForZero":
        """Raises in a trainer without ZeRO, which would ignore the settings: every such trainer evaluates this as a
        bool in its constructor. ZeRO trainers do not, because the engine moves the shards."""
        return _OnlyForZero(type(self).__name__)

    def zero_config(self) -> ZeroConfig:
        """Returns the engine's settings.

        Raises:
            `ConfigError`: If a value is invalid. The message suggests the closest valid value.
        """
        choose("zero_stage", self.zero_stage, STAGES)
        self.zero_stage = int(self.zero_stage)
        words = {"True": "on", "False": "off"}  # YAML parses on and off as booleans
        self.zero_chunked_loss = words.get(str(self.zero_chunked_loss).capitalize(), self.zero_chunked_loss)
        bucket = _number(self.zero_bucket_mb)
        if not is_count(bucket):
            raise ConfigError(f"zero_bucket_mb: {bucket} is not a size; expected 1 or more (MiB), or auto")
        settings = {name: getattr(self, f"zero_{name}") for name in _SAME_NAMES}
        settings |= {name: _number(settings[name]) for name in ("keep_gathered", "shard_size", "tiled_mlp")}
        settings["reduce_dtype"] = choose("zero_reduce_dtype", self.zero_reduce_dtype, REDUCE_DTYPES)
        gather_dtype = self.zero_gather_dtype
        settings["gather_dtype"] = choose("zero_gather_dtype", gather_dtype, GATHER_DTYPES) if gather_dtype else None
        half = torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None
        try:
            config = ZeroConfig(
                compute_dtype=None if self.zero_autocast else half,
                bucket_nbytes="auto" if bucket == "auto" else bucket * 2**20,
                timeout_seconds=float(self.ddp_timeout),
                **settings,
            )
        except ConfigError as error:
            is_ours = str(error).partition(":")[0] in _SAME_NAMES
            raise ConfigError(f"zero_{error}" if is_ours else str(error)) from error
        if (num_ranks := launched_ranks()) > 1:
            if isinstance(config.shard_size, int):
                refuse_uneven(config.shard_size, num_ranks, "zero_shard_size")
            refuse_group_size(config.sequence_parallel, num_ranks, "zero_sequence_parallel")
        return config

    def _take_launchers_precision(self) -> None:
        """Applies the precision of `accelerate launch --mixed_precision` unless a flag sets one."""
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        if precision not in ("no", "bf16", "fp16"):
            raise ConfigError(f"ACCELERATE_MIXED_PRECISION: {precision} is not supported; use bf16, fp16 or no")
        if precision != "no" and not (self.bf16 or self.fp16):
            setattr(self, precision, True)

    def _refuse_unsupported(self) -> None:
        """Refuses settings that do not work with the number of launched ranks."""
        if self.auto_find_batch_size and launched_ranks() > 1:
            raise ConfigError(
                "auto_find_batch_size: when one rank runs out of memory, the others wait for it inside the step; "
                "find the batch size with one process or hf-zero plan, and set it"
            )


@dataclass(frozen=True)
class _OnlyForZero:
    """A value that raises [`ConfigError`] when it is evaluated as a bool."""

    arguments: str  # class name of the training arguments

    def __bool__(self) -> bool:
        raise ConfigError(
            f"args: {self.arguments} has ZeRO settings, but this trainer does not use ZeRO; use "
            "hf_zero.ZeroTrainer, or put ZeroTrainerMixin before your trainer's class"
        )


# Fields of `ZeroConfig` that correspond to the flag `zero_<name>`.
_SAME_NAMES = [each.name for each in fields(ZeroConfig) if hasattr(ZeroArgumentsMixin, f"zero_{each.name}")]


# Names of tokens among the arguments and in nested dictionaries (`model_init_kwargs`). The suffix "_token" is not
# enough to detect them: `eos_token` is not a secret.
_TOKENS = ("hub_token", "push_to_hub_token", "token", "use_auth_token")


def _without_tokens(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: None if key in _TOKENS and isinstance(item, str) else _without_tokens(item) for key, item in value.items()
    }


def _number(text: Any) -> Any:
    """Converts the text of a whole number to int; returns other values, such as auto, unchanged."""
    return int(text) if str(text).isdecimal() else text
