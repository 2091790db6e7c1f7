"""The input of a plan: model, batch and settings, made of a config, without weights, rows or devices."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from hf_zero.compat import replaced
from hf_zero.config import ZeroConfig, choose
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.planner import Cluster, Longest, Prediction, Predictor, Throughput, longest_sequence
from hf_zero.planner.search import GIB
from hf_zero.planner.simulated_step import FUSED_ADAMW
from hf_zero.planner.topology import Device
from hf_zero.recipes.lora import QuantizationArguments, adapt, freeze_parameters, quantization_of
from hf_zero.recipes.models import one_line, positions_of
from hf_zero.recipes.parser import AUTO
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.task import Task
from hf_zero.trainer.checks import SUPPORTED_OPTIMS


# Trainer's classes and arguments for these, as far as they affect memory. Importing Trainer takes seconds.
ADAMW = {"adamw_torch_fused": FUSED_ADAMW, "adamw_torch": partial(torch.optim.AdamW)}
# What TRL's fused head computes without its kernels, which takes more memory.
PARTS_OF_HEAD = ("_forward_tile", "_backward_tile", "_addmm_fp32")
CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"  # switches off checks of values, such as the number of image tokens
OF_MICRO_BATCHES = "traffic and time are those of a step with one micro-batch; memory is that of the last of several"


@dataclass(frozen=True)
class PlanInput:
    """A run to predict: its settings, its model and its batches."""

    task: Task
    run: RunConfig
    config: PretrainedConfig  # of the model
    predictor: Predictor
    # makes the input of one rank's forward from numbers of rows and tokens
    batch_of: Callable[[int, int], dict[str, Any]]
    num_rows: int  # of the batch
    num_tokens: int | None  # of a row; None: as many as fit

    @classmethod
    def of(
        cls,
        task: Task,
        run: RunConfig,
        *,
        config: PretrainedConfig | None = None,
        num_tokens: int | str | None = None,
        memory_nbytes: int = 0,
        device: Device | None = None,
        num_hosts: int = 1,
    ) -> "PlanInput":
        """Makes the model of a config, its batches and its optimizer. Raises [`ConfigError`] for settings that cannot
        be planned.

        Args:
            task (`Task`): the task.
            run (`RunConfig`): its settings.
            config (`PretrainedConfig`, *optional*): replaces the config of the model.
            num_tokens (`int` or `str`, *optional*): tokens of a row, instead of `max_length`; "auto": as many as fit.
            memory_nbytes (`int`): memory of one device; 0: unknown.
            device (`Device`, *optional*): predicts the time of a step on it, too.
            num_hosts (`int`): number of hosts; with one host and no `device`, a host has its default number of ranks.
        """
        arguments, training, zero = run.arguments, run.training, run.zero
        config = config or task.load_config(arguments)
        config.use_cache = False  # as in Trainer
        with one_line(task.model_name(arguments), "building the model of its config failed"), torch.device("meta"):
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
        trained, num_ranks = as_trained(task, model, run, zero), run.num_processes or 1
        per_host, cluster = num_ranks // num_hosts, None
        if device is not None:
            own = (param.dtype for param in trained.parameters() if param.is_floating_point())
            cluster = Cluster(device, num_hosts, per_host, zero.compute_dtype or next(own, torch.float32))
        predictor = Predictor(
            trained,
            num_ranks=num_ranks,
            make_optimizer=optimizer_of(training["optim"], training.get("optim_args")),
            on_cpu=training["use_cpu"],
            cluster=cluster,
            ranks_per_host=per_host if num_hosts > 1 else None,
            forwards=task.forwards(training),
            reads_logits=bool(task.reads_logits or training.get("label_smoothing_factor")),
            accumulates=training["gradient_accumulation_steps"] > 1,
            memory_nbytes=memory_nbytes,
        )
        num_rows = training["per_device_train_batch_size"] * task.rows_of_one
        return cls(task, run, config, predictor, batch_of, num_rows, None if num_tokens == AUTO else int(num_tokens))

    @property
    def gradient_checkpointing(self) -> bool:
        return self.run.training["gradient_checkpointing"]

    @property
    def is_one_row(self) -> bool:
        """Whether the rows of a batch are packed into one."""
        training = self.run.training
        packs = training.get("packing") and training["packing_strategy"] != "wrapped"
        return bool(packs or training.get("padding_free"))

    @property
    def rows_of_one(self) -> int:
        """The number of rows of a batch that are made of one row of data."""
        return 1 if self.is_one_row else self.task.rows_of_one

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of the batch, and tokens of each."""
        num_rows, num_tokens = self.num_rows, self.num_tokens
        assert num_tokens is not None
        return (1, num_rows * num_tokens) if self.is_one_row else (num_rows, num_tokens)

    @cached_property
    def batch(self) -> dict[str, Any]:
        """The input of one rank's forward."""
        return self.batch_of(*self.shape)

    @property
    def notes(self) -> list[str]:
        """A line for each thing that a plan omits."""
        run = self.run
        notes = ["not counted: the kernels of use_liger_kernel"] if run.training.get("use_liger_kernel") else []
        notes += [OF_MICRO_BATCHES] if self.predictor.accumulates else []
        if self.is_one_row and "flash" not in (run.arguments.attn_implementation or ""):
            notes.append("not counted: the attention mask of packed rows; flash attention needs none")
        has_vision = getattr(self.config, "vision_config", None) is not None
        if has_vision and "pixel_values" not in self.batch_of(1, 1):
            notes.append("not counted: images; --dry_run of a training command counts those of its rows")
        return notes

    def predict(self, config: ZeroConfig | None = None, gradient_checkpointing: bool | None = None) -> Prediction:
        """Predicts the run, or the same run with other settings. Raises [`HfZeroError`] for settings that the run
        would refuse."""
        config = config or self.run.zero
        switch = self.gradient_checkpointing if gradient_checkpointing is None else gradient_checkpointing
        with self._as_in_run(config, switch):
            return self.predictor.predict(config, self.batch, gradient_checkpointing=switch)

    def predict_rows(self, rows: list[int], config: ZeroConfig, gradient_checkpointing: bool) -> list[Throughput]:
        """Predicts batches of the given numbers of rows on the cluster, with other settings. Raises [`HfZeroError`]
        for settings that the run would refuse, and if their time is not known."""
        batch_of, (_, num_tokens) = self.batch_of, self.shape
        with self._as_in_run(config, gradient_checkpointing):
            found = self.predictor.predict_rows(
                config,
                lambda num_rows: batch_of(num_rows, num_tokens),
                rows,
                gradient_checkpointing=gradient_checkpointing,
            )
        return [self.throughput(each, num_rows) for each, num_rows in zip(found, rows)]

    def longest(self) -> Longest:
        """Finds the longest rows with which the run fits the memory of one device. Raises [`ConfigError`] if that is
        unknown, rows have no tokens, or none fit."""
        memory_nbytes = self.predictor.memory_nbytes
        if not memory_nbytes:
            raise ConfigError("max_length auto: the memory of a device is unknown; add --memory with its GiB")
        if "input_ids" not in self.batch_of(1, 1):
            raise ConfigError("max_length auto: the memory of a row does not depend on its tokens; leave it out")
        return longest_sequence(
            lambda num_tokens: replace(self, num_tokens=num_tokens).predict(), memory_nbytes, positions_of(self.config)
        )

    def throughput(self, prediction: Prediction, num_rows: int) -> Throughput:
        """Returns the speed of a predicted batch of `num_rows` rows on the cluster. Raises [`UnsupportedError`] if its
        time is not known."""
        if prediction.time is None:
            raise UnsupportedError(prediction.note)
        assert self.predictor.cluster is not None
        ids = self.batch.get("input_ids")
        num_items = num_rows * (1 if ids is None else ids.shape[1]) // prediction.config.sequence_parallel
        unit = "rows" if ids is None else "tokens"
        return Throughput(prediction, self.predictor.cluster, num_rows // self.rows_of_one, num_items, unit)

    @contextmanager
    def _as_in_run(self, config: ZeroConfig, gradient_checkpointing: bool) -> Iterator[None]:
        """Refuses settings that the run would refuse. Inside, code that depends on a device or on values does on the
        meta device what it does on that of the run."""
        training = self.run.training
        self.task.check_zero(config, {**training, "gradient_checkpointing": gradient_checkpointing})
        is_enabled = torch.is_autocast_enabled  # which does not know the meta device
        with ExitStack() as stack:
            stack.enter_context(
                replaced(torch, is_autocast_enabled=lambda *kind: kind != ("meta",) and is_enabled(*kind))
            )
            if not training["use_cpu"] and self.task.has_fused_head(training):
                from trl.kernels import chunked_logprob
                from trl.trainer import utils

                stack.enter_context(replaced(chunked_logprob, **dict.fromkeys(PARTS_OF_HEAD, lambda *_, **__: None)))
                stack.enter_context(replaced(utils, _use_triton=lambda _: True))
            checks = os.environ.get(CHECKS)
            os.environ[CHECKS] = "1"
            try:
                yield
            finally:
                os.environ.pop(CHECKS) if checks is None else os.environ.update({CHECKS: checks})


def as_trained(task: Task, model: PreTrainedModel, run: RunConfig, config: ZeroConfig) -> nn.Module:
    """Quantizes and freezes a model on the meta device in place as the run does, and returns it with adapter and head.
    Adapters on quantized models have the dtype that TRL gives them."""
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
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if training.get("disable_dropout"):
        from trl.trainer.utils import disable_dropout_in_model

        disable_dropout_in_model(made)
    return made


def quantize(model: PreTrainedModel, settings: BitsAndBytesConfig) -> None:
    """Replaces the layers of a model on the meta device as `from_pretrained` does with bitsandbytes. The model is in
    the dtype in which its weights would be read."""
    from bitsandbytes import functional
    from transformers.quantizers.auto import AutoHfQuantizer

    with torch.device("cpu"):  # bitsandbytes keeps this table for all models, on the device of the first
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model, None)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("bitsandbytes."):
            module.weight.data = module.weight.data.to(dtypes[f"{name}.weight"])
            module.weight._quantize("meta")
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtypes[f"{name}.bias"])
    quantizer._process_model_after_weight_loading(model)
    model.hf_quantizer, model.is_quantized = quantizer, True


def example_batch(
    model: PreTrainedModel, batch_size: int, length: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Makes a batch on the meta device with the labels that the model's class takes, of sequences of `length` tokens
    without padding. Images are in `dtype`, by default that of the model. Raises [`ConfigError`] if a model takes
    neither tokens nor images."""
    kind = type(model).__name__
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        shape = (batch_size, getattr(model.config, "num_channels", 3), height, width)
        inputs = {"pixel_values": torch.empty(shape, dtype=dtype or model.dtype, device="meta")}
    elif model.main_input_name == "input_ids":
        inputs = {name: _empty(batch_size, length) for name in ("input_ids", "attention_mask")}
    else:
        raise ConfigError(f"model: {kind} takes {model.main_input_name}; only tokens and images can be planned")
    if "For" not in kind and not kind.endswith("HeadModel"):
        return inputs  # without a head there is no loss
    by_row = any(word in kind for word in ("SequenceClassification", "ImageClassification"))
    return {**inputs, "labels": _empty(batch_size) if by_row else _empty(batch_size, length)}


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.long, device="meta")


def optimizer_of(optim: str, optim_args: str | None = None) -> partial:
    """Returns the class and arguments of the optimizer that `--optim` and `--optim_args` name. Raises [`ConfigError`]
    if it does not run on shards, or its package is not installed."""
    choose("optim", optim, dict.fromkeys(sorted(SUPPORTED_OPTIMS)))
    if optim in ADAMW and not optim_args:
        return ADAMW[optim]
    from transformers import Trainer, TrainingArguments

    try:
        training = TrainingArguments(output_dir=str(Path.cwd()), optim=optim, optim_args=optim_args, use_cpu=True)
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(training)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"optim: {' '.join(str(error).split())}") from error
    return partial(kind, **kwargs)


def device_nbytes(gib: float | None, *, on_cpu: bool) -> int:
    """Returns the memory of one device: `gib`, or that of this machine's GPU; 0 if unknown."""
    if gib is not None:
        return int(gib * GIB)
    if on_cpu or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory
