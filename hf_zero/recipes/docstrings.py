"""A data set for text classification that every Python contains: the docstrings of its standard library.

The label of a docstring is the package it was written for. Sources are parsed, never imported, and the names of the
packages are masked, so that a model has to read the sentence to tell `email` from `logging`.
"""

import ast
import re
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from hf_zero.errors import DataError


MIN_CHARS = 40
MAX_PER_CLASS = 400  # rows; a larger class keeps the texts with the smallest hashes
MASK = "thing"
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def load_docstrings(num_classes: int = 10, root: Path | None = None) -> list[dict[str, str]]:
    """Returns `text` and `label` of the docstrings of the `num_classes` best documented packages of the standard
    library. Texts of fewer than 40 characters, and those of two packages, are left out.

    The rows and their order depend on nothing but the sources under `root`, by default this interpreter's. Raises
    [`DataError`] if there are fewer packages.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, set[str]] = defaultdict(set)
    for path in _sources(root):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts):
            texts[parts[0].lstrip("_")].update(_docstrings_in(path))
    if len(texts) < num_classes:
        raise DataError(
            f"python_docstrings: {len(texts)} packages with docstrings under {root}, expected {num_classes}; "
            "use a Python whose standard library is installed as .py files"
        )
    labels = sorted(texts, key=lambda label: (-len(texts[label]), label))[:num_classes]
    answers = re.compile("|".join(sorted(labels, key=len, reverse=True)), re.IGNORECASE)
    rows = {(answers.sub(MASK, text), label) for label in labels for text in texts[label]}
    num_labels, sizes, kept = Counter(text for text, _ in rows), Counter[str](), []
    for text, label in sorted(rows, key=lambda row: text_hash(row[0])):
        sizes[label] += 1
        if num_labels[text] == 1 and sizes[label] <= MAX_PER_CLASS:
            kept.append({"text": text, "label": label})
    return kept


def text_hash(text: str) -> str:
    """Returns the SHA-256 of a text in hex, by which rows are sorted and split."""
    return sha256(text.encode("utf-8", "replace")).hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    # only the library's own entries: next to them lie all installed packages
    for entry in sorted(root.iterdir() if root.is_dir() else ()):
        if entry.stem in sys.stdlib_module_names:
            yield from sorted(entry.rglob("*.py")) if entry.is_dir() else [entry] if entry.suffix == ".py" else []


def _docstrings_in(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold escapes that newer parsers warn about
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return  # templates and test inputs that are not meant to parse
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = " ".join((ast.get_docstring(node) or "").split())
            if len(text) >= MIN_CHARS:
                yield text.encode("utf-8", "replace").decode("utf-8")
