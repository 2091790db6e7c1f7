"""Checks of optimizer and activation settings that do not import Trainer, which takes seconds."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.errors import ConfigError


Settings = Mapping[str, Any]  # fields of the training arguments, by name

# The values of `--optim` whose optimizers run on shards, see `hf_zero.optim.granularity`.
SUPPORTED_OPTIMS = frozenset(
    "adamw_torch adamw_torch_fused adamw_torch_npu_fused sgd adagrad rmsprop lion_32bit paged_lion_32bit "
    "paged_adamw_32bit rmsprop_bnb rmsprop_bnb_32bit adafactor schedule_free_adamw schedule_free_radam "
    "schedule_free_sgd adamw_torch_8bit adamw_torch_4bit adamw_bnb_8bit adamw_8bit paged_adamw_8bit lion_8bit "
    "paged_lion_8bit rmsprop_bnb_8bit ademamix ademamix_8bit".split()
)

# Keys of the checkpointing arguments that Trainer and `torch.utils.checkpoint.checkpoint` read. Only TRL's SFTTrainer
# reads `selective`.
CHECKPOINT_KEYS = (
    *("every_n_layers", "offload", "use_reentrant", "preserve_rng_state"),
    *("context_fn", "determinism_check", "debug", "early_stop"),
)


def check_activations(settings: Settings) -> None:
    """Raises [`ConfigError`] for activation settings that conflict with other settings."""
    message = next(filter(None, (check(settings) for check in ACTIVATION_CHECKS)), None)
    if message is not None:
        raise ConfigError(message)


def _activations(settings: Settings) -> str | None:
    # the new and the old name
    is_checkpointed = any(settings.get(f"{name}_checkpointing") for name in ("activation", "gradient"))
    if settings["zero_partition_activations"] and not is_checkpointed:
        return (
            "zero_partition_activations: partitions the inputs of checkpointed blocks, but gradient checkpointing is "
            "off; add --gradient_checkpointing"
        )
    for name in ("zero_offload_activations", "zero_partition_activations"):
        if settings[name] and settings["torch_compile"]:
            return f"{name}: compiled blocks keep their inputs inside their graphs; remove --torch_compile"
    if settings["zero_offload_activations"] and settings.get("activation_offloading"):
        return "activation_offloading: offloads the same tensors as zero_offload_activations; use one of them"
    if str(settings["zero_tiled_mlp"]) != "1" and settings["torch_compile"]:
        return "zero_tiled_mlp: compiled blocks keep inner activations inside their graphs; remove --torch_compile"
    return None


def _checkpointing(settings: Settings) -> str | None:
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        given = settings.get(name) or {}
        try:
            given = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            return f"{name}: {given!r} is not valid JSON ({error}); write it as '{{\"use_reentrant\": false}}'"
        if not isinstance(given, Mapping):
            return f"{name}: {given!r} is not a JSON object; write it as '{{\"use_reentrant\": false}}'"
        read = (*CHECKPOINT_KEYS, *(["selective"] if "assistant_only_loss" in settings else []))
        unknown = [key for key in given if key not in read]
        if unknown:
            return f"{name}: unknown key {unknown[0]}; expected some of {', '.join(read)}"
        if given.get("offload") and settings["zero_offload_activations"]:
            return f"{name}: offload moves the same tensors as zero_offload_activations; use one of them"
    return None


def _chunked_loss(settings: Settings) -> str | None:
    if settings["zero_chunked_loss"] != "on":
        return None
    if settings.get("label_smoothing_factor"):
        return "zero_chunked_loss: label_smoothing_factor needs all logits; use auto or off, or remove one of them"
    if settings["zero_autocast"]:
        return "zero_chunked_loss: --zero_autocast casts the head's weight at each use; use one of them"
    return None


def _sequences(settings: Settings) -> str | None:
    others = ("torch_compile", "label_smoothing_factor", "use_liger_kernel", "zero_partition_activations")
    found = next((name for name in (*others, "eval_use_gather_object") if settings.get(name)), None)
    if settings["zero_sequence_parallel"] == 1 or found is None:
        return None
    return f"zero_sequence_parallel: not supported with {found}; use one of them"


ACTIVATION_CHECKS: tuple[Callable[[Settings], str | None], ...] = (
    _activations,
    _checkpointing,
    _chunked_loss,
    _sequences,
)
