"""Losses of a part of the logits: without all of them at once, and on sequences that several ranks share. What Trainer
counts by ranks is then counted once for each group of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import _is_peft_model
from transformers.trainer_pt_utils import BatchRebalanceSampler, LabelSmoother

from hf_zero.activation import chunked_loss_of
from hf_zero.activation.deferred_logits import DeferredLogits
from hf_zero.compat import replaced
from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import ZeroArgumentsMixin


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin


def refuse_loss(cls: type["ZeroTrainerMixin"], args: ZeroArgumentsMixin, compute_loss_func: Callable | None) -> None:
    """Raises [`ConfigError`] for a loss that would be computed from logits that are not there."""
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


@contextmanager
def without_logits(trainer: "ZeroTrainerMixin", inputs: Mapping[str, Any]) -> Iterator[None]:
    """Lets the model compute a loss, whose logits nobody else reads, without all of its logits where it can."""
    chunked, is_own = chunked_loss_of(trainer.model), type(trainer).behind("compute_loss") is not Trainer
    labels = inputs.get("labels") if _smooths_labels(trainer) else None
    if chunked is None or (labels is None and is_own):
        yield
    elif labels is None:
        with chunked.active(True):
            yield
    else:
        shifts = is_own or _is_causal(trainer.accelerator.unwrap_model(trainer.model))
        smoother = ChunkedSmoother(trainer.label_smoother, labels, shifts)
        with replaced(trainer, label_smoother=smoother), chunked.reading(smoother.read):
            yield


def _smooths_labels(trainer: "ZeroTrainerMixin") -> bool:
    """Whether Trainer's `LabelSmoother` computes the loss, from the logits of a forward without labels."""
    is_known = type(trainer).behind("compute_loss") in trainer.summed_losses
    return is_known and trainer.label_smoother is not None and trainer.compute_loss_func is None


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


def may_drop_logits(cls: type["ZeroTrainerMixin"]) -> bool:
    """Whether the loss of a trainer is computed without all logits where its model can do that."""
    return cls.behind("compute_loss") in cls.chunked_losses


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
