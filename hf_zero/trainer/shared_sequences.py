"""Training on sequences that several ranks share: what Trainer counts by ranks, it counts once for each group."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from transformers import Trainer

from hf_zero.activation import sequence_parallel_of
from hf_zero.compat import check_overrides
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.losses import LossMixin
from hf_zero.trainer.trainer_base import ZeroTrainerBase


OVERRIDES = ("get_total_train_batch_size", "floating_point_ops", "_track_num_input_tokens", "prediction_step")


class SharedSequencesMixin(ZeroTrainerBase):
    """The part of `ZeroTrainerMixin` that knows how many ranks share each batch.

    Attributes:
        summed_losses (`tuple[type, ...]`): the classes whose `compute_loss` is right for parts of sequences.
    """

    summed_losses: tuple[type, ...] = (LossMixin, Trainer)

    def _refuse_loss(self, args: ZeroArgumentsMixin, compute_loss_func: Callable | None) -> None:
        """Refuses a loss that would be computed from whole logits."""
        if args.zero_sequence_parallel == 1:
            return
        if compute_loss_func is not None:
            raise ConfigError(
                "zero_sequence_parallel: compute_loss_func computes its loss from whole logits; leave one of them out"
            )
        theirs = [cls for cls in type(self).__mro__ if "compute_loss" in vars(cls) and cls not in self.summed_losses]
        if theirs:
            raise ConfigError(
                f"zero_sequence_parallel: {theirs[0].__module__}.{theirs[0].__name__} computes its loss by a method "
                "of its own, which would see a part of the logits; leave zero_sequence_parallel out, or compute_loss"
            )

    def get_total_train_batch_size(self, args, **kwargs) -> int:
        """Counts the rows of a step as Trainer does, those that ranks share once."""
        return super().get_total_train_batch_size(args, **kwargs) // self.args.zero_sequence_parallel

    def floating_point_ops(self, inputs, **kwargs) -> int:
        """Estimates this rank's operations as Trainer does; ranks that share sequences share them."""
        return super().floating_point_ops(inputs, **kwargs) // self.args.zero_sequence_parallel

    def _track_num_input_tokens(self, inputs, **kwargs) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs, **kwargs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.args.zero_sequence_parallel

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **kwargs) -> Any:
        """Predicts as Trainer does. For metrics that need logits every rank computes whole sequences."""
        engine = engine_of(self.model)  # None before the model is prepared: every rank then has whole sequences
        sequences = None if engine is None else sequence_parallel_of(engine)
        with nullcontext() if sequences is None or prediction_loss_only else sequences.whole():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **kwargs)


check_overrides(SharedSequencesMixin, Trainer, OVERRIDES)
