"""The input of a plan: model, batch and settings, made of a config alone, without weights, rows or devices."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from hf_zero.config import ZeroConfig, choose
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.planner import Cluster, Longest, Prediction, Predictor, longest_sequence, refuse_impossible
from hf_zero.planner.advice import GIB
from hf_zero.planner.simulated_step import FUSED_ADAMW
from hf_zero.recipes.loading import one_line, positions_of, quiet
from hf_zero.recipes.lora import (
    QuantizationArguments,
    adapt,
    check_adapter,
    check_freezing,
    check_quantization,
    freeze_parameters,
    quantization_of,
)
from hf_zero.recipes.parser import AUTO, refuse_less
from hf_zero.recipes.task import Task
from hf_zero.trainer import ZeroArgumentsMixin
from hf_zero.trainer.early_checks import SUPPORTED_OPTIMS


# The classes and arguments that Trainer has for these, as far as memory follows from them.
ADAMW = {"adamw_torch_fused": FUSED_ADAMW, "adamw_torch": partial(torch.optim.AdamW)}
# Of a step of several micro-batches.
OF_MICRO_BATCHES = "traffic and time are those of a step of one micro-batch; memory is that of the last one of several"
_autocast_enabled = torch.is_autocast_enabled
# What TRL's head does on devices without its kernels takes more than they do.
_PARTS_OF_HEAD = ("_forward_tile", "_backward_tile", "_addmm_fp32")


def quantize(model: PreTrainedModel, settings: BitsAndBytesConfig) -> None:
    """Makes the layers of a model on the meta device, in the dtype in which its weights would be read, those that
    `from_pretrained` gives for a quantization by bitsandbytes, which is installed."""
    from bitsandbytes.functional import name2qmap
    from transformers.quantizers.auto import AutoHfQuantizer

    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model, None)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            module.weight.data = module.weight.data.to(dtypes[f"{name}.weight"])
            # bitsandbytes keeps a table of codes, on the device of whatever it quantizes first
            with torch.device("cpu"), patch.dict(name2qmap):
                module.weight._quantize("meta")
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtypes[f"{name}.bias"])
    quantizer._process_model_after_weight_loading(model)
    model.hf_quantizer, model.is_quantized = quantizer, True


def as_trained(task: Task, model: PreTrainedModel, run: Any, config: ZeroConfig) -> nn.Module:
    """Returns a model on the meta device, which is changed in place, as the run trains it: quantized, frozen, and with
    its adapter and head. Adapters on quantized models have the dtype that TRL gives them."""
    arguments, training = run.arguments, run.training
    if isinstance(arguments, QuantizationArguments):
        settings = quantization_of(arguments, str(config.compute_dtype or model.dtype).removeprefix("torch."))
        if settings is not None:
            quantize(model, settings)
    freeze_parameters(model, arguments)
    made = adapt(model, arguments, None, task.new_modules(model))
    if made is not model:
        for name, param in made.named_parameters() if getattr(model, "is_quantized", False) else ():
            if param.requires_grad and "lora_magnitude_vector" not in name:
                param.data = param.data.to(torch.bfloat16)
        if training["gradient_checkpointing"]:
            made.enable_input_require_grads()
    if task.has_fused_head(training):
        from hf_zero.trl.fused_head import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if training.get("disable_dropout"):
        from trl.trainer.utils import disable_dropout_in_model

        disable_dropout_in_model(made)
    return made


def example_batch(
    model: PreTrainedModel, batch_size: int, length: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Makes a batch on the meta device with the labels that the model's class takes, for sequences of `length` tokens
    without padding, of an encoder and a decoder each. Images are in `dtype`, by default that of the model. Raises
    [`ConfigError`] where a model takes neither tokens nor images."""
    kind = type(model).__name__
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (batch_size, getattr(model.config, "num_channels", 3), height, width)
        inputs = {"pixel_values": torch.empty(shape, dtype=dtype or model.dtype, device="meta")}
    elif model.main_input_name == "input_ids":
        inputs = {name: _empty(batch_size, length) for name in ("input_ids", "attention_mask")}
    else:
        raise ConfigError(f"model: {kind} takes {model.main_input_name}, and only tokens and images are planned")
    if "For" not in kind and not kind.endswith("HeadModel"):
        return inputs  # without a head there is no loss
    by_row = any(word in kind for word in ("SequenceClassification", "ImageClassification"))
    return {**inputs, "labels": _empty(batch_size) if by_row else _empty(batch_size, length)}


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.long, device="meta")


def optimizer_of(optim: str) -> partial:
    """Returns the class and arguments of the optimizer that `--optim` names. Raises [`ConfigError`] where it does not
    run on shards, or its package is not installed."""
    choose("optim", optim, dict.fromkeys(sorted(SUPPORTED_OPTIMS)))
    if optim in ADAMW:
        return ADAMW[optim]
    from transformers import Trainer, TrainingArguments  # which takes seconds

    try:
        training = TrainingArguments(output_dir=str(Path.cwd()), optim=optim, use_cpu=True)
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(training)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"optim: {' '.join(str(error).split())}") from error
    return partial(kind, **kwargs)


@dataclass(frozen=True)
class Subject:
    """Model, batch and optimizer of a plan: made of a config, or those of a run that is ready to train."""

    model: nn.Module  # adapted, quantized and frozen as the run has it
    # makes what one rank's forward is given, of so many rows of so many tokens; `None`: only what rests is predicted
    batch_of: Callable[[int, int], dict[str, Any] | None]
    num_rows: int  # of the batch
    num_tokens: int | None  # of a row; `None`: as many as fit
    make_optimizer: partial  # makes the optimizer of some parameters
    on_cpu: bool  # whether ranks train on CPUs
    reads_logits: bool  # whether its loss needs all logits of a language model, whatever `chunked_loss` says
    num_positions: int | None = None  # of the model, where it has a last one
    is_one_row: bool = False  # whether these rows lie one behind the other, in one
    notes: list[str] = field(default_factory=list)  # what is not counted


@dataclass(frozen=True)
class PlanInput:
    """What there is to predict."""

    name: str  # of the model
    subject: Subject
    config: ZeroConfig  # the settings
    num_ranks: int  # how many ranks
    gradient_checkpointing: bool  # whether blocks keep their inputs alone
    rows_of_one: int  # how many rows of a batch are made of one row of data
    forwards: tuple[str, ...]  # that a step computes of a batch, in their order, as for `predict`
    accumulates: bool  # whether a step has several micro-batches
    has_8_bit_products: bool  # whether its base is in 8 bits
    # raises an `HfZeroError` for settings that such a run refuses, whatever its model, given those of ZeRO and
    # whether blocks are checkpointed
    check: Callable[[ZeroConfig, bool], object]
    ranks_per_host: int | None = None  # how many ranks each host has, where that is said
    memory_nbytes: int = 0  # what one device has; 0: not known
    cluster: Cluster | None = None  # where they are, to predict the time of a step too

    @classmethod
    def of(
        cls,
        task: Task,
        run: Any,
        subject: Subject | None = None,
        *,
        config: PretrainedConfig | None = None,
        num_tokens: int | str | None = None,
    ) -> "PlanInput":
        """Builds the input of a plan. Raises [`ConfigError`] for what contradicts itself, and what is not planned.

        Args:
            task (`Task`): What is trained.
            run (`RunConfig`): Its settings.
            subject (`Subject`, *optional*): That of a run that is ready to train. Default: made of the config.
            config (`PretrainedConfig`, *optional*): In place of that of the model.
            num_tokens (`int` or `str`, *optional*): Tokens of a row, in place of `max_length`; "auto": as many as fit.
        """
        training = run.training
        zero = ZeroArgumentsMixin.zero_config(cast(ZeroArgumentsMixin, SimpleNamespace(**training)))

        def check(config: ZeroConfig, gradient_checkpointing: bool) -> None:
            task.check_zero(config, {**training, "gradient_checkpointing": gradient_checkpointing})

        if subject is None:
            _check(task, run)
            check(zero, training["gradient_checkpointing"])
            subject = _subject(task, run, zero, config or task.load_config(run.arguments), num_tokens)
        return cls(
            name=task.model_name(run.arguments),
            subject=subject,
            config=zero,
            num_ranks=run.num_processes or 1,
            gradient_checkpointing=training["gradient_checkpointing"],
            rows_of_one=1 if subject.is_one_row else task.rows_of_one,
            forwards=task.forwards(training),
            accumulates=training["gradient_accumulation_steps"] > 1,
            has_8_bit_products=getattr(run.arguments, "load_in_8bit", False),
            check=check,
        )

    def with_tokens(self, num_tokens: int) -> "PlanInput":
        """Returns the same with rows of so many tokens."""
        return replace(self, subject=replace(self.subject, num_tokens=num_tokens))

    @property
    def dtype(self) -> torch.dtype:
        """In which layers compute."""
        own = (param.dtype for param in self.subject.model.parameters() if param.is_floating_point())
        return self.config.compute_dtype or next(own, torch.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the batch, and tokens of each."""
        num_rows, num_tokens = self.subject.num_rows, self.subject.num_tokens
        assert num_tokens is not None
        return (1, num_rows * num_tokens) if self.subject.is_one_row else (num_rows, num_tokens)

    @cached_property
    def batch(self) -> dict[str, Any] | None:
        """What one rank's forward is given."""
        return self.subject.batch_of(*self.shape)

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(
            self.subject.model,
            num_ranks=self.num_ranks,
            make_optimizer=self.subject.make_optimizer,
            on_cpu=self.subject.on_cpu,
            cluster=self.cluster,
            ranks_per_host=self.ranks_per_host,
            forwards=self.forwards,
            accumulates=self.accumulates,
            memory_nbytes=self.memory_nbytes,
        )

    def predict(self, config: ZeroConfig | None = None, gradient_checkpointing: bool | None = None) -> Prediction:
        """Predicts it, or the same with other settings."""
        config = config or self.config
        switch = self.gradient_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        with self._as_on_device(config) as computed:
            found = self._predictor.predict(computed, self.batch, gradient_checkpointing=switch)
        return replace(found, config=config)

    def states_nbytes(self, config: ZeroConfig) -> int:
        """Returns what model states take of a device with other settings."""
        with self._as_on_device(config) as computed:
            return self._predictor.predict(computed, None).states_nbytes

    def predict_rows(self, rows: list[int], config: ZeroConfig, gradient_checkpointing: bool) -> list[Prediction]:
        """Predicts batches of so many rows each, with other settings."""
        _, num_tokens = self.shape
        with self._as_on_device(config) as computed:
            found = self._predictor.predict_rows(
                computed,
                lambda num_rows: self.subject.batch_of(num_rows, num_tokens),
                rows,
                gradient_checkpointing=gradient_checkpointing,
            )
        return [replace(each, config=config) for each in found]

    def longest(self) -> Longest:
        """Finds the longest rows with which it fits the memory of one device. Raises [`ConfigError`] where that is not
        known, rows have no tokens, or none fit."""
        if not self.memory_nbytes:
            raise ConfigError("max_length auto: how much memory a device has is not known; add --memory with its GiB")
        if "input_ids" not in (self.with_tokens(1).batch or ()):
            raise ConfigError("max_length auto: what a row takes does not depend on its tokens; leave it out")
        return longest_sequence(
            lambda num_tokens: self.with_tokens(num_tokens).predict(), self.memory_nbytes, self.subject.num_positions
        )

    def refuse(self, config: ZeroConfig, gradient_checkpointing: bool) -> None:
        """Refuses settings with which it cannot be trained, as far as that is seen without a step. Raises
        [`HfZeroError`], naming the setting."""
        self.check(config, gradient_checkpointing)
        model = self.subject.model
        if gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
            raise UnsupportedError(f"{self.name}: the model does not support gradient checkpointing; leave it out")
        refuse_impossible(model, config, self.num_ranks)

    @contextmanager
    def _as_on_device(self, config: ZeroConfig) -> Iterator[ZeroConfig]:
        """Makes what looks at a device, or at values, do without data what it does on the device of the run. Yields
        settings as they are computed with."""
        computed = replace(config, chunked_loss="off") if self.subject.reads_logits else config
        # there would be another number of tokens of images than of features; and torch casts on devices alone
        without_checks = patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1")
        with without_checks, patch.object(torch, "is_autocast_enabled", _is_autocast_enabled):
            if self.subject.on_cpu or "fused_lm_head" not in (self.batch or ()):
                yield computed
                return
            from trl.kernels import chunked_logprob
            from trl.trainer import utils

            nothing: Mapping[str, Any] = dict.fromkeys(_PARTS_OF_HEAD, lambda *_, **__: None)
            with patch.multiple(chunked_logprob, **nothing), patch.object(utils, "_use_triton", lambda _: True):
                yield computed


def _check(task: Task, run: Any) -> None:
    """Refuses what contradicts itself, and what is not planned."""
    arguments = run.arguments
    task.check_plan(arguments)
    if not task.model_name(arguments):
        raise ConfigError("model_name_or_path: not set; name a folder, package:<name>/<folder> or a hub id")
    use_peft = arguments.use_peft
    check_adapter(arguments)
    check_freezing(arguments, use_peft=use_peft)
    if isinstance(arguments, QuantizationArguments):
        check_quantization(arguments, use_peft=use_peft)
    refuse_less(SimpleNamespace(**run.training), per_device_train_batch_size=1)
    refuse_less(run, num_processes=1)


def _subject(
    task: Task, run: Any, zero: ZeroConfig, config: PretrainedConfig, num_tokens: int | str | None
) -> Subject:
    """Makes the model of a config, and its batches."""
    arguments, training = run.arguments, run.training
    config.use_cache = False  # as `Trainer` has it
    with one_line(task.model_name(arguments), "building the model of its config"), quiet(), torch.device("meta"):
        model = task.empty_model(arguments, config).train()

    def batch_of(num_rows: int, num_tokens: int) -> dict[str, Any]:
        batch: dict[str, Any] = example_batch(model, num_rows, num_tokens, zero.compute_dtype)
        batch |= task.images(config, num_rows, zero.compute_dtype or torch.float32)
        if not task.takes_labels:
            del batch["labels"]
        if task.has_fused_head(training):
            batch["fused_lm_head"] = True
        return batch

    if num_tokens is None:
        num_tokens = task.num_tokens(arguments, training, config)
    # all rows of a batch lie one behind the other
    packs = training.get("packing") and training["packing_strategy"] != "wrapped"
    is_one_row = bool(packs or training.get("padding_free"))
    return Subject(
        model=as_trained(task, model, run, zero),
        batch_of=batch_of,
        num_rows=training["per_device_train_batch_size"] * task.rows_of_one,
        num_tokens=None if num_tokens == AUTO else int(num_tokens),
        make_optimizer=optimizer_of(training["optim"]),
        on_cpu=training["use_cpu"],
        reads_logits=bool(training.get("label_smoothing_factor")),
        num_positions=positions_of(config),
        is_one_row=is_one_row,
        notes=_not_counted(run, is_one_row, config),
    )


def _not_counted(run: Any, is_one_row: bool, config: PretrainedConfig) -> list[str]:
    """Returns a line for each thing that the plan of a run leaves out."""
    notes = ["not counted: the kernels of use_liger_kernel"] if run.training.get("use_liger_kernel") else []
    notes += [OF_MICRO_BATCHES] if run.training["gradient_accumulation_steps"] > 1 else []
    if is_one_row and "flash" not in (run.arguments.attn_implementation or ""):
        notes.append("not counted: the mask that keeps packed rows apart; flash attention needs none")
    vision = getattr(config, "vision_config", None)
    if vision is not None and not isinstance(getattr(vision, "image_size", None), int):
        notes.append("not counted: images, for how many patches they have is in the rows; --dry_run counts them")
    return notes


def device_nbytes(gib: float | None, *, on_cpu: bool) -> int:
    """Returns the memory of one device, as it was given or as it is here; 0 where it is not known."""
    if gib is not None:
        return int(gib * GIB)
    if on_cpu or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory


def _is_autocast_enabled(*kind: str) -> bool:
    return kind != ("meta",) and _autocast_enabled(*kind)
