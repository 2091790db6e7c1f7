"""Losses that are computed from a part of the logits: the chunked loss and sequence parallelism."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from transformers import Trainer

from hf_zero.activation import chunked_loss_of, sequence_parallel_of
from hf_zero.compat import replaced
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)


class Losses:
    """Decides for one trainer which steps need only the loss, so that the model may compute it without all logits."""

    def __init__(self, trainer: "ZeroTrainerMixin"):
        self._trainer = trainer
        self._predicts_loss_only = False

    @contextmanager
    def predicting(self, loss_only: bool) -> Iterator[None]:
        """Context of a prediction step. If logits are needed, every rank computes full sequences."""
        engine = engine_of(self._trainer.model)  # None before the model is prepared: sequences are not split yet
        sequences = None if engine is None else sequence_parallel_of(engine)
        with replaced(self, _predicts_loss_only=loss_only):
            with nullcontext() if sequences is None or loss_only else replaced(sequences, is_active=False):
                yield

    def computing(self, returns_outputs: bool, is_last: bool) -> AbstractContextManager:
        """Returns the context of `compute_loss`: enables the chunked loss if nothing reads the logits. With `is_last`,
        the trainer's own method has the last word on the outputs."""
        is_read = returns_outputs and not (self._predicts_loss_only and is_last)
        chunked = chunked_loss_of(self._trainer.model)
        is_own = type(self._trainer).behind("compute_loss") is not Trainer  # an override may read logits
        return nullcontext() if is_read or is_own or chunked is None else replaced(chunked, is_active=True)


def refuse_loss(cls: type["ZeroTrainerMixin"], args: ZeroArgumentsMixin, compute_loss_func: Callable | None) -> None:
    """Raises [`ConfigError`] for a loss that needs logits that are not computed on this rank."""
    is_asked = args.zero_chunked_loss == "auto" and args.label_smoothing_factor and compute_loss_func is None
    if is_asked and args.process_index == 0:
        logger.warning("chunked_loss: label smoothing computes all logits at once")
    if args.zero_chunked_loss == "on" and compute_loss_func is not None:
        raise ConfigError(
            "zero_chunked_loss: compute_loss_func computes the loss from all logits; use auto or off, or remove "
            "compute_loss_func"
        )
    if args.zero_chunked_loss == "on" and not may_drop_logits(cls):
        raise ConfigError(
            f"zero_chunked_loss: {_full_name(cls.behind('compute_loss'))} overrides compute_loss, which may read "
            "logits; use auto or off"
        )
    if args.zero_sequence_parallel > 1 and compute_loss_func is not None:
        raise ConfigError(
            "zero_sequence_parallel: compute_loss_func computes the loss from all logits; use one of them"
        )
    from hf_zero.trainer.trainer import ZeroTrainerMixin  # circular import

    known = (ZeroTrainerMixin, *cls.summed_losses)
    theirs = [base for base in cls.__mro__ if "compute_loss" in vars(base) and base not in known]
    if args.zero_sequence_parallel > 1 and theirs:
        raise ConfigError(
            f"zero_sequence_parallel: {_full_name(theirs[0])} overrides compute_loss, which would receive only a part "
            "of the logits; remove zero_sequence_parallel or compute_loss"
        )


def may_drop_logits(cls: type["ZeroTrainerMixin"]) -> bool:
    """Returns whether a trainer's loss can be computed without all logits."""
    return cls.behind("compute_loss") in cls.chunked_losses


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
