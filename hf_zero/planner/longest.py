"""Finds the longest sequence with which a run fits."""

from collections.abc import Callable
from dataclasses import dataclass

from hf_zero.errors import ConfigError, size_text
from hf_zero.planner.advice import USABLE_SHARE
from hf_zero.planner.prediction import Prediction


# The result is a multiple of this number of tokens.
STEP = 64
# Upper limit for models without a maximum position.
MOST_TOKENS = 2**24
GROWTH = 8


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits."""

    num_tokens: int
    prediction: Prediction  # with this length
    more: Prediction | None  # with `STEP` more tokens, which do not fit; None if the model has no more positions
    limit: int  # memory available to tensors, in bytes

    def render(self) -> str:
        """Returns a line with the length and what limits it."""
        line = f"max_length auto: {self.num_tokens} tokens take {size_text(self.prediction.needed_nbytes)}"
        if self.more is None:
            return f"{line}, and the model has no more positions"
        limit = size_text(self.limit)
        return f"{line} of the {limit} that tensors may take, and {self.num_tokens + STEP} tokens do not fit"


def longest_sequence(
    predict: Callable[[int], Prediction], memory_nbytes: int, num_positions: int | None = None
) -> Longest:
    """Finds the longest sequence, a multiple of `STEP` tokens, with which a run fits. Memory is nearly linear in the
    length, so few predictions are needed.

    Args:
        predict (`Callable`): predicts the run with sequences of the given length.
        memory_nbytes (`int`): memory of one device, of which tensors may take `USABLE_SHARE`.
        num_positions (`int`, *optional*): maximum length of the model; unlimited by default.

    Raises:
        `ConfigError`: if the shortest length does not fit, or the memory of a step cannot be predicted.
    """
    limit, found = int(USABLE_SHARE * memory_nbytes), {}
    most = min(num_positions or MOST_TOKENS, MOST_TOKENS)
    most = most // STEP * STEP or most

    def fits(num_tokens: int) -> bool:
        if num_tokens not in found:
            found[num_tokens] = prediction = predict(num_tokens)
            if prediction.step is None:
                raise ConfigError(f"max_length auto: {prediction.note}; give a number of tokens")
        return found[num_tokens].needed_nbytes <= limit

    low = high = min(STEP, most)
    if not fits(low):
        raise ConfigError(
            f"max_length auto: {low} tokens take {size_text(found[low].needed_nbytes)}, and tensors may take "
            f"{size_text(limit)}; use more ranks, a higher stage, offload or a smaller micro-batch"
        )
    while high < most and fits(high):
        low, high = high, min(GROWTH * high, most)
    if fits(high):
        return Longest(high, found[high], None, limit)
    while high - low > STEP:
        slope = (found[high].needed_nbytes - found[low].needed_nbytes) / (high - low)
        guess = low + int((limit - found[low].needed_nbytes) / slope) // STEP * STEP
        for length in (guess, guess + STEP, (low + high) // (2 * STEP) * STEP):
            if low < length < high:
                low, high = (length, high) if fits(length) else (low, length)
    return Longest(low, found[low], found[high], limit)
