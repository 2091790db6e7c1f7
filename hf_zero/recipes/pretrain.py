"""Continued training on plain texts.

As is usual, texts are joined, a thousand at a time, each ended with the end-of-sequence token, and cut into blocks of
`max_length` tokens. No token is lost, and a text sees the end of the one before. With `--packing` none sees another:
texts longer than a block are cut into pieces, and pieces are packed as `sft` packs its rows.
"""

from dataclasses import dataclass

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_zero.recipes.causal import (
    CausalArguments,
    after,
    before,
    check,
    load_model,
    load_tokenizer,
    make_data,
    make_trainer,
)
from hf_zero.recipes.data import Data, Rows, encode_rows, load_rows
from hf_zero.recipes.data.formats import recognise
from hf_zero.recipes.data.rows import column, plural
from hf_zero.recipes.data.tokens import TEXT_FEATURES, TokenizeText, cut_into_blocks, tokenizer_key
from hf_zero.trainer import ZeroTrainingArguments


__all__ = ["Arguments", "Training", "after", "before", "check", "load_data", "load_model", "make_trainer"]

Training = ZeroTrainingArguments


@dataclass
class Arguments(CausalArguments):
    """What `pretrain` takes beside the training arguments."""


def load_data(arguments: Arguments, training: ZeroTrainingArguments) -> Data:
    """Reads the texts and tokenizes them into blocks.

    Raises:
        ConfigError: settings do not fit the tokenizer.
        DataError: rows cannot be trained on.
    """
    tokenizer = load_tokenizer(arguments)
    notes: list[str] = []
    with training.main_process_first(desc="data"):
        rows = {split: load_rows(arguments, split) for split in ("train", "test")}
        data = {split: each and _blocks(split, each, arguments, tokenizer, notes) for split, each in rows.items()}
    return make_data(arguments, training, data, rows=rows["train"], tokenizer=tokenizer, notes=notes)


def _blocks(
    split: str, rows: Rows, arguments: Arguments, tokenizer: PreTrainedTokenizerBase, notes: list[str]
) -> Dataset | IterableDataset:
    form = recognise(rows, "text", arguments.dataset_text_field)
    texts, num_bad = encode_rows(
        rows,
        TokenizeText(tokenizer, form),
        TEXT_FEATURES,
        skip_bad_rows=arguments.skip_bad_rows,
        key=f"{tokenizer_key(tokenizer)} {form.columns}",
        num_proc=arguments.dataset_num_proc,
    )
    data = cut_into_blocks(texts, arguments.max_length, joined=not arguments.packing)
    if rows.is_stream:
        notes.append(f"{split}: {rows.source}, read while training goes on")
        return data
    num_tokens = int(column(data, "num_tokens").sum())
    notes.append(
        f"{split}: {plural(len(texts), 'text')} of {rows.source} in {plural(len(data), 'block')} of up to "
        f"{plural(arguments.max_length, 'token')}, {plural(num_tokens, 'token')} in all; the loss counts all"
    )
    if num_bad:
        notes.append(f"{split}: {plural(num_bad, 'bad row')} left out")
    return data
