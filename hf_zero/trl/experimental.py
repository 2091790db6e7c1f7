"""Trainers of `trl.experimental` with ZeRO, each with the config that it takes.

They have a module of their own, for TRL may move what is experimental in any release, and warns when it is imported.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from hf_zero.activation import chunked_loss_of
from hf_zero.activation.deferred_logits import DeferredLogits, ScoredLogits
from hf_zero.compat import check_overrides
from hf_zero.errors import UnsupportedError
from hf_zero.trl.mixin import ZeroTrlArgumentsMixin, ZeroTrlTrainerMixin


# Methods that see the logits of both answers.
_SEE_LOGITS = ("concatenated_forward", "get_batch_logps", "get_batch_loss_metrics")


class ZeroPairsMixin(ZeroTrlTrainerMixin):
    """The part that lets the policy compute the log-probabilities of both answers, and the mean of its logits, without
    all of them. Labels are tokens of the rows themselves, so the loss of each token that follows is all there is to
    know. A class that overrides a method which sees the logits gets them."""

    def concatenated_forward(self, model, batch):
        """Computes as TRL does, from what is left of the logits where they are not computed."""
        chunked, reason = chunked_loss_of(self.model), self._reads_logits()
        if chunked is not None and not chunked.is_auto and reason:
            raise UnsupportedError(f"chunked_loss: {reason}, which reads logits; leave zero_chunked_loss out")
        if chunked is None or reason:
            return super().concatenated_forward(model, batch)

        def read(logits: DeferredLogits, args: tuple, kwargs: dict) -> ScoredLogits | None:
            tokens = kwargs.get("input_ids", args[0] if args else None)
            if tokens is None or tokens.shape != logits.shape[:-1]:
                return None
            return chunked.scores_of(logits, tokens.roll(-1, dims=1))

        with chunked.reading(read):
            return super().concatenated_forward(model, batch)

    def _reads_logits(self) -> str:
        """Returns what reads the logits; empty where nothing does."""
        for base in type(self).__mro__[: type(self).__mro__.index(ZeroPairsMixin)]:
            for name in _SEE_LOGITS:
                if name in vars(base):
                    return f"{base.__name__}.{name} is a method of your own"
        return "the model is an encoder-decoder" if self.is_encoder_decoder else ""

    @classmethod  # which may be called on the class, as TRL's static one
    def get_batch_logps(cls, logits, labels, average_log_prob=False, is_encoder_decoder=False) -> Tensor:
        """Sums the log-probabilities of the labels as TRL does, or averages them."""
        if not isinstance(logits, ScoredLogits):
            return super().get_batch_logps(logits, labels, average_log_prob, is_encoder_decoder)
        labels = labels[:, 1:]
        rows = logits[:, :-1].reshape(-1, logits.shape[-1])
        losses = F.cross_entropy(rows, labels.reshape(-1), reduction="none").view(labels.shape)
        sums = -losses.sum(-1)
        return sums / (labels != -100).sum(-1) if average_log_prob else sums


@dataclass
class ZeroCPOConfig(ZeroTrlArgumentsMixin, CPOConfig):
    """`trl.experimental.cpo.CPOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroCPOTrainer(ZeroPairsMixin, CPOTrainer):
    """`trl.experimental.cpo.CPOTrainer` with ZeRO. Takes `ZeroCPOConfig`, and what `CPOTrainer` takes."""

    config_class = ZeroCPOConfig
    chunked_losses = (*ZeroTrlTrainerMixin.chunked_losses, CPOTrainer)


@dataclass
class ZeroORPOConfig(ZeroTrlArgumentsMixin, ORPOConfig):
    """`trl.experimental.orpo.ORPOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroORPOTrainer(ZeroPairsMixin, ORPOTrainer):
    """`trl.experimental.orpo.ORPOTrainer` with ZeRO. Takes `ZeroORPOConfig`, and what `ORPOTrainer` takes."""

    config_class = ZeroORPOConfig
    chunked_losses = (*ZeroTrlTrainerMixin.chunked_losses, ORPOTrainer)


# `get_batch_logps` is static there; under another name it would be given `ScoredLogits`, which refuse what it does.
for _base in (CPOTrainer, ORPOTrainer):
    check_overrides(ZeroPairsMixin, _base, ("concatenated_forward",))
