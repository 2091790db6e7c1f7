"""ZeRO inside `transformers.Trainer`: the trainers and their arguments.

Submodules are imported on first access: importing Trainer takes seconds, and parsing the flags does not need it.
"""

from typing import TYPE_CHECKING

from hf_zero.lazy_names import lazy_package


if TYPE_CHECKING:  # for editors and type checkers, as in `hf_zero`
    from hf_zero.trainer.arguments import ZeroArgumentsMixin as ZeroArgumentsMixin
    from hf_zero.trainer.trainer import ZeroSeq2SeqTrainer as ZeroSeq2SeqTrainer
    from hf_zero.trainer.trainer import ZeroTrainer as ZeroTrainer
    from hf_zero.trainer.trainer import ZeroTrainerMixin as ZeroTrainerMixin
    from hf_zero.trainer.training_arguments import ZeroSeq2SeqTrainingArguments as ZeroSeq2SeqTrainingArguments
    from hf_zero.trainer.training_arguments import ZeroTrainingArguments as ZeroTrainingArguments


_NAMES = {
    "arguments": ("ZeroArgumentsMixin",),
    "trainer": ("ZeroSeq2SeqTrainer", "ZeroTrainer", "ZeroTrainerMixin"),
    "training_arguments": ("ZeroSeq2SeqTrainingArguments", "ZeroTrainingArguments"),
}

__all__ = sorted(name for names in _NAMES.values() for name in names)

if not TYPE_CHECKING:  # as in `hf_zero`
    __getattr__, __dir__ = lazy_package(__name__, _NAMES)
