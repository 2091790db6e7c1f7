"""Losses that can be computed from a part of the logits: the chunked loss and sequence parallelism."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)


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
