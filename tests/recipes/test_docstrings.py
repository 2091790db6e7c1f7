"""The built-in data set: the same on every machine, and without the answers in the text."""

import re
from collections import Counter
from pathlib import Path

import pytest

from hf_zero.errors import DataError
from hf_zero.recipes.docstrings import load_docstrings, text_hash


@pytest.fixture(scope="module")
def examples() -> list[dict[str, str]]:
    return load_docstrings()


def write_package(root: Path, name: str, modules: dict[str, str]) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    for module, docstring in modules.items():
        (folder / f"{module}.py").write_text(f'"""{docstring}"""\n', encoding="utf-8")


def test_there_are_ten_classes_of_a_hundred_rows_or_more(examples):
    sizes = Counter(example["label"] for example in examples)
    assert len(sizes) == 10
    # The tenth package of 3.11, 3.12 and 3.13 has 150 rows or more; cut down distributions have a little less.
    assert min(sizes.values()) >= 100
    assert max(sizes.values()) <= 400


def test_texts_are_one_line_of_forty_characters_occur_once_and_name_no_class(examples):
    texts, labels = [example["text"] for example in examples], {example["label"] for example in examples}
    assert len({text.casefold() for text in texts}) == len(texts)
    for text in texts:
        assert len(text) >= 40 and not re.search(r"[\n\t]|  ", text)
        assert not [label for label in labels if label in text.casefold()], text


def test_the_order_depends_on_the_texts_alone(examples):
    hashes = [text_hash(example["text"]) for example in examples]
    assert hashes == sorted(hashes)  # and not on sets of strings, whose order changes from process to process


def test_texts_of_two_packages_tests_strangers_and_short_texts_are_left_out(tmp_path):
    long = "Some text that is certainly longer than forty characters, number {}."
    write_package(tmp_path, "email", {"a": long.format(1), "b": "Too short.", "shared": long.format(0)})
    write_package(tmp_path, "email/test", {"c": long.format(2)})
    write_package(tmp_path, "json", {"d": long.format(3), "shared": long.format(0)})
    write_package(tmp_path, "site-packages/json", {"e": long.format(4)})
    write_package(tmp_path, "not_in_the_library", {"f": long.format(5)})
    found = load_docstrings(num_classes=2, root=tmp_path)
    assert {example["text"] for example in found} == {long.format(1), long.format(3)}


def test_too_few_packages_are_an_error_that_gives_both_numbers(tmp_path):
    write_package(tmp_path, "email", {"a": "Some text that is certainly longer than forty characters."})
    with pytest.raises(DataError, match="1 packages with docstrings .* expected 2"):
        load_docstrings(num_classes=2, root=tmp_path)
