"""Names and values that earlier versions had, each with what to use instead. They are rejected with this line."""

from collections.abc import Iterable

from hf_zero.errors import ConfigError


# Flags, YAML keys, tasks and settings of `ZeroConfig` (as flags: `zero_...`); `name=value` where only a value went.
REMOVED: dict[str, str] = {
    "zero_save_fallback": "a save that finds no room ends the run; free space and go on with resume_from_checkpoint",
    "orpo": "use dpo, which has a reference model, or trl.experimental.orpo without ZeRO",
    "simpo": "use dpo, which has a reference model, or trl.experimental.cpo without ZeRO",
    "memory": "it is a key of hf-zero plan, on the command line: --memory GIB",
    **dict.fromkeys(
        ("lm_eval_tasks", "lm_eval_limit", "lm_eval_num_fewshot", "lm_eval_apply_chat_template"),
        "run lm_eval on the folder that the run saves: lm_eval --model hf --model_args pretrained=FOLDER --tasks ...",
    ),
    "zero_delayed_update": "use zero_offload alone; without clipping its updates run beside the backward",
    "zero_reduce_dtype=int4": "use int8",
    "zero_register_buffers": "leave it out: torch allocates all buffers",
    "zero_secondary_shard": "use zero_shard_size auto, whose gathers stay within a host",
    "zero_separate_reductions": "leave it out: reductions go through the communicator of gathers",
}


def removed_hint(name: str) -> str | None:
    """Returns what to use instead of a removed name, or `name=value`; `None` for others."""
    name = name.lstrip("-").replace("-", "_")
    return f"it was removed; {REMOVED[name]}" if name in REMOVED else None


def refuse_removed(names: Iterable[str], prefix: str = "") -> None:
    """Raises [`ConfigError`] if one of the names, with `prefix` before it, was removed."""
    for name in names:
        if (hint := removed_hint(prefix + name)) is not None:
            raise ConfigError(f"{name}: {hint}")
