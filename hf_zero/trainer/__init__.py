"""ZeRO inside `transformers.Trainer`: the trainers and their arguments."""

from hf_zero.trainer.arguments import ZeroArgumentsMixin, ZeroSeq2SeqTrainingArguments, ZeroTrainingArguments
from hf_zero.trainer.trainer import ZeroSeq2SeqTrainer, ZeroTrainer, ZeroTrainerMixin


__all__ = [
    "ZeroArgumentsMixin",
    "ZeroSeq2SeqTrainer",
    "ZeroSeq2SeqTrainingArguments",
    "ZeroTrainer",
    "ZeroTrainerMixin",
    "ZeroTrainingArguments",
]
