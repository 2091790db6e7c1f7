"""Which losses of a trainer are computed without all logits at once: those of whose forward nothing else is read."""

from collections.abc import Callable

from transformers import Trainer

from hf_zero.activation import chunked_loss_of
from hf_zero.compat import check_overrides
from hf_zero.errors import ConfigError
from hf_zero.trainer.trainer_base import ZeroTrainerBase


OVERRIDES = ("compute_loss", "prediction_step")


class LossMixin(ZeroTrainerBase):
    """The part of `ZeroTrainerMixin` that lets the model compute its loss without its logits, see `ChunkedLoss`."""

    _drops_logits = False  # an evaluation step is under way of which only the loss is wanted

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """Computes the loss as Trainer does. The logits that the caller does not see may be left out."""
        is_last = type(self).compute_loss is LossMixin.compute_loss  # else who calls this may read the outputs
        drops_logits = _computes_loss(type(self)) is Trainer and (
            not return_outputs or (self._drops_logits and is_last)
        )
        chunked = chunked_loss_of(self.model) if drops_logits else None
        if chunked is None:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        with chunked.active(True):
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **kwargs):
        """Evaluates a batch as Trainer does."""
        self._drops_logits = bool(prediction_loss_only)
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **kwargs)
        finally:
            self._drops_logits = False


check_overrides(LossMixin, Trainer, OVERRIDES)


def refuse_own_loss(cls: type, args, compute_loss_func: Callable | None = None) -> None:
    """Refuses losses without logits where a class computes its loss by a method of its own, or a function does."""
    if args.zero_chunked_loss == "on" and compute_loss_func is not None:
        raise ConfigError(
            "zero_chunked_loss: compute_loss_func computes the loss from all logits; use auto, or off, or leave "
            "compute_loss_func out"
        )
    if args.zero_chunked_loss == "on" and has_own_loss(cls):
        theirs = _computes_loss(cls)
        raise ConfigError(
            f"zero_chunked_loss: {theirs.__module__}.{theirs.__name__} computes its loss by a method of its own, "
            "which may read logits (TRL's trainers compute it without all of them by themselves); use auto, or off"
        )


def has_own_loss(cls: type) -> bool:
    """Whether a trainer computes its loss by a method of its own, which may read logits: it gets them all."""
    return _computes_loss(cls) is not Trainer


def _computes_loss(cls: type) -> type:
    """Returns the class whose `compute_loss` stands behind this mixin's."""
    bases = cls.__mro__[cls.__mro__.index(LossMixin) + 1 :]
    return next(base for base in bases if "compute_loss" in vars(base))
