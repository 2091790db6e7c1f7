"""From rows to token ids, which of them the loss counts, and blocks of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.chat import chat_tokens, render
from hf_zero.recipes.data.formats import Format, Sample
from hf_zero.recipes.data.rows import BadRow, Rows
from hf_zero.recipes.data.sources import quiet_datasets


PROBLEM = "_problem"  # a column of our own: where a bad row is, and what is wrong with it
NUM_PROMPT = 5  # tokens of a text that serve as a prompt
IGNORED = -100  # the label of a token that the loss does not count
TOKEN_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "num_tokens": Value("int32"),
        "num_counted": Value("int32"),  # by the loss
        "num_cut": Value("int32"),  # tokens beyond max_length
        "diverged": Value("bool"),  # the prompt alone has other tokens than before its completion
    }
)
STATS = ["num_counted", "num_cut", "diverged"]  # what is used up when rows are accounted for
TEXT_FEATURES = Features({"input_ids": List(Value("int32")), "num_tokens": Value("int32")})


def encode_rows(
    rows: Rows,
    function: Callable[[dict[str, Any]], dict[str, Any]],
    features: Features,
    *,
    skip_bad_rows: bool,
    key: str,
    num_proc: int | None = None,
) -> tuple[Dataset | IterableDataset, int]:
    """Applies a function to every row.

    The result is kept in the cache of `datasets`, under a name that depends on the rows, on `key` and on our code.
    Call it in all processes, under `training.main_process_first()`.

    Args:
        rows ([`Rows`]): from [`load_rows`].
        function (`Callable`): takes a row, gives the values of `features`; raises [`BadRow`] on one that it refuses.
        features (`datasets.Features`): what it gives.
        skip_bad_rows (`bool`): leaves bad rows out instead of refusing all.
        key (`str`): whatever the function depends on, such as its settings and those of its tokenizer.
        num_proc (`int`, *optional*): how many processes share the work.

    Returns:
        The new data set, and how many bad rows it lacks. A stream is encoded while it is used: its bad rows are then
        met one by one, and not counted.

    Raises:
        DataError: naming the first bad row and why; or there is no good one. From a stream, when that row is reached.
    """
    encode = partial(_encode, replace(rows, data=None), function, list(features), rows.is_stream and not skip_bad_rows)
    features = Features({**features, PROBLEM: Value("string")})
    with quiet_datasets():
        if rows.is_stream:
            data = rows.data.map(
                encode, batched=True, with_indices=True, remove_columns=rows.raw_columns, features=features
            )
            return data.filter(_is_good, input_columns=PROBLEM).remove_columns(PROBLEM), 0
        data = rows.data.map(
            encode,
            batched=True,
            with_indices=True,
            remove_columns=rows.data.column_names,
            features=features,
            num_proc=num_proc,
            new_fingerprint=Hasher.hash([rows.data._fingerprint, key, str(rows.parts), code_hash()]),
        )
    return _good(data, rows, skip_bad_rows)


def _encode(rows: Rows, function: Callable, names: list[str], raises: bool, batch: dict, indices: list[int]) -> dict:
    encoded: dict[str, list] = {name: [] for name in (*names, PROBLEM)}
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        problem, result, raw = None, dict.fromkeys(names), dict(zip(batch, values, strict=True))
        try:
            row = rows.read(raw)
            if row is None:
                continue
            result = function(row)
        except BadRow as error:
            problem = f"{rows.where(index, raw)}: {error}"
            if raises:
                raise DataError(_refusal(problem)) from error
        for name in names:
            encoded[name].append(result[name])
        encoded[PROBLEM].append(problem)
    return encoded


def _good(data: Dataset, rows: Rows, skip_bad_rows: bool) -> tuple[Dataset, int]:
    problems = data.data.column(PROBLEM)
    num_bad = len(problems) - problems.null_count
    if num_bad and not skip_bad_rows:
        first = pc.drop_null(problems)[0].as_py()
        raise DataError(_refusal(first) + (f" ({num_bad} rows are bad)" if num_bad > 1 else ""))
    if num_bad:
        good = np.flatnonzero(pc.is_null(problems).to_numpy(zero_copy_only=False))
        data = data.select(good)
    if not len(data):
        raise DataError(f"{rows.source}: all {num_bad} rows are bad; {pc.drop_null(problems)[0].as_py()}")
    return data.remove_columns(PROBLEM), num_bad + rows.num_unreadable


def _refusal(problem: str) -> str:
    return f"{problem}; correct it, or leave such rows out with --skip_bad_rows"


def _is_good(problem: str | None) -> bool:
    return problem is None


def code_hash() -> str:
    """Of the modules that make rows, so that what an older version made of them is not found in the cache."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@dataclass(frozen=True)
class Counted:
    """What the loss counts.

    Args:
        completion (`bool`): only the completion, not the prompt.
        assistant (`bool`): only what the assistant says.
    """

    completion: bool
    assistant: bool

    def __str__(self) -> str:
        if self.completion and self.assistant:
            return "what the assistant says in the completion"
        return "the completion" if self.completion else "what the assistant says" if self.assistant else "all tokens"


def counted_by(form: Format, completion_only: bool | None, assistant_only: bool | None) -> Counted:
    """Settles what the loss counts: what is set, or by default what the format tells apart.

    Raises:
        ConfigError: something is to be counted alone that the format does not tell apart.
    """
    has_completion = form.counts == "completion"
    if completion_only and not has_completion:
        raise ConfigError(f"completion_only_loss: rows of {', '.join(form.columns)} have no prompt; leave it out")
    if assistant_only and form.counts is None:
        raise ConfigError(f"assistant_only_loss: rows of {', '.join(form.columns)} have no messages; leave it out")
    return Counted(
        completion=has_completion if completion_only is None else completion_only,
        assistant=form.counts == "assistant" if assistant_only is None else assistant_only,
    )


@dataclass(frozen=True)
class Tokenize:
    """Makes token ids and labels of a row.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): with a chat template where rows are chats.
        form ([`Format`]): reads a row.
        counted ([`Counted`]): by the loss.
        max_length (`int`): what is longer is cut at its end.
    """

    tokenizer: PreTrainedTokenizerBase
    form: Format
    counted: Counted
    max_length: int

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The values of `TOKEN_FEATURES`.

        Raises:
            BadRow: on a row that cannot be trained on.
        """
        sample = self.form.read(row)
        if self.counted.assistant and not sample.is_chat:
            raise BadRow("texts, expected messages, as assistant_only_loss is on")
        ids, counts, diverged = self._chat(sample) if sample.is_chat else self._text(sample)
        labels = [token if count else IGNORED for token, count in zip(ids, counts, strict=True)][: self.max_length]
        return {
            "input_ids": ids[: self.max_length],
            "labels": labels,
            "num_tokens": len(labels),
            "num_counted": sum(label != IGNORED for label in labels[1:]),  # the first is predicted from nothing
            "num_cut": len(ids) - len(labels),
            "diverged": diverged,
        }

    def _text(self, sample: Sample) -> tuple[list[int], list[int], bool]:
        text = ended(cast(str, sample.completion), self.tokenizer)
        ids = self.tokenizer(cast(str, sample.prompt or "") + text)["input_ids"]
        prompt = self.tokenizer(sample.prompt)["input_ids"] if sample.prompt and self.counted.completion else []
        return ids, *_after(prompt, ids)

    def _chat(self, sample: Sample) -> tuple[list[int], list[int], bool]:
        ids, counts = chat_tokens(self.tokenizer, sample.messages, sample.tools, marked=self.counted.assistant)
        if not (sample.prompt and self.counted.completion):
            return ids, counts, False
        asked = render(self.tokenizer, cast(list[dict[str, Any]], sample.prompt), sample.tools, is_prompt=True)
        after, diverged = _after(self.tokenizer(asked, add_special_tokens=False)["input_ids"], ids)
        return ids, [min(pair) for pair in zip(counts, after, strict=True)], diverged


def ended(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text with the end-of-sequence token behind it, as the model is to end it."""
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _after(prompt: list[int], ids: list[int]) -> tuple[list[int], bool]:
    """What comes after the tokens that `ids` has in common with `prompt`, and whether `prompt` has more."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids)))
    return [0] * length + [1] * (len(ids) - length), length < len(prompt)


def sample_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Writes a row out.

    Args:
        row (`dict`): with `input_ids` and, unless all count, `labels`.
        tokenizer (`PreTrainedTokenizerBase`): decodes it.

    Returns:
        The row with what the loss counts between ⟦ and ⟧, and a text to try the model on: what comes before that, or
        a few tokens.
    """
    ids = row["input_ids"]
    counts = [label != IGNORED for label in row.get("labels", ids)]
    pieces, start = [], 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or counts[stop] != counts[start]:
            text = tokenizer.decode(ids[start:stop])
            pieces.append(f"⟦{text}⟧" if counts[start] else text)
            start = stop
    prompt = counts.index(True) or min(len(ids), NUM_PROMPT)
    return "".join(pieces), tokenizer.decode(ids[:prompt], skip_special_tokens=True)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that a tokenizer does, to find its work in a cache."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    does = backend.to_str() if backend is not None else repr((tokenizer.name_or_path, tokenizer.get_vocab()))
    return sha256(f"{type(tokenizer)} {tokenizer} {does} {tokenizer.chat_template}".encode()).hexdigest()


@dataclass(frozen=True)
class TokenizeText:
    """Makes token ids of a row's text, and ends it.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): with a token that ends texts.
        form ([`Format`]): reads a row.
    """

    tokenizer: PreTrainedTokenizerBase
    form: Format

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The values of `TEXT_FEATURES`.

        Raises:
            BadRow: on a row without a text.
        """
        ids = self.tokenizer(ended(cast(str, self.form.read(row).completion), self.tokenizer))["input_ids"]
        return {"input_ids": ids, "num_tokens": len(ids)}


def cut_into_blocks(texts: Dataset | IterableDataset, max_length: int, *, joined: bool) -> Dataset | IterableDataset:
    """Cuts tokenized texts into blocks, and keeps them in the cache of `datasets`.

    Args:
        texts (`datasets.Dataset` or `IterableDataset`): with the columns of `TEXT_FEATURES`.
        max_length (`int`): tokens of a block, at most.
        joined (`bool`): whether a thousand texts at a time are joined before.
    """
    options: dict[str, Any] = {"batched": True, "features": TEXT_FEATURES}
    if isinstance(texts, Dataset):
        options["new_fingerprint"] = Hasher.hash([texts._fingerprint, joined, max_length, code_hash()])
    with quiet_datasets():
        return texts.map(partial(_cut, joined, max_length), **options)


def _cut(joined: bool, max_length: int, batch: dict[str, list]) -> dict[str, list]:
    """One token left over has nothing to be predicted from."""
    texts = [list(chain.from_iterable(batch["input_ids"]))] if joined else batch["input_ids"]
    blocks = [text[start : start + max_length] for text in texts for start in range(0, len(text), max_length)]
    blocks = [block for block in blocks if len(block) > 1]
    return {"input_ids": blocks, "num_tokens": [len(block) for block in blocks]}
