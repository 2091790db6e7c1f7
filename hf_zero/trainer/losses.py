"""Losses of a part of the logits: without all of them at once, and on sequences that several ranks share. What Trainer
counts by ranks is then counted once for each group of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import _is_peft_model
from transformers.trainer_pt_utils import BatchRebalanceSampler, LabelSmoother

from hf_zero.activation import chunked_loss_of, sequence_parallel_of
from hf_zero.activation.chunked_loss import ChunkedLoss
from hf_zero.activation.deferred_logits import DeferredLogits
from hf_zero.compat import check_overrides
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.trainer_base import ZeroTrainerBase


OVERRIDES = (
    *("compute_loss", "prediction_step", "get_total_train_batch_size", "floating_point_ops"),
    *("_track_num_input_tokens", "_get_train_sampler"),
)


class LossMixin(ZeroTrainerBase):
    """The part of `ZeroTrainerMixin` that lets the model compute its loss without its logits, see `ChunkedLoss`, and
    that knows how many ranks share each batch.

    Attributes:
        summed_losses (`tuple[type, ...]`): the classes whose `compute_loss` is a sum over tokens, and so is right for
            parts of sequences, and by Trainer's label smoother where that is asked for.
        chunked_losses (`tuple[type, ...]`): those whose `compute_loss` needs no logits where none are computed.
    """

    summed_losses: tuple[type, ...] = (Trainer,)
    chunked_losses: tuple[type, ...] = (Trainer,)
    _drops_logits = False  # an evaluation step is under way of which only the loss is wanted

    def _refuse_loss(self, args: ZeroArgumentsMixin, compute_loss_func: Callable | None) -> None:
        """Refuses a loss that would be computed from logits that are not there."""
        cls = type(self)
        if args.zero_chunked_loss == "on" and compute_loss_func is not None:
            raise ConfigError(
                "zero_chunked_loss: compute_loss_func computes the loss from all logits; use auto, or off, or leave "
                "compute_loss_func out"
            )
        if args.zero_chunked_loss == "on" and not may_drop_logits(cls):
            raise ConfigError(
                f"zero_chunked_loss: {_full_name(_computes_loss(cls))} computes its loss by a method of its own, "
                "which may read logits; use auto, or off"
            )
        if args.zero_sequence_parallel > 1 and compute_loss_func is not None:
            raise ConfigError(
                "zero_sequence_parallel: compute_loss_func computes its loss from whole logits; leave one of them out"
            )
        known = (LossMixin, *self.summed_losses)
        theirs = [base for base in cls.__mro__ if "compute_loss" in vars(base) and base not in known]
        if args.zero_sequence_parallel > 1 and theirs:
            raise ConfigError(
                f"zero_sequence_parallel: {_full_name(theirs[0])} computes its loss by a method of its own, which "
                "would see a part of the logits; leave zero_sequence_parallel out, or compute_loss"
            )

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """Computes the loss as Trainer does. The logits that the caller does not see may be left out."""
        is_last = type(self).compute_loss is LossMixin.compute_loss  # else who calls this may read the outputs
        is_own = has_own_loss(type(self))
        is_unseen = not return_outputs or (self._drops_logits and is_last)
        chunked = chunked_loss_of(self.model)
        labels = inputs.get("labels") if self._smooths_labels() else None
        if chunked is not None and labels is not None and is_unseen:
            way = self._smoothing(chunked, labels, shifts=is_own or _is_causal(self.accelerator.unwrap_model(model)))
        else:
            way = chunked.active(True) if chunked is not None and is_unseen and not is_own else nullcontext()
        if return_outputs:  # else left out, as Trainer does: a class behind the mixin may not know it
            kwargs["return_outputs"] = return_outputs
        with way:
            return super().compute_loss(model, inputs, **kwargs)

    def _smooths_labels(self) -> bool:
        """Whether Trainer's `LabelSmoother` computes the loss, from the logits of a forward without labels."""
        is_known = _computes_loss(type(self)) in self.summed_losses
        return is_known and self.label_smoother is not None and self.compute_loss_func is None

    @contextmanager
    def _smoothing(self, chunked: ChunkedLoss, labels: Tensor, *, shifts: bool) -> Iterator[None]:
        smoother = ChunkedSmoother(self.label_smoother, labels, shifts)
        with mock.patch.object(self, "label_smoother", smoother), chunked.reading(smoother.read):
            yield

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **kwargs) -> Any:
        """Predicts as Trainer does. For metrics that need logits every rank computes whole sequences."""
        engine = engine_of(self.model)  # None before the model is prepared: every rank then has whole sequences
        sequences = None if engine is None else sequence_parallel_of(engine)
        whole = nullcontext() if sequences is None or prediction_loss_only else sequences.whole()
        with mock.patch.object(self, "_drops_logits", bool(prediction_loss_only)), whole:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs)

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

    def _get_train_sampler(self, *args, **kwargs) -> Sampler | None:
        """Makes the sampler as Trainer does. One that deals rows out to ranks itself deals them to groups of those
        that share batches."""
        sampler, num_sharing = super()._get_train_sampler(*args, **kwargs), self.accelerator.num_sharing
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


check_overrides(LossMixin, Trainer, OVERRIDES)


class ChunkedSmoother:
    """Stands in place of Trainer's `LabelSmoother` for one loss, whose sum over the tokens is computed in the forward.

    Args:
        original (`LabelSmoother`): takes logits that were computed all the same.
        labels (`Tensor`): int64 `(batch, length)`.
        shifts (`bool`): whether a position is to tell the next label, and not its own.
    """

    def __init__(self, original: LabelSmoother, labels: Tensor, shifts: bool):
        self._original, self._labels, self._shifts = original, labels, shifts

    def read(self, logits: DeferredLogits, _args: tuple, _kwargs: dict) -> Tensor:
        """Returns the sum of the losses."""
        rows, labels = (logits[..., :-1, :], self._labels[..., 1:]) if self._shifts else (logits, self._labels)
        return torch.nn.functional.cross_entropy(
            rows.reshape(-1, rows.shape[-1]).float(),
            labels.reshape(-1).to(rows.device),
            ignore_index=self._original.ignore_index,
            reduction="sum",
            label_smoothing=self._original.epsilon,
        )

    def __call__(self, outputs, labels, shift_labels=False, num_items_in_batch=None) -> Tensor:
        total = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if total.dim():  # logits: they were not deferred
            return self._original(outputs, labels, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch)
        assert shift_labels == self._shifts
        if num_items_in_batch is None:
            num_items_in_batch = (labels[..., 1:] if shift_labels else labels).ne(self._original.ignore_index).sum()
        return total / torch.as_tensor(num_items_in_batch, device=total.device)


def _is_causal(model: nn.Module) -> bool:
    """Whether Trainer's `LabelSmoother` shifts the labels of this model, as `Trainer.compute_loss` says it."""
    if _is_peft_model(model):  # with learned prefixes that is what the causal model holds
        model = model.base_model.model  # type: ignore[assignment, union-attr]
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def has_own_loss(cls: type) -> bool:
    """Whether a trainer computes its loss by a method of its own, which may read logits: it gets them all."""
    return _computes_loss(cls) is not Trainer


def may_drop_logits(cls: type[LossMixin]) -> bool:
    """Whether the loss of a trainer is computed without all logits where its model can do that."""
    return _computes_loss(cls) in cls.chunked_losses


def _computes_loss(cls: type) -> type:
    """Returns the class whose `compute_loss` stands behind this mixin's."""
    bases = cls.__mro__[cls.__mro__.index(LossMixin) + 1 :]
    return next(base for base in bases if "compute_loss" in vars(base))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
