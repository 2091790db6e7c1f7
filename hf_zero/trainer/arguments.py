"""The flags of ZeRO, with early checks. `TrainingArguments`, which takes seconds to import, is not needed for them."""

import inspect
import os
import re
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hf_zero.accelerator.named_settings import launched_ranks, refuse_other_engines, refuse_other_world
from hf_zero.activation import refuse_group_size
from hf_zero.comm.groups import refuse_uneven
from hf_zero.comm.ranks import take_timeout
from hf_zero.config import GATHER_DTYPES, REDUCE_DTYPES, STAGES, ZeroConfig, choose, is_count
from hf_zero.errors import ConfigError
from hf_zero.parent import end_with_launcher
from hf_zero.removed import refuse_removed


if TYPE_CHECKING:  # type checkers see what the mixin stands before
    from transformers import TrainingArguments as _Arguments
else:
    _Arguments = object

Class = TypeVar("Class")


def helped(cls: type[Class]) -> type[Class]:
    """Sets the help texts of a dataclass's fields from `Args` of its docstring."""
    texts = re.findall(r"^    (\w+) \(.*?\): (.*(?:\n        .*)*)", inspect.cleandoc(cls.__doc__ or ""), re.MULTILINE)
    by_name = {name: " ".join(text.replace("`", "").split()) for name, text in texts}
    for each in fields(cls):  # type: ignore[arg-type]
        if text := by_name.get(each.name):
            each.metadata = MappingProxyType({"help": text[0].upper() + text[1:]})
    return cls


@helped
@dataclass
class ZeroArgumentsMixin(_Arguments):
    """The settings of ZeRO, to be mixed into any subclass of `TrainingArguments`, before it in the list of bases.

    Args:
        zero_stage (`int`): what is partitioned over the ranks: 0 nothing, 1 the optimizer state, 2 also the gradients,
            3 also the parameters.
        zero_reduce_dtype (`str`): the dtype in which gradients are summed over the ranks: fp32 or bf16. int8: what
            ranks send of them is in 8 bits, with a scale for each 256 values, and is summed in fp32; ranks
            of one host that share memory send nothing.
        zero_gather_dtype (`str`, *optional*): int8: at stage 3 parameters are gathered in 8 bits, with a scale for
            each 256 values, and all ranks compute with the rounded values; masters and checkpoints stay exact. By
            default they are gathered as they are.
        zero_bucket_mb (`str`): size in MiB of each buffer through which ranks that send messages exchange values, in
            pieces; auto: so large that the latency of a piece counts for little, by the kind of link.
        zero_prefetch_units (`int`): how many blocks are gathered ahead of use at stage 3; 0 saves one block's memory.
        zero_keep_gathered (`str`): how many further blocks stay gathered from forward to backward at stage 3, at the
            cost of one block's memory each; auto: as many as fit half of the memory that is free beside gradients and
            state.
        zero_shared_memory (`bool`): lets CPU ranks that are on one host share memory instead of sending messages.
        zero_shard_size (`str`, *optional*): over how many neighbouring ranks the model is sharded; the groups of so
            many hold the same, and gathers stay within them. auto: the ranks of one host, or of as few hosts as hold
            the model's states. By default all ranks.
        zero_offload (`str`): what rests in the host's memory instead of the device's: none; optimizer: masters,
            optimizer state and gradients, updated by the CPU; params: at stage 3 the parameters too.
        zero_offload_fraction (`float`): of how much of the model `--zero_offload` holds, in whole blocks.
        zero_offload_dir (`str`, *optional*): a folder, best on an NVMe disk, in whose files what `--zero_offload`
            names rests.
        zero_autocast (`bool`): with `--bf16` or `--fp16`, keeps the parameters in the dtype that they were loaded in
            and casts them at each use, as `Trainer` does, instead of computing with half-precision copies of fp32
            masters; autograd keeps the casts, a whole model in half precision.
        zero_offload_activations (`bool`): inputs of checkpointed blocks, or without gradient checkpointing all that
            blocks keep for the backward in tensors of 1 MiB and more, rest in the host's memory from forward to
            backward.
        zero_partition_activations (`bool`): inputs of checkpointed blocks are divided over the ranks of the model's
            tensor parallelism.
        zero_chunked_loss (`str`): whether a language model's loss is computed for a part of the vocabulary at a time:
            on, off, or auto: where its logits would take more than the largest block.
        zero_tiled_mlp (`str`): into how many tiles the MLPs of blocks divide the tokens of a micro-batch; they compute
            one at a time, and again in the backward. auto: so many that a tile has at most as many tokens as a token
            has features; 1: all tokens at once.
        zero_sequence_parallel (`int`): how many neighbouring ranks share each sequence: they are given the same
            batches, and each computes a part of every sequence and some heads of its attention.
        zero_resume_strict (`bool`): resuming from the newest checkpoint refuses it when it is damaged, instead of
            saying so and going on from the next older one that is whole.
        zero_async_save (`bool`): saves checkpoints in the background: training waits for a copy of the shards alone,
            whose memory is kept for the next.
        zero_nonfinite (`str`): what is done about gradients with an infinity or a NaN: stop ends the run before a step
            is taken on them, skip leaves the step out on all ranks, ignore takes it.
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
        if any(base.__name__ == "TrainingArguments" for base in before):  # whose checks would be the only ones
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigError(
                f"{cls.__name__}({bases}): give ZeroArgumentsMixin before the class that it is mixed into"
            )

    def __new__(cls, *args, **kwargs):
        # before `__init__` raises a TypeError that names no alternative; subclasses may have fields of such names
        refuse_removed(kwargs.keys() - {each.name for each in fields(cls)})
        return super().__new__(cls)

    def __post_init__(self):
        from hf_zero.trainer.checks import check_arguments, check_output_dir  # which imports Trainer

        end_with_launcher()
        self._take_launchers_precision()
        self.zero_config()
        refuse_other_engines(vars(self))
        self._refuse_unsupported()
        check_arguments(vars(self))
        launched = launched_ranks()
        if launched > 1 and not torch.accelerator.is_available():
            self.use_cpu = True  # without it, every rank would take itself for the only one
        if self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            raise ConfigError("fp16: this process trains on the CPU, which has no fp16 training; use --bf16")
        try:
            super().__post_init__()
        except ValueError as error:  # what transformers alone knows of, in its words
            raise ConfigError(" ".join(str(error).split())) from error
        if dist.is_initialized():
            take_timeout(dist.group.WORLD, float(self.ddp_timeout))  # accelerate sets it on accelerators alone
        check_output_dir(self.output_dir)
        refuse_other_world(launched, self.world_size)
        if self.n_gpu > 1:
            raise ConfigError(
                f"one process sees {self.n_gpu} GPUs, and each needs its own; start with torchrun "
                f"--nproc_per_node {self.n_gpu}, or let it see one (CUDA_VISIBLE_DEVICES=0)"
            )

    @property
    def place_model_on_device(self) -> "_OnlyForZero":
        """Refuses a trainer without ZeRO, which would leave the settings out: each asks whether this is true when it
        is made. One with ZeRO does not, since the engine moves the shards and nothing moves the whole model."""
        return _OnlyForZero(type(self).__name__)

    def zero_config(self) -> ZeroConfig:
        """Returns the engine's settings.

        Raises:
            `ConfigError`: for a value that is not valid, naming the nearest that is.
        """
        choose("zero_stage", self.zero_stage, STAGES)
        self.zero_stage = int(self.zero_stage)
        words = {"True": "on", "False": "off"}  # YAML reads on and off so
        self.zero_chunked_loss = words.get(str(self.zero_chunked_loss).capitalize(), self.zero_chunked_loss)
        bucket = _number(self.zero_bucket_mb)
        if not is_count(bucket):
            raise ConfigError(f"zero_bucket_mb: {bucket} is not a size; give 1 or more (MiB), or auto")
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
        """Takes the precision of `accelerate launch --mixed_precision`, unless a flag gives one."""
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        if precision not in ("no", "bf16", "fp16"):
            raise ConfigError(f"ACCELERATE_MIXED_PRECISION: {precision} is not supported; use bf16, fp16 or no")
        if precision != "no" and not (self.bf16 or self.fp16):
            setattr(self, precision, True)

    def _refuse_unsupported(self) -> None:
        """Refuses settings that do not go with how the process was launched."""
        if self.auto_find_batch_size and launched_ranks() > 1:
            raise ConfigError(
                "auto_find_batch_size: where one rank runs out of memory, the others wait for it within the step; "
                "find the batch size in one process, or with hf-zero plan, and set it"
            )


@dataclass(frozen=True)
class _OnlyForZero:
    """Raises [`ConfigError`] where a trainer without ZeRO asks whether it is true."""

    arguments: str  # their class

    def __bool__(self) -> bool:
        raise ConfigError(
            f"args: {self.arguments} has settings of ZeRO, and this trainer has none of it; use "
            "hf_zero.ZeroTrainer, or give ZeroTrainerMixin before your trainer's class"
        )


# The fields of `ZeroConfig` that are settings of the same name, behind `zero_`.
_SAME_NAMES = [each.name for each in fields(ZeroConfig) if hasattr(ZeroArgumentsMixin, f"zero_{each.name}")]


def _number(text: Any) -> Any:
    """Returns the whole number that a flag gives; what is none, such as auto, as it is."""
    return int(text) if str(text).isdecimal() else text
