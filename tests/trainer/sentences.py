"""The trainer of sentence-transformers with ZeRO, in a module of its own: the package takes seconds to import."""

from dataclasses import dataclass

from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

from hf_zero import ZeroArgumentsMixin, ZeroTrainerMixin


@dataclass
class ZeroSentenceArguments(ZeroArgumentsMixin, SentenceTransformerTrainingArguments):
    pass


class ZeroSentenceTrainer(ZeroTrainerMixin, SentenceTransformerTrainer):
    pass
