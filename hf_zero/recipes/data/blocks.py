"""Texts cut into blocks of tokens: joined, or each for itself."""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from hf_zero.recipes.data.encode import code_hash
from hf_zero.recipes.data.formats import Format
from hf_zero.recipes.data.sources import quiet_datasets
from hf_zero.recipes.data.tokens import ended


FEATURES = Features({"input_ids": List(Value("int32")), "num_tokens": Value("int32")})


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
        """The values of `FEATURES`.

        Raises:
            BadRow: on a row without a text.
        """
        ids = self.tokenizer(ended(cast(str, self.form.read(row).completion), self.tokenizer))["input_ids"]
        return {"input_ids": ids, "num_tokens": len(ids)}


def cut_into_blocks(texts: Dataset | IterableDataset, max_length: int, *, joined: bool) -> Dataset | IterableDataset:
    """Cuts tokenized texts into blocks, and keeps them in the cache of `datasets`.

    Args:
        texts (`datasets.Dataset` or `IterableDataset`): with the columns of `FEATURES`.
        max_length (`int`): tokens of a block, at most.
        joined (`bool`): whether a thousand texts at a time are joined before.
    """
    options: dict[str, Any] = {"batched": True, "features": FEATURES}
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
