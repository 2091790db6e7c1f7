"""A run as `plan` sees it: model, batch and settings, made of a config alone, without weights, rows or devices."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel

from hf_zero.checkpoint import class_of
from hf_zero.config import ZeroConfig, choose
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.planner import TRAINED, Cluster, Longest, Prediction, Predictor, longest_sequence, refuse_impossible
from hf_zero.planner.advice import GIB
from hf_zero.planner.simulated_step import FUSED_ADAMW
from hf_zero.recipes.loading import one_line, quiet, resolve_config
from hf_zero.recipes.lora import QuantizationArguments, adapt, freeze_parameters, quantization_of
from hf_zero.trainer.early_checks import SUPPORTED_OPTIMS


# The classes and arguments that Trainer has for these, as far as memory follows from them.
ADAMW = {"adamw_torch_fused": FUSED_ADAMW, "adamw_torch": partial(torch.optim.AdamW)}
# Of a step of several micro-batches.
OF_MICRO_BATCHES = "traffic and time are those of a step of one micro-batch; memory is that of the last one of several"
_autocast_enabled = torch.is_autocast_enabled
# What TRL's head does on devices without its kernels takes more than they do.
_PARTS_OF_HEAD = ("_forward_tile", "_backward_tile", "_addmm_fp32")


def empty_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Builds a model on the meta device, by a hub id, `package:...`, a folder, or the path of a `config.json`. Raises
    [`ConfigError`] where there is none, or it names no class that transformers has."""
    source = resolve_config(name, "model")
    with one_line(name, "building the model of its config"), quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(source)
        config.use_cache = False  # as `Trainer` has it
        kind = class_of(config)
        if kind is None:
            raise ConfigError(
                f"model {name!r}: its config names no class of transformers in `architectures`; add one, such as "
                '"architectures": ["LlamaForCausalLM"]'
            )
        return kind._from_config(config, dtype=dtype).train()


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


def as_trained(
    model: PreTrainedModel, arguments: Any, compute_dtype: torch.dtype | None, new_modules: Sequence[str] = ()
) -> nn.Module:
    """Returns a model on the meta device, which is changed in place, quantized, frozen and with an adapter as the
    arguments say. Adapters on quantized models have the dtype that TRL gives them. `compute_dtype` is that in which is
    computed, if not in the dtype of the model; `new_modules` are as for `adapt`."""
    if isinstance(arguments, QuantizationArguments):
        settings = quantization_of(arguments, str(compute_dtype or model.dtype).removeprefix("torch."))
        if settings is not None:
            quantize(model, settings)
    freeze_parameters(model, arguments)
    made = adapt(model, arguments, None, new_modules)
    if made is not model and getattr(model, "is_quantized", False):
        for name, param in made.named_parameters():
            if param.requires_grad and "lora_magnitude_vector" not in name:
                param.data = param.data.to(torch.bfloat16)
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
class PlannedRun:
    """What there is to predict."""

    name: str  # of the model
    model: nn.Module  # on the meta device, adapted, quantized and frozen as the run has it
    config: ZeroConfig  # the settings
    num_ranks: int  # how many ranks
    # makes what one rank's forward is given, of so many rows of so many tokens; `None`: only what rests is predicted
    batch_of: Callable[[int, int], dict[str, Any] | None]
    make_optimizer: partial  # makes the optimizer of some parameters
    gradient_checkpointing: bool  # whether blocks keep their inputs alone
    on_cpu: bool  # whether ranks train on CPUs
    num_rows: int  # of the batch
    num_tokens: int | None  # of a row; `None`: as many as fit
    is_one_row: bool = False  # whether these rows lie one behind the other, in one
    num_positions: int | None = None  # of the model, where it has a last one
    rows_of_one: int = 1  # how many rows of a batch are made of one row of data
    notes: list[str] = field(default_factory=list)  # what is not counted
    forwards: tuple[str, ...] = (TRAINED,)  # that a step computes of a batch, in their order, as for `predict`
    accumulates: bool = False  # whether a step has several micro-batches
    reads_logits: bool = False  # whether its loss needs all logits of a language model, whatever `chunked_loss` says
    has_8_bit_products: bool = False  # whether its base is in 8 bits
    ranks_per_host: int | None = None  # how many ranks each host has, where that is said
    memory_nbytes: int = 0  # what one device has; 0: not known
    cluster: Cluster | None = None  # where they are, to predict the time of a step too
    # raises an `HfZeroError` for settings that such a run refuses, whatever its model, given those of ZeRO and
    # whether blocks are checkpointed
    check: Callable[[ZeroConfig, bool], object] = lambda *_: None

    @property
    def dtype(self) -> torch.dtype:
        """In which layers compute."""
        own = (param.dtype for param in self.model.parameters() if param.is_floating_point())
        return self.config.compute_dtype or next(own, torch.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the batch, and tokens of each."""
        assert self.num_tokens is not None
        return (1, self.num_rows * self.num_tokens) if self.is_one_row else (self.num_rows, self.num_tokens)

    @cached_property
    def batch(self) -> dict[str, Any] | None:
        """What one rank's forward is given."""
        return self.batch_of(*self.shape)

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor(
            self.model,
            num_ranks=self.num_ranks,
            make_optimizer=self.make_optimizer,
            on_cpu=self.on_cpu,
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
                lambda num_rows: self.batch_of(num_rows, num_tokens),
                rows,
                gradient_checkpointing=gradient_checkpointing,
            )
        return [replace(each, config=config) for each in found]

    def longest(self) -> Longest:
        """Finds the longest rows with which it fits the memory of one device. Raises [`ConfigError`] where that is not
        known, rows have no tokens, or none fit."""
        if not self.memory_nbytes:
            raise ConfigError("max_length auto: how much memory a device has is not known; add --memory with its GiB")
        if "input_ids" not in (replace(self, num_tokens=1).batch or ()):
            raise ConfigError("max_length auto: what a row takes does not depend on its tokens; leave it out")
        return longest_sequence(
            lambda num_tokens: replace(self, num_tokens=num_tokens).predict(), self.memory_nbytes, self.num_positions
        )

    def refuse(self, config: ZeroConfig, gradient_checkpointing: bool) -> None:
        """Refuses settings with which it cannot be trained, as far as that is seen without a step. Raises
        [`HfZeroError`], naming the setting."""
        self.check(config, gradient_checkpointing)
        if gradient_checkpointing and not getattr(self.model, "supports_gradient_checkpointing", True):
            raise UnsupportedError(f"{self.name}: the model does not support gradient checkpointing; leave it out")
        refuse_impossible(self.model, config, self.num_ranks)

    @contextmanager
    def _as_on_device(self, config: ZeroConfig) -> Iterator[ZeroConfig]:
        """Makes what looks at a device, or at values, do without data what it does on the device of the run. Yields
        settings as they are computed with."""
        computed = replace(config, chunked_loss="off") if self.reads_logits else config
        # there would be another number of tokens of images than of features; and torch casts on devices alone
        without_checks = patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1")
        with without_checks, patch.object(torch, "is_autocast_enabled", _is_autocast_enabled):
            if self.on_cpu or "fused_lm_head" not in (self.batch or ()):
                yield computed
                return
            from trl.kernels import chunked_logprob
            from trl.trainer import utils

            nothing: Mapping[str, Any] = dict.fromkeys(_PARTS_OF_HEAD, lambda *_, **__: None)
            with patch.multiple(chunked_logprob, **nothing), patch.object(utils, "_use_triton", lambda _: True):
                yield computed


def device_nbytes(gib: float | None, *, on_cpu: bool) -> int:
    """Returns the memory of one device, as it was given or as it is here; 0 where it is not known."""
    if gib is not None:
        return int(gib * GIB)
    if on_cpu or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory


def _is_autocast_enabled(*kind: str) -> bool:
    return kind != ("meta",) and _autocast_enabled(*kind)
