"""Names and values of earlier versions, each with a replacement. They are rejected with a message that names it."""

from collections.abc import Iterable

from hf_zero.errors import ConfigError


# Flags, YAML keys, tasks, and settings of `ZeroConfig` (as flags: `zero_...`); `name=value`: only that value.
REMOVED: dict[str, str] = {
    "zero_save_fallback": "if the disk is full, a save ends the run; free space and use resume_from_checkpoint",
    "orpo": "use dpo, which has a reference model, or trl.experimental.orpo without ZeRO",
    "simpo": "use dpo, which has a reference model, or trl.experimental.cpo without ZeRO",
    "memory": "it is a flag of hf-zero plan only: --memory GIB",
    **dict.fromkeys(
        ("lm_eval_tasks", "lm_eval_limit", "lm_eval_num_fewshot", "lm_eval_apply_chat_template"),
        "run lm_eval on the saved model: lm_eval --model hf --model_args pretrained=FOLDER --tasks ...",
    ),
    "zero_delayed_update": "use zero_offload alone; without gradient clipping, its updates overlap with the backward",
    "zero_reduce_dtype=int4": "use int8",
    "zero_register_buffers": "delete it: torch allocates all buffers",
    "zero_secondary_shard": "use zero_shard_size auto, which gathers within a host",
    "zero_separate_reductions": "delete it: reductions use the same communicator as gathers",
}


def removed_hint(name: str) -> str | None:
    """Returns the hint for a removed name or `name=value`, or `None` if it was not removed."""
    name = name.lstrip("-").replace("-", "_")
    return f"it was removed; {REMOVED[name]}" if name in REMOVED else None


def refuse_removed(names: Iterable[str], prefix: str = "") -> None:
    """Raises [`ConfigError`] if one of the names, prefixed with `prefix`, was removed."""
    for name in names:
        if (hint := removed_hint(prefix + name)) is not None:
            raise ConfigError(f"{name}: {hint}")
