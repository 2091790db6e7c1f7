"""The longest sequence with which a run fits."""

from collections.abc import Callable
from dataclasses import dataclass

from hf_zero.errors import ConfigError, size_text
from hf_zero.planner.advice import USABLE_SHARE
from hf_zero.planner.prediction import Prediction


# What is found is a multiple of so many tokens.
STEP = 64
# No model that has no last position is asked for more.
MOST_TOKENS = 2**24
GROWTH = 8


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits."""

    num_tokens: int
    prediction: Prediction  # with it
    more: Prediction | None  # with `STEP` more, which do not fit; None where the model has no more positions
    limit: int  # how many bytes tensors may take

    def render(self) -> str:
        """Returns one line: how long it is, and what limits it."""
        line = f"max_length auto: {self.num_tokens} tokens take {size_text(self.prediction.needed_nbytes)}"
        if self.more is None:
            return f"{line}, and the model has no more positions"
        limit = size_text(self.limit)
        return f"{line} of the {limit} that tensors may take, and {self.num_tokens + STEP} tokens do not fit"


def longest_sequence(
    predict: Callable[[int], Prediction], memory_nbytes: int, num_positions: int | None = None
) -> Longest:
    """Finds the longest sequence with which a run fits, a multiple of `STEP` tokens. What a run needs is nearly linear
    in their number, so few predictions are made.

    Args:
        predict (`Callable`): predicts the run with sequences of so many tokens.
        memory_nbytes (`int`): what one device has, of which tensors may take `USABLE_SHARE`.
        num_positions (`int`, *optional*): of the model; by default it has no last one.

    Raises:
        `ConfigError`: the shortest does not fit, or what a step takes is not known.
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
