"""Answers of a language model to test rows, before and after its training.

All ranks ask the model the same together. So its parameters stay sharded, and no rank waits for one that asks less.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.recipes.data.formats import TOKENS, Message, num_prompt_tokens
from hf_zero.recipes.data.rows import BadRow, Data, plural
from hf_zero.recipes.generation import TextGenerator
from hf_zero.recipes.report import Table
from hf_zero.trainer import ZeroTrainer


SAMPLES_NAME = "_samples.json"  # the name is not uploaded: the file holds rows
Question = tuple[str | list[Message], str | None]  # a prompt, and the answer that the row has
MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 64, 1024
BATCH_SIZE = 8
NUM_WORDS = 8  # of a text, which the model continues
KEYS = ("before", "after", "expected")
WIDTH = 300  # characters of a text that are printed


@dataclass(frozen=True)
class Samples:
    """The rows and the answers to them. All ranks generate the same together; the first writes and prints."""

    trainer: ZeroTrainer
    say: Callable[..., None]
    # with "prompt" and "expected", and "before" and "after" as far as they are known
    rows: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # their prompts
    generator: TextGenerator | None = None  # of the model; `None` where there are no rows

    @classmethod
    def of(cls, trainer: ZeroTrainer, data: Data, number: int, say: Callable[..., None]) -> "Samples":
        """Takes the first so many test rows that the model can answer and that are short enough; none if it writes no
        text, reads images, or nothing is tested."""
        if not number or data.test is None or data.has_images or not trainer.model.can_generate():
            return cls(trainer, say)
        options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "use_cache": True}
        generator = TextGenerator.of("the model", trainer.model, data.processing_class, options)
        questions = list(islice(_questions(data.asked, generator), number))
        return cls(trainer, say, [row for row, _ in questions], [tokens for _, tokens in questions], generator)

    def before(self, *, resumes: bool) -> None:
        """Lets the model answer before it is trained. All ranks call it. Where it is to go on from a checkpoint, the
        answers are those that the run began with."""
        if resumes:
            try:
                kept = json.loads(self._path.read_text(encoding="utf-8"))
                known = {json.dumps(row["prompt"]): row["before"] for row in kept}
            except (OSError, ValueError, KeyError, TypeError):
                known = {}  # the run began without samples
            for row in self.rows:
                row["before"] = known.get(json.dumps(row["prompt"]))
            return
        if self.rows:
            self._answer("before")
            self._tell("before training", ("before",))

    def after(self) -> None:
        """Lets the model answer after it was trained. All ranks call it."""
        if self.rows:
            self._answer("after")
            self._tell("before and after training", KEYS)

    def tables(self) -> list[Table]:
        """Returns the table for the report, or none: what was asked, both answers, and what the row has."""
        rows = [
            [_visible(cell) for cell in (_text_of(row["prompt"]), *(row.get(key) or "" for key in KEYS))]
            for row in self.rows
        ]
        return [Table("samples", "Answers to test rows", ["asked", *KEYS], rows)] if rows else []

    def _answer(self, key: str) -> None:
        model = self.trainer.model.eval()
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.trainer.compute_loss_context_manager():
            for start in range(0, len(self.rows), BATCH_SIZE):
                tokens = self.tokens[start : start + BATCH_SIZE]
                room = min(map(self.generator.room, tokens))
                for row, text in zip(self.rows[start:], self.generator.generate(tokens, max_new_tokens=room)):
                    row[key] = text
        comm = self.trainer.accelerator.shard(self.trainer.model).comm
        text = json.dumps(self.rows, ensure_ascii=False, indent=1)
        run_on_all_ranks(
            comm, f"writing {SAMPLES_NAME}", on_first(comm, partial(write_whole, self._path, text.encode()))
        )

    @property
    def _path(self) -> Path:
        return Path(self.trainer.args.output_dir) / SAMPLES_NAME

    def _tell(self, when: str, keys: tuple[str, ...]) -> None:
        lines = [f"answers to {plural(len(self.rows), 'test row')}, {when}:"]
        for row in self.rows:
            lines.append(f"  {_shown(_text_of(row['prompt']))}")
            lines += [f"    {key}: {_shown(row[key])}" for key in keys if row.get(key) is not None]
        self.say("\n".join(lines))


def _questions(test: Sequence[dict[str, Any]], generator: TextGenerator) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """The rows that the model can answer, and the token ids of their prompts."""
    for row in test:
        try:
            question, tokens = _with_tokens(row, generator)
            generator.room(tokens)
        except BadRow:
            continue
        if len(tokens) <= MAX_PROMPT_TOKENS:
            yield dict(zip(("prompt", "expected"), question)), tokens


def _with_tokens(row: Mapping[str, Any], generator: TextGenerator) -> tuple[Question, list[int]]:
    """What to ask the model of a row, and the token ids of that; of rows that are tokenized, those of the row."""
    if TOKENS not in row:
        question = question_of(row)
        return question, generator.tokens(question[0], row.get("tools"))
    ids, start = row[TOKENS], num_prompt_tokens(row)
    prompt, expected = map(generator.tokenizer.decode, (ids[:start], ids[start:]))
    return (prompt, expected), ids[:start]


def question_of(row: Mapping[str, Any]) -> Question:
    """What to ask the model of a row, and what the row has as the answer: of `messages`, of `prompt` with perhaps
    `completion` or `chosen`, or of a text."""
    if row.get("messages"):
        turns = row["messages"]
        last = max((number for number, turn in enumerate(turns) if turn["role"] == "assistant"), default=len(turns))
        return turns[:last], turns[last]["content"] if last < len(turns) else None
    if "prompt" in row:
        expected = row.get("chosen", row.get("completion") if row.get("label", True) else None)
        return row["prompt"], expected if expected is None else _text_of(expected)
    words = next((value for value in row.values() if isinstance(value, str)), "").split(" ")
    return " ".join(words[:NUM_WORDS]), " ".join(words[NUM_WORDS:])


def _text_of(prompt: str | list[Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content")) for turn in prompt[-1:])


def _visible(text: str) -> str:
    """A text without the lines around it that would stretch a table; of white space alone, as Python writes it."""
    return text.strip() or (text and repr(text))


def _shown(text: str) -> str:
    return textwrap.shorten(_visible(text), WIDTH, placeholder=" ...")
