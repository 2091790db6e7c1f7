"""Texts in blocks of tokens."""

import pytest
from datasets import Dataset

from hf_zero.recipes.data import tokens
from hf_zero.recipes.data.tokens import TEXT_FEATURES, cut_into_blocks


@pytest.mark.parametrize(
    ("joined", "wanted"), [(True, [[1, 2, 3], [4, 5, 6], [7, 8]]), (False, [[1, 2, 3], [4, 5], [6, 7, 8]])]
)
def test_blocks_are_cut_and_found_again_until_the_code_changes(joined, wanted, tmp_path, monkeypatch):
    rows = [{"input_ids": ids, "num_tokens": len(ids)} for ids in ([1, 2, 3, 4, 5], [6, 7, 8])]
    texts = Dataset.from_list(rows, features=TEXT_FEATURES)
    first = cut_into_blocks(texts, 3, joined=joined)
    assert [list(ids) for ids in first["input_ids"]] == wanted
    assert cut_into_blocks(texts, 3, joined=joined)._fingerprint == first._fingerprint
    monkeypatch.setattr(tokens, "code_hash", lambda: "of other code")
    assert cut_into_blocks(texts, 3, joined=joined)._fingerprint != first._fingerprint
