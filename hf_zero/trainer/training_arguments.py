"""`TrainingArguments` and `Seq2SeqTrainingArguments` with ZeRO settings."""

from dataclasses import dataclass

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from hf_zero.compat import check_overrides
from hf_zero.trainer.arguments import ZeroArgumentsMixin


check_overrides(ZeroArgumentsMixin, TrainingArguments, ("place_model_on_device",))


@dataclass
class ZeroTrainingArguments(ZeroArgumentsMixin, TrainingArguments):
    """`transformers.TrainingArguments` with the settings of `ZeroArgumentsMixin`."""


@dataclass
class ZeroSeq2SeqTrainingArguments(ZeroArgumentsMixin, Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with the settings of `ZeroArgumentsMixin`."""
