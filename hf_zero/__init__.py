"""Train Hugging Face models with ZeRO: optimizer state, gradients and parameters are partitioned over the ranks.

Public names are imported on first use, so `import hf_zero` is fast.
"""

import os
import sys
from typing import TYPE_CHECKING

from hf_zero import parent  # first, because it records the launcher
from hf_zero.lazy_names import lazy_package


if TYPE_CHECKING:  # for editors and type checkers; `X as X` marks a public re-export
    from hf_zero import errors as errors
    from hf_zero import trl as trl
    from hf_zero.accelerator import ZeroAccelerator as ZeroAccelerator
    from hf_zero.activation import shard as shard
    from hf_zero.checkpoint import Snapshots as Snapshots
    from hf_zero.checkpoint import load_pretrained as load_pretrained
    from hf_zero.checkpoint import load_state as load_state
    from hf_zero.checkpoint import load_weights as load_weights
    from hf_zero.checkpoint import save_checkpoint as save_checkpoint
    from hf_zero.checkpoint import save_pretrained as save_pretrained
    from hf_zero.engine import ShardedModel as ShardedModel
    from hf_zero.engine import compile_blocks as compile_blocks
    from hf_zero.engine import gathered as gathered
    from hf_zero.engine import materialize as materialize
    from hf_zero.engine import placeholders as placeholders
    from hf_zero.optim import CombinedOptimizer as CombinedOptimizer
    from hf_zero.optim import MuonWithAdamW as MuonWithAdamW
    from hf_zero.optim import ShardedOptimizer as ShardedOptimizer
    from hf_zero.optim import ZeroGradScaler as ZeroGradScaler
    from hf_zero.trainer import ZeroArgumentsMixin as ZeroArgumentsMixin
    from hf_zero.trainer import ZeroSeq2SeqTrainer as ZeroSeq2SeqTrainer
    from hf_zero.trainer import ZeroSeq2SeqTrainingArguments as ZeroSeq2SeqTrainingArguments
    from hf_zero.trainer import ZeroTrainer as ZeroTrainer
    from hf_zero.trainer import ZeroTrainerMixin as ZeroTrainerMixin
    from hf_zero.trainer import ZeroTrainingArguments as ZeroTrainingArguments
    from hf_zero.trainer.tensor_parallel import TensorParallel as TensorParallel


parent.tell_launcher_of("hf_zero.errors")
# NCCL reads it when it starts, see [Note: one communicator] in `hf_zero.comm.distributed`
if not getattr(sys.modules.get("torch.distributed"), "is_initialized", bool)():
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

__version__ = "0.1.0"

_NAMES = {
    "accelerator": ("ZeroAccelerator",),
    "activation": ("shard",),
    "checkpoint": (
        *("Snapshots", "load_pretrained", "load_state", "load_weights"),
        *("save_checkpoint", "save_pretrained"),
    ),
    "engine": ("ShardedModel", "compile_blocks", "gathered", "materialize", "placeholders"),
    "optim": ("CombinedOptimizer", "MuonWithAdamW", "ShardedOptimizer", "ZeroGradScaler"),
    "trainer": (
        *("ZeroArgumentsMixin", "ZeroSeq2SeqTrainer", "ZeroSeq2SeqTrainingArguments"),
        *("ZeroTrainer", "ZeroTrainerMixin", "ZeroTrainingArguments"),
    ),
    "trainer.tensor_parallel": ("TensorParallel",),
}
# Subpackages that are available as attributes without a separate import.
_ROOMS = (
    *("accelerator", "activation", "checkpoint", "comm", "config", "engine"),
    *("errors", "lightning", "optim", "trainer", "trl"),
)

__all__ = sorted(name for names in _NAMES.values() for name in names)

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__, __dir__ = lazy_package(__name__, _NAMES, rooms=_ROOMS)
