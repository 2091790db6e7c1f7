"""Supervised fine-tuning: a language model learns to complete prompts, and to answer in chats, as the rows do."""

import textwrap
from dataclasses import dataclass, field, replace

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
    check_stream,
    check_template,
    load_model,
    load_tokenizer,
    make_data,
    make_trainer,
)
from hf_zero.recipes.data import BadRow, Data, Rows, encode_rows, load_rows
from hf_zero.recipes.data.chat import template_notes
from hf_zero.recipes.data.formats import FORMAT_NAMES, Format, Message, recognise
from hf_zero.recipes.data.stats import column, cut_note, plural
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


def check(arguments: Arguments) -> None:
    """Refuses what cannot work, before a process is started.

    Args:
        arguments ([`Arguments`]): The parsed arguments.

    Raises:
        ConfigError: If the model is missing, or settings contradict each other.
        DataError: If a file is missing.
        CheckpointError: If the weights are truncated.
    """
    if arguments.dataset_format not in (None, *FORMAT_NAMES):
        raise ConfigError(f"dataset_format {arguments.dataset_format!r}: expected one of {', '.join(FORMAT_NAMES)}")
    check_template(arguments)
    causal.check(arguments)


def load_data(arguments: Arguments, training: ZeroTrainingArguments) -> Data:
    """Reads the rows, renders and tokenizes them, and packs those that are trained on if that is asked for.

    Raises:
        ConfigError: settings do not fit the rows or the tokenizer.
        DataError: rows cannot be trained on.
    """
    check_stream(arguments, training)
    tokenizer = load_tokenizer(arguments)
    with training.main_process_first(desc="data"):
        rows = {split: load_rows(arguments, split) for split in ("train", "test")}
        is_chat = _form(rows["train"], arguments).is_chat(rows["train"].example)
        notes = template_notes(tokenizer, arguments.chat_template_path, is_chat=is_chat, source=rows["train"].source)
        data = {split: each and _tokenized(split, each, arguments, tokenizer, notes) for split, each in rows.items()}
    made = make_data(arguments, data, rows["train"], tokenizer, notes)
    question = _question(rows["train"], arguments)
    return replace(made, extra={"prompt": question}) if question else made


def _question(rows: Rows, arguments: Arguments) -> list[Message]:
    """What the user asks in the first chat, to try the model on."""
    form = _form(rows, arguments)
    try:
        sample = form.read(rows.example)
    except BadRow:
        return []
    turns = (sample.prompt or []) + sample.completion if sample.is_chat else []
    asked = [turn["content"] for turn in turns if turn["role"] == "user" and isinstance(turn["content"], str)]
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
    num_diverged = int(column(data, "diverged")[kept].sum())
    notes = [f"{split}: {plural(int(kept.sum()), 'row')}, {plural(num_tokens, 'token')}"]
    if num_bad:
        notes.append(f"{split}: {plural(num_bad, 'bad row')} left out")
    if not kept.all():
        num_empty = int((~kept).sum())
        notes.append(f"{split}: {plural(num_empty, 'row')} left out, none of whose first {max_length} tokens counts")
    if num_cut:
        notes.append(f"{split}: {cut_note(num_cut, max_length, int(cut[kept].sum()))}")
    if num_diverged:
        notes.append(
            f"{split}: {plural(num_diverged, 'row')} whose prompt has other tokens alone than before its completion, "
            "which then counts from where they differ; prompts had better end with white space or a special token"
        )
    return notes
