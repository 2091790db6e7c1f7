"""Train Hugging Face models with ZeRO: optimizer state, gradients and parameters partitioned over the ranks.

Importing it takes no time: each name brings what it needs when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hf_zero import parent  # noqa: F401 - first of all: it notes who the launcher is
from hf_zero.lazy_names import lazy_attribute


if TYPE_CHECKING:  # for editors and type checkers; `X as X` says that a name is meant to be imported from here
    from hf_zero import errors as errors
    from hf_zero import trl as trl
    from hf_zero.accelerator import ZeroAccelerator as ZeroAccelerator
    from hf_zero.activation import shard as shard
    from hf_zero.checkpoint import Snapshots as Snapshots
    from hf_zero.checkpoint import load_foreign as load_foreign
    from hf_zero.checkpoint import load_pretrained as load_pretrained
    from hf_zero.checkpoint import load_state as load_state
    from hf_zero.checkpoint import load_weights as load_weights
    from hf_zero.checkpoint import save_checkpoint as save_checkpoint
    from hf_zero.checkpoint import save_pretrained as save_pretrained
    from hf_zero.checkpoint import save_state as save_state
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


__version__ = "0.1.0"

_MODULES = {
    "CombinedOptimizer": "optim",
    "MuonWithAdamW": "optim",
    "ShardedModel": "engine",
    "ShardedOptimizer": "optim",
    "Snapshots": "checkpoint",
    "TensorParallel": "trainer.tensor_parallel",
    "ZeroAccelerator": "accelerator",
    "ZeroArgumentsMixin": "trainer",
    "ZeroGradScaler": "optim",
    "ZeroSeq2SeqTrainer": "trainer",
    "ZeroSeq2SeqTrainingArguments": "trainer",
    "ZeroTrainer": "trainer",
    "ZeroTrainerMixin": "trainer",
    "ZeroTrainingArguments": "trainer",
    "compile_blocks": "engine",
    "gathered": "engine",
    "load_foreign": "checkpoint",
    "load_pretrained": "checkpoint",
    "load_state": "checkpoint",
    "load_weights": "checkpoint",
    "materialize": "engine",
    "placeholders": "engine",
    "save_checkpoint": "checkpoint",
    "save_pretrained": "checkpoint",
    "save_state": "checkpoint",
    "shard": "activation",
}
# What can be reached as an attribute without an import of its own.
_ROOMS = (
    "accelerator",
    "activation",
    "checkpoint",
    "comm",
    "config",
    "engine",
    "errors",
    "lightning",
    "optim",
    "trainer",
    "trl",
)

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # a type checker that saw it would let every name pass

    def __getattr__(name: str):
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        return lazy_attribute(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
