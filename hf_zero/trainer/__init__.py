"""ZeRO inside `transformers.Trainer`: the trainers and their arguments.

Each name brings its module when it is first asked for: Trainer takes seconds to import, and flags are read without it.
"""

from typing import TYPE_CHECKING

from hf_zero.lazy_names import lazy_attribute


if TYPE_CHECKING:  # for editors and type checkers, as in `hf_zero`
    from hf_zero.trainer.arguments import ZeroArgumentsMixin as ZeroArgumentsMixin
    from hf_zero.trainer.trainer import ZeroSeq2SeqTrainer as ZeroSeq2SeqTrainer
    from hf_zero.trainer.trainer import ZeroTrainer as ZeroTrainer
    from hf_zero.trainer.trainer import ZeroTrainerMixin as ZeroTrainerMixin
    from hf_zero.trainer.training_arguments import ZeroSeq2SeqTrainingArguments as ZeroSeq2SeqTrainingArguments
    from hf_zero.trainer.training_arguments import ZeroTrainingArguments as ZeroTrainingArguments


_MODULES = {
    "ZeroArgumentsMixin": "arguments",
    "ZeroSeq2SeqTrainer": "trainer",
    "ZeroSeq2SeqTrainingArguments": "training_arguments",
    "ZeroTrainer": "trainer",
    "ZeroTrainerMixin": "trainer",
    "ZeroTrainingArguments": "training_arguments",
}

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # as in `hf_zero`

    def __getattr__(name: str):
        return lazy_attribute(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
