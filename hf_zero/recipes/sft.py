"""Supervised fine-tuning: a language model learns to complete prompts, and to answer in chats, as the rows do."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes import causal
from hf_zero.recipes.causal import (
    CausalArguments,
    TemplateArguments,
    after,
    before,
    check_template,
    load_model,
    load_tokenizer,
    make_data,
    make_trainer,
)
from hf_zero.recipes.data import BadRow, Data, Rows, encode_rows, load_rows
from hf_zero.recipes.data.chat import DEFAULT, template_notes
from hf_zero.recipes.data.formats import FORMAT_NAMES, Format, Message, recognise
from hf_zero.recipes.data.rows import column, cut_note, plural
from hf_zero.recipes.data.tokens import STATS, TOKEN_FEATURES, Tokenize, counted_by, tokenizer_key
from hf_zero.trainer import ZeroTrainingArguments


__all__ = ["Arguments", "Training", "after", "before", "check", "load_data", "load_model", "make_trainer"]

Training = ZeroTrainingArguments


@dataclass
class Arguments(TemplateArguments, CausalArguments):
    """What `sft` takes beside the training arguments."""

    dataset_format: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(FORMAT_NAMES)}; by default the one that the columns fit."}
    )
    completion_only_loss: bool | None = field(
        default=None, metadata={"help": "The loss leaves out prompts; by default where rows have a completion."}
    )
    assistant_only_loss: bool | None = field(
        default=None, metadata={"help": "The loss counts what the assistant says; by default where rows are messages."}
    )


def check(arguments: Arguments, training: Mapping[str, Any]) -> None:
    """Refuses what cannot work, before a process is started.

    Raises:
        ConfigError: If the model is missing, or settings contradict each other.
        DataError: If a file is missing.
        CheckpointError: If the weights are truncated.
    """
    if arguments.dataset_format not in (None, *FORMAT_NAMES):
        raise ConfigError(f"dataset_format {arguments.dataset_format!r}: expected one of {', '.join(FORMAT_NAMES)}")
    check_template(arguments)
    causal.check(arguments, training)


def load_data(arguments: Arguments, training: ZeroTrainingArguments) -> Data:
    """Reads the rows, renders and tokenizes them, and packs those that are trained on if that is asked for.

    Raises:
        ConfigError: settings do not fit the rows or the tokenizer.
        DataError: rows cannot be trained on.
    """
    tokenizer = load_tokenizer(arguments)
    with training.main_process_first(desc="data"):
        rows = {split: load_rows(arguments, split) for split in ("train", "test")}
        chat, tools = _first_chat(rows["train"], arguments)
        notes = template_notes(
            tokenizer, arguments.chat_template_path, chat=chat, tools=tools, source=rows["train"].source
        )
        data = {split: each and _tokenized(split, each, arguments, tokenizer, notes) for split, each in rows.items()}
    made = make_data(arguments, training, data, rows=rows["train"], tokenizer=tokenizer, notes=notes)
    question = _question(chat or [])
    return replace(made, extra={"prompt": question}) if question else made


def _first_chat(rows: Rows, arguments: Arguments) -> tuple[list[Message] | None, list | None]:
    """The messages and tools of the first row: no messages where it cannot be read, `None` where rows are texts."""
    form = _form(rows, arguments)
    try:
        sample = form.read(rows.example)
    except BadRow:
        return ([] if form.is_chat(rows.example) else None), None
    return (sample.messages if sample.is_chat else None), sample.tools


def _question(chat: list[Message]) -> list[Message]:
    """What the user asks in a chat, to try the model on."""
    asked = [turn["content"] for turn in chat if turn["role"] == "user" and isinstance(turn["content"], str)]
    return [{"role": "user", "content": textwrap.shorten(text, 60, placeholder="")} for text in asked[:1]]


def _form(rows: Rows, arguments: Arguments) -> Format:
    return recognise(rows, arguments.dataset_format, arguments.dataset_text_field)


def _tokenized(
    split: str, rows: Rows, arguments: Arguments, tokenizer: PreTrainedTokenizerBase, notes: list[str]
) -> Dataset | IterableDataset:
    form = _form(rows, arguments)
    counted = counted_by(form, arguments.completion_only_loss, arguments.assistant_only_loss)
    if counted.assistant and not tokenizer.is_fast:
        raise ConfigError("assistant_only_loss: takes a fast tokenizer; save it as one, or turn this off")
    data, num_bad = encode_rows(
        rows,
        Tokenize(tokenizer, form, counted, arguments.max_length),
        TOKEN_FEATURES,
        skip_bad_rows=arguments.skip_bad_rows,
        key=f"{tokenizer_key(tokenizer)} {form.name} {form.columns} {counted} {arguments.max_length}",
        num_proc=arguments.dataset_num_proc,
    )
    notes.append(f"{split}: {rows.source}, format {form.name}; the loss counts {counted}")
    if rows.is_stream:
        notes.append(f"{split}: read while training goes on, so rows that are cut or left out are not counted")
        return data.filter(bool, input_columns="num_counted").remove_columns(STATS)
    notes += _account(data, split, num_bad, arguments.max_length)
    notes += _diverged(data, split, is_chat=form.is_chat(rows.example))
    counts = column(data, "num_counted") > 0
    if not counts.any():
        raise DataError(
            f"{rows.source}: no row has a token that the loss counts within its first {arguments.max_length}; "
            f"the loss counts {counted}; set a larger --max_length, or another loss"
        )
    return (data if counts.all() else data.select(np.flatnonzero(counts))).remove_columns(STATS)


def _account(data: Dataset, split: str, num_bad: int, max_length: int) -> list[str]:
    """What became of the rows, a line for each thing that did not simply go well."""
    kept, cut = column(data, "num_counted") > 0, column(data, "num_cut")
    num_tokens = int(column(data, "num_tokens")[kept].sum())
    num_cut = int((cut[kept] > 0).sum())
    notes = [f"{split}: {plural(int(kept.sum()), 'row')}, {plural(num_tokens, 'token')}"]
    if num_bad:
        notes.append(f"{split}: {plural(num_bad, 'bad row')} left out")
    if not kept.all():
        num_empty = int((~kept).sum())
        notes.append(f"{split}: {plural(num_empty, 'row')} left out, none of whose first {max_length} tokens counts")
    if num_cut:
        notes.append(f"{split}: {cut_note(num_cut, max_length, int(cut[kept].sum()))}")
    return notes


def _diverged(data: Dataset, split: str, *, is_chat: bool) -> list[str]:
    """Rows whose prompts the model would meet as other tokens when it is used than when it is trained."""
    num_diverged = int(column(data, "diverged")[column(data, "num_counted") > 0].sum())
    if not num_diverged:
        return []
    if is_chat:
        remedy = f"the template writes it otherwise before an answer; give --chat_template_path {DEFAULT}, or a file"
    else:
        remedy = "white space belongs to the word behind it: let completions begin with it, and no prompt end with it"
    rows = plural(num_diverged, "row")
    return [
        f"{split}: {rows} whose prompt has other tokens alone than before its completion, which then counts from "
        f"where they differ; {remedy}"
    ]
