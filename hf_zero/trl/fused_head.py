"""TRL's fused head for log-probabilities, computed with the chunked loss of a sharded model.

TRL's own function holds the logits of up to 4,096 tokens and 32,768 words, with several copies on a device without its
kernels, and the gradient of the full head in fp32.
"""

from typing import Any

import torch
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head as add_fused_lm_head  # re-exported, with the replaced function

from hf_zero.activation.chunked_loss import of_weight
from hf_zero.activation.vocabulary_ranges import STATISTICS, Steps


_OUTPUTS = ("log_probs", *STATISTICS)


class _Function:
    """Replaces TRL's autograd function, which `add_fused_lm_head` looks up in `trl.trainer.utils`."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = STATISTICS,
        *others: Any,
    ) -> tuple[Tensor | None, ...]:
        chunked = of_weight(weight)
        is_ours = not others and set(outputs) <= set(_OUTPUTS)
        # "auto" prefers TRL's kernels where the device has them
        if (
            chunked is None
            or not is_ours
            or (chunked.is_auto and utils._use_triton(hidden.device))
            or not chunked.takes(weight, hidden)
        ):
            given = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs, *others)
            return ChunkedLogProbFunction.apply(hidden, weight, bias, targets, *given)
        steps = _steps(logit_scale, final_logit_softcapping, temperature)
        loss, *statistics = chunked.statistics_of(hidden, targets, steps, outputs)
        return -loss, *statistics


def _steps(scale: float, softcap: float | None, temperature: float) -> Steps:
    """Returns TRL's elementwise operations on the logits, in fp32."""
    changes: list = []
    if scale != 1.0:
        changes.append(lambda logits: logits * scale)
    if softcap is not None:
        changes.append(lambda logits: softcap * torch.tanh(logits / softcap))
    if temperature != 1.0:
        changes.append(lambda logits: logits / temperature)
    return (Tensor.float, *changes) if changes else ()


if hasattr(utils, "_ChunkedLogProbFunction") and hasattr(utils, "_use_triton"):  # private names of TRL
    utils._ChunkedLogProbFunction = _Function
