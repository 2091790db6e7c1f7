"""Losses of a part of the logits: without all of them at once, and on sequences that several ranks share. What Trainer
counts by ranks is then counted once for each group of them."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from hf_zero.activation import chunked_loss_of
from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin

logger = logging.getLogger(__name__)


def refuse_loss(cls: type["ZeroTrainerMixin"], args: ZeroArgumentsMixin, compute_loss_func: Callable | None) -> None:
    """Raises [`ConfigError`] for a loss that would be computed from logits that are not there."""
    is_asked = args.zero_chunked_loss == "auto" and args.label_smoothing_factor and compute_loss_func is None
    if is_asked and args.process_index == 0:
        logger.warning("chunked_loss: label smoothing computes all logits at once")
    if args.zero_chunked_loss == "on" and compute_loss_func is not None:
        raise ConfigError(
            "zero_chunked_loss: compute_loss_func computes the loss from all logits; use auto, or off, or leave "
            "compute_loss_func out"
        )
    if args.zero_chunked_loss == "on" and not may_drop_logits(cls):
        raise ConfigError(
            f"zero_chunked_loss: {_full_name(cls.behind('compute_loss'))} computes its loss by a method of its own, "
            "which may read logits; use auto, or off"
        )
    if args.zero_sequence_parallel > 1 and compute_loss_func is not None:
        raise ConfigError(
            "zero_sequence_parallel: compute_loss_func computes its loss from whole logits; leave one of them out"
        )
    from hf_zero.trainer.trainer import ZeroTrainerMixin  # which imports this module

    known = (ZeroTrainerMixin, *cls.summed_losses)
    theirs = [base for base in cls.__mro__ if "compute_loss" in vars(base) and base not in known]
    if args.zero_sequence_parallel > 1 and theirs:
        raise ConfigError(
            f"zero_sequence_parallel: {_full_name(theirs[0])} computes its loss by a method of its own, which "
            "would see a part of the logits; leave zero_sequence_parallel out, or compute_loss"
        )


def without_logits(trainer: "ZeroTrainerMixin") -> AbstractContextManager:
    """Lets the model compute a loss, whose logits nobody else reads, without all of its logits where it can."""
    chunked = chunked_loss_of(trainer.model)
    is_own = type(trainer).behind("compute_loss") is not Trainer  # it may read logits
    return nullcontext() if chunked is None or is_own else chunked.active(True)


def dealt_to_groups(sampler: Sampler | None, num_sharing: int) -> Sampler | None:
    """Returns a sampler for ranks of which so many share batches. One that deals rows out to ranks itself deals them
    to the groups."""
    if num_sharing == 1 or not isinstance(sampler, BatchRebalanceSampler):
        return sampler
    return BatchRebalanceSampler(
        sampler.lengths,
        sampler.effective_batch_size // num_sharing,
        sampler.dp_size // num_sharing,
        sampler.grad_accum,
        seed=sampler.seed,
        rank=sampler.rank // num_sharing,
        drop_last=sampler.drop_last,
    )


def may_drop_logits(cls: type["ZeroTrainerMixin"]) -> bool:
    """Whether the loss of a trainer is computed without all logits where its model can do that."""
    return cls.behind("compute_loss") in cls.chunked_losses


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
