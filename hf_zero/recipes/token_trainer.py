"""A trainer whose losses are means over tokens."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction
from transformers.utils import ModelOutput

from hf_zero.recipes.data.tokens import IGNORED
from hf_zero.trainer import ZeroTrainer


class TokenTrainer(ZeroTrainer):
    """A `ZeroTrainer` whose losses are means over tokens.

    That of a step is, with `average_tokens_across_devices`, the mean over all tokens that count in all its
    micro-batches on all ranks. `eval_loss` is the mean over all those of the test rows: `Trainer`'s own is a mean of
    means over batches, and depends on how large they are.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.model_accepts_loss_kwargs:  # its own loss would be the mean of one micro-batch
            self.compute_loss_func = partial(_summed_loss, label_smoothing=self.args.label_smoothing_factor)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "position_ids" in inputs:  # transformers looks for packed rows only where there is no cache
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple:
        """Gives, in place of logits, the sum of the losses of each row and the number of its tokens that count."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
            sums = [
                cross_entropy(row[:-1].float(), label[1:], ignore_index=IGNORED, reduction="sum")
                for row, label in zip(logits, labels, strict=True)
            ]
        counts = (labels[:, 1:] != IGNORED).sum(dim=1)
        return None, torch.stack([torch.stack(sums), counts.float()], dim=1), counts


def _summed_loss(
    outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    total = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return total / num_items_in_batch


def mean_token_loss(predictions: EvalPrediction) -> dict[str, float]:
    """The mean over tokens of what `TokenTrainer.prediction_step` gives, as the metric "loss"."""
    total, count = predictions.predictions.sum(axis=0, dtype="float64")
    return {"loss": float(total / max(count, 1))}
