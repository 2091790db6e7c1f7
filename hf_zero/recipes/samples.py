"""Prints answers of a language model to test rows, before and after its training."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from hf_zero.recipes.data.formats import Message
from hf_zero.recipes.data.rows import BadRow, Data, plural
from hf_zero.recipes.generation import TextGenerator
from hf_zero.trainer import ZeroTrainer


MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 64, 1024
BATCH_SIZE = 8
NUM_WORDS = 8  # of a text, which the model continues
WIDTH = 300  # characters of a text that are printed


class Samples:
    """Some test rows and the answers to them.

    All ranks generate the same answers together, so the parameters stay sharded; rank 0 prints.

    Args:
        trainer (`ZeroTrainer`): its model answers.
        data (`Data`): the rows of the run.
        number (`int`): number of test rows. None are used if the model generates no text or reads images.
        say (`Callable`): prints on rank 0.
    """

    def __init__(self, trainer: ZeroTrainer, data: Data, number: int, say: Callable[..., None]):
        self._trainer, self._say = trainer, say
        self._rows: list[tuple[dict[str, str], list[int]]] = []  # texts by their titles, and tokens of the prompt
        if number and data.test is not None and not data.has_images and trainer.model.can_generate():
            options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "use_cache": True}
            self._generator = TextGenerator("the model", trainer.model, data.processing_class, options)
            self._rows = list(islice(_questions(data.asked, self._generator), number))

    def answer(self, when: str) -> None:
        """Generates and prints the answers, `when` being "before" or "after" training. All ranks call it."""
        if not self._rows:
            return
        model = self._trainer.model.eval()
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._trainer.compute_loss_context_manager():
            for start in range(0, len(self._rows), BATCH_SIZE):
                rows, prompts = zip(*self._rows[start : start + BATCH_SIZE])
                room = min(map(self._generator.room, prompts))
                for row, text in zip(rows, self._generator.generate(prompts, max_new_tokens=room)):
                    row[when] = text
        self._say(f"answers to {plural(len(self._rows), 'test row')}, {when} training:")
        for row, _ in self._rows:
            self._say(f"  {_shown(row['prompt'])}")
            for key in ("before",) if when == "before" else ("before", "after", "expected"):
                if row.get(key):
                    self._say(f"    {key}: {_shown(row[key])}")


def _questions(test: Sequence[dict[str, Any]], generator: TextGenerator) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Yields the prompt and the expected answer of each row that the model can answer, with the prompt's tokens."""
    for row in test:
        try:
            question, expected = question_of(row)
            tokens = generator.tokens(question, row.get("tools"))
            generator.room(tokens)
        except BadRow:
            continue
        if len(tokens) <= MAX_PROMPT_TOKENS:
            yield {"prompt": text_of(question), "expected": expected or ""}, tokens


def question_of(row: Mapping[str, Any]) -> tuple[str | list[Message], str | None]:
    """Returns the prompt and the expected answer of a row with `messages`, with `prompt` and perhaps `completion` or
    `chosen`, or with a text."""
    if row.get("messages"):
        turns = row["messages"]
        last = max((number for number, turn in enumerate(turns) if turn["role"] == "assistant"), default=len(turns))
        return turns[:last], turns[last]["content"] if last < len(turns) else None
    if "prompt" in row:
        expected = row.get("chosen", row.get("completion") if row.get("label", True) else None)
        return row["prompt"], expected if expected is None else text_of(expected)
    words = next((value for value in row.values() if isinstance(value, str)), "").split(" ")
    return " ".join(words[:NUM_WORDS]), " ".join(words[NUM_WORDS:])


def text_of(prompt: str | list[Message]) -> str:
    """Returns a text, or the text of the last message of a chat."""
    return prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content")) for turn in prompt[-1:])


def _shown(text: str) -> str:
    return textwrap.shorten(text, WIDTH, placeholder=" ...") or repr(text)
