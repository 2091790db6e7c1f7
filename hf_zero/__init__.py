"""Train Hugging Face models with ZeRO: optimizer state, gradients and parameters partitioned over the ranks."""

from importlib import import_module

from hf_zero import parent  # noqa: F401 - first of all: it notes who the launcher is
from hf_zero.activation import shard
from hf_zero.checkpoint import (
    Snapshots,
    load_foreign,
    load_pretrained,
    load_state,
    load_weights,
    save_checkpoint,
    save_pretrained,
    save_state,
)
from hf_zero.engine import ZeroEngine, compile_blocks, engine_of, gathered, materialize, placeholders
from hf_zero.optim import CombinedOptimizer, MuonWithAdamW, ShardedOptimizer, ZeroGradScaler


__version__ = "0.1.0"

# The trainer room imports transformers' Trainer, which takes seconds: only those who use it wait for it.
_TRAINER = (
    "ZeroArgumentsMixin",
    "ZeroSeq2SeqTrainer",
    "ZeroSeq2SeqTrainingArguments",
    "ZeroTrainer",
    "ZeroTrainerMixin",
    "ZeroTrainingArguments",
)

__all__ = [
    "CombinedOptimizer",
    "MuonWithAdamW",
    "ShardedOptimizer",
    "Snapshots",
    "TensorParallel",
    "ZeroEngine",
    "ZeroGradScaler",
    "compile_blocks",
    "engine_of",
    "gathered",
    "load_foreign",
    "load_pretrained",
    "load_state",
    "load_weights",
    "materialize",
    "placeholders",
    "save_checkpoint",
    "save_pretrained",
    "save_state",
    "shard",
    *_TRAINER,
]


def __getattr__(name: str):
    if name in _TRAINER:
        return getattr(import_module("hf_zero.trainer"), name)
    if name == "TensorParallel":
        return import_module("hf_zero.checkpoint.parallel").TensorParallel
    if name == "trl":
        return import_module("hf_zero.trl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
