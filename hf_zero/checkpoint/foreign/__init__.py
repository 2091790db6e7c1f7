"""Checkpoints of other programs: DeepSpeed, torch's distributed checkpoints, FSDP and plain Trainer runs."""

from hf_zero.checkpoint.foreign.reading import (
    Carried,
    ForeignFormat,
    carried,
    detect,
    load_foreign,
    load_foreign_state,
    load_foreign_weights,
)


__all__ = [
    "Carried",
    "ForeignFormat",
    "carried",
    "detect",
    "load_foreign",
    "load_foreign_state",
    "load_foreign_weights",
]
