"""The run of a task as `plan --config` sees it, told by its settings and the config of its model; and by that the
longest rows with which it fits the memory of its devices, for `--max_length auto`."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.planner import EVALUATED, REFERENCE, TRAINED
from hf_zero.recipes.language_models import check_source, config_of, named_model
from hf_zero.recipes.loading import DTYPES, one_line, positions_of, quiet, resolve_config
from hf_zero.recipes.lora import check_adapter, check_freezing, check_quantization, head_of
from hf_zero.recipes.parser import given_of, parser_for, read_yaml, refuse_less, unknown_task_message
from hf_zero.recipes.planned_run import (
    OF_MICRO_BATCHES,
    PlannedRun,
    as_trained,
    example_batch,
    optimizer_of,
)
from hf_zero.recipes.settings import Settings, parse_settings
from hf_zero.recipes.tasks import TASKS, refuse_shared_sequences
from hf_zero.trainer import ZeroArgumentsMixin
from hf_zero.trainer.early_checks import check_activations


# How many rows of a batch the tasks make of one row of data.
ROWS = dict.fromkeys(("classify", "sft", "pretrain", "kto", "grpo", "rloo"), 1)
ROWS |= dict.fromkeys(("dpo", "reward"), 2)
# Tasks whose losses are computed by TRL's head, which never holds all logits.
FUSED_HEAD = ("sft", "pretrain", "dpo", "kto", "grpo", "rloo")
GENERATING = ("grpo", "rloo")


def read_run(argv: list[str], own: type) -> tuple[Settings, Any]:
    """Reads a command line with `--config`: keys of `plan`, which are the fields of the dataclass `own`, and of the
    task of that file, which win over it."""
    given = given_of(argv, "config", "task")
    if not given["config"]:
        raise ConfigError("--config: expected a YAML file, or the name of a ready-made one")
    task = given["task"] or read_yaml(given["config"]).get("task")
    if task is None:
        raise ConfigError(
            f"--config {given['config']}: names no task; add --task with one of {', '.join(sorted(TASKS))}"
        )
    if task not in TASKS:
        raise ConfigError(unknown_task_message(str(task), TASKS))
    values, rest = parser_for("plan", "", [own]).parse_known_args(argv)
    return parse_settings(task, rest, is_here=False), own(**vars(values))


def planned(settings: Settings, config: PretrainedConfig | None = None, num_tokens: int | None = None) -> PlannedRun:
    """What a run is, told by its settings and a config, by default that of its model, whose weights are not needed.
    `num_tokens` of a row count in place of what the settings say."""
    arguments, training, task = settings.arguments, SimpleNamespace(**settings.training), settings.task
    _check(settings)
    config = config_of(arguments, resolve_config) if config is None else config
    zero = ZeroArgumentsMixin.zero_config(cast(ZeroArgumentsMixin, training))
    _check_way(settings, zero, training.gradient_checkpointing)
    model = _model(settings, config)
    takes_longest, is_one_row = settings.takes_longest and num_tokens is None, _is_one_row(training)

    def batch_of(num_rows: int, num_tokens: int) -> dict[str, Any]:
        batch: dict[str, Any] = example_batch(model, num_rows, num_tokens, zero.compute_dtype)
        batch |= _images(config, num_rows, zero.compute_dtype or torch.float32)
        if task == "reward":
            del batch["labels"]
        if has_fused_head(task, training):
            batch["fused_lm_head"] = True
        return batch

    return PlannedRun(
        name=named_model(arguments)[1],
        model=_with_head(model, settings, training, zero.compute_dtype),
        config=zero,
        num_ranks=settings.num_processes or 1,
        batch_of=batch_of,
        num_positions=positions_of(config),
        is_one_row=is_one_row,
        rows_of_one=1 if is_one_row else ROWS[task],
        make_optimizer=optimizer_of(training.optim),
        gradient_checkpointing=training.gradient_checkpointing,
        on_cpu=training.use_cpu,
        num_rows=training.per_device_train_batch_size * ROWS[task],
        num_tokens=None if takes_longest else _length(settings, config, num_tokens),
        notes=_not_counted(settings, training, config),
        forwards=forwards_of(settings),
        accumulates=training.gradient_accumulation_steps > 1,
        reads_logits=bool(training.label_smoothing_factor),
        has_8_bit_products=getattr(arguments, "load_in_8bit", False),
        check=partial(_check_way, settings),
    )


def _with_head(
    model: PreTrainedModel, settings: Settings, training: Any, compute_dtype: torch.dtype | None
) -> nn.Module:
    """Makes a model what the run trains, and gives it the head of its loss."""
    new_modules = head_of(model) if settings.task in ("classify", "reward") else ()
    made = as_trained(model, settings.arguments, compute_dtype, new_modules)
    if made is not model and training.gradient_checkpointing:
        made.enable_input_require_grads()
    if has_fused_head(settings.task, training):
        from hf_zero.trl.fused_head import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if getattr(training, "disable_dropout", False):
        from trl.trainer.utils import disable_dropout_in_model

        disable_dropout_in_model(made)
    return made


def _check_way(settings: Settings, config: ZeroConfig, gradient_checkpointing: bool) -> None:
    """Refuses settings of ZeRO as the task's trainer does."""
    names = ("offload_activations", "chunked_loss", "tiled_mlp", "sequence_parallel")
    own = {f"zero_{name}": getattr(config, name) for name in names}
    check_activations({**settings.training, **own, "gradient_checkpointing": gradient_checkpointing})
    refuse_shared_sequences(settings.task, config.sequence_parallel)
    if config.chunked_loss == "on" and settings.task == "reward":
        raise ConfigError("zero_chunked_loss: the loss of reward is of one number for each row; leave it out")


def forwards_of(settings: Settings) -> tuple[str, ...]:
    """What a run computes of each batch, in the order of TRL's trainers, but for what generates rows."""
    training, task = settings.training, settings.task
    refers = 0 if training.get("precompute_ref_log_probs") else 1
    if task in GENERATING:  # before anything else, of rows that were just generated
        return (*[REFERENCE] * (training["beta"] != 0), TRAINED)
    if task == "kto" and training["loss_type"] != "apo_zero_unpaired":  # the divergence is of answers to other prompts
        return (EVALUATED, TRAINED, *[REFERENCE] * (2 * refers))
    return (TRAINED, *[REFERENCE] * (refers if task in ("dpo", "kto") else 0))


def has_fused_head(task: str, training: Any) -> bool:
    """Whether the loss of a run is computed by TRL's head, which holds a part of the logits at a time."""
    return task in FUSED_HEAD and not training.label_smoothing_factor


def _check(settings: Settings) -> None:
    """Refuses what contradicts itself, and what is not planned."""
    arguments = settings.arguments
    if settings.task not in ROWS:
        raise ConfigError(
            f"plan: {settings.task} is not planned, for what its teacher takes is not known; its student is, by "
            f"`plan {arguments.model_name_or_path}`"
        )
    if not named_model(arguments)[1]:
        raise ConfigError("model_name_or_path: not set; name a folder, package:<name>/<folder> or a hub id")
    check_adapter(arguments)
    check_freezing(arguments, use_peft=arguments.use_peft)
    if hasattr(arguments, "load_in_4bit"):  # of language models
        check_source(arguments, use_peft=arguments.use_peft)
        check_quantization(arguments, use_peft=arguments.use_peft)
    refuse_less(SimpleNamespace(**settings.training), per_device_train_batch_size=1)
    refuse_less(settings, num_processes=1)


def _model(settings: Settings, config: PretrainedConfig) -> PreTrainedModel:
    arguments = settings.arguments
    config.use_cache = False  # as `Trainer` has it
    dtype = getattr(arguments, "dtype", "float32")
    options: dict[str, Any] = {"dtype": (config.dtype or torch.float32) if dtype == "auto" else DTYPES[dtype]}
    if getattr(arguments, "attn_implementation", None) == "eager":  # all others take what sdpa takes
        options["attn_implementation"] = "eager"
    if settings.task == "reward":
        config.num_labels = 1
    kind, text = _auto_class(settings.task, config), config.get_text_config()
    if kind is AutoModelForSequenceClassification and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # the run has its tokenizer's
    with one_line(named_model(arguments)[1], "building the model of its config"), quiet(), torch.device("meta"):
        return kind.from_config(config, **options).train()


def _auto_class(task: str, config: PretrainedConfig) -> Any:
    if task == "classify" and type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return AutoModelForImageClassification
    if task in ("classify", "reward"):
        return AutoModelForSequenceClassification
    # whether rows have images is not known, and the model of a run with images holds more
    takes_images = task == "sft" and hasattr(config, "vision_config")
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _not_counted(settings: Settings, training: Any, config: PretrainedConfig) -> list[str]:
    """Returns a line for each thing that the plan of a run leaves out."""
    notes = ["not counted: the kernels of use_liger_kernel"] if training.use_liger_kernel else []
    notes += [OF_MICRO_BATCHES] if training.gradient_accumulation_steps > 1 else []
    if _is_one_row(training) and "flash" not in (settings.arguments.attn_implementation or ""):
        notes.append("not counted: the mask that keeps packed rows apart; flash attention needs none")
    vision = getattr(config, "vision_config", None)
    if vision is not None and not isinstance(getattr(vision, "image_size", None), int):
        notes.append("not counted: images, for how many patches they have is in the rows; --dry_run counts them")
    return notes


def _images(config: PretrainedConfig, num_rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """An image of each row, where the model takes images of one size."""
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "image_size", None)
    if not isinstance(size, int):
        return {}
    shape = (num_rows, getattr(vision, "num_channels", 3), size, size)
    return {"pixel_values": torch.empty(shape, dtype=dtype, device="meta")}


def _length(settings: Settings, config: PretrainedConfig, num_tokens: int | None) -> int:
    if num_tokens is not None:
        return num_tokens
    if settings.task in GENERATING:
        raise ConfigError(
            f"plan: how long prompts are is in the rows of {settings.task}; give --num_tokens, of a prompt with its "
            f"answer, such as {512 + settings.training['max_completion_length']}"
        )
    length = settings.length
    if length is None:
        raise ConfigError("max_length: rows of any length are not planned; give --num_tokens")
    return min(length, getattr(config.get_text_config(), "max_position_embeddings", None) or length)


def _is_one_row(training: Any) -> bool:
    """Whether all rows of a batch are one behind the other."""
    packs = getattr(training, "packing", False) and training.packing_strategy != "wrapped"
    return bool(packs or getattr(training, "padding_free", False))
