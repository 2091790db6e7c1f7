"""A data set for text classification that every Python contains: the docstrings of its standard library.

The label of a docstring is the top-level package it was written for. Sources are parsed, never imported, and names
that would give the answer away are replaced, so that a model has to read the sentence to tell `email` from `logging`.
"""

import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_zero.errors import DataError


MIN_CHARS = 40
MAX_PER_CLASS = 400  # rows; a larger class keeps the texts with the smallest hashes
MASK = "thing"
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
TEST_PERCENT = 20


@dataclass(frozen=True)
class Example:
    """One text and the class it belongs to."""

    text: str
    label: str


def text_hash(text: str) -> str:
    """Gives the SHA-256 of a text in hex, the same on every machine: order and split rest on it."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def is_test_hash(digest: str) -> bool:
    """Says by its hash whether a row is tested on: equal ones are alike, and about 20 % of all are."""
    return int(digest[:8], 16) % 100 < TEST_PERCENT


def load_docstrings(num_classes: int = 10, root: Path | None = None) -> list[Example]:
    """Collects the docstrings of the `num_classes` best documented packages of the standard library, without
    duplicates, of at least 40 characters each. Raises [`DataError`] where there are fewer packages.

    The result depends on nothing but the sources under `root`, by default this interpreter's: files are read in sorted
    order, rows are sorted by hash, and ties of packages go to the alphabet.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts, module_names = _collect(root)
    if len(texts) < num_classes:
        raise DataError(
            f"python_docstrings: {len(texts)} packages with docstrings under {root}, expected {num_classes}; "
            "use a Python whose standard library is installed as .py files, or lower num_classes"
        )
    labels = sorted(texts, key=lambda label: (-len(texts[label]), label))[:num_classes]
    answers, rows = _pattern(labels, whole_word=False), []
    for label in labels:
        own_names = _pattern(module_names[label], whole_word=True)
        scrubbed = (own_names.sub(MASK, answers.sub(MASK, text)) for text in texts[label])
        rows += [Example(text, label) for text in scrubbed if len(text) >= MIN_CHARS]
    return _capped(_unambiguous(rows))


def _collect(root: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The docstrings of each package, and the names of its modules."""
    texts: dict[str, set[str]] = defaultdict(set)
    module_names: dict[str, set[str]] = defaultdict(set)
    for path in _sources(root):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.intersection(parts):
            label = _public_name(parts[0])
            module_names[label].update(name.strip("_") for name in parts[1:])
            texts[label].update(_docstrings_in(path))
    return texts, module_names


def _sources(root: Path) -> Iterator[Path]:
    # Only the library's own entries are walked: next to them lie all installed packages.
    for entry in sorted(root.iterdir() if root.is_dir() else ()):
        if entry.stem in sys.stdlib_module_names:
            yield from sorted(entry.rglob("*.py")) if entry.is_dir() else [entry] if entry.suffix == ".py" else []


def _public_name(name: str) -> str:
    """Returns the public name of a private module: `_pydecimal` is the source of `decimal`."""
    public = name.removeprefix("_py")
    return public if public in sys.stdlib_module_names else name.lstrip("_")


def _docstrings_in(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources hold escapes that newer parsers warn about
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return  # templates and test inputs that are not meant to parse
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = " ".join((ast.get_docstring(node) or "").split())
            if len(text) >= MIN_CHARS:
                yield text.encode("utf-8", "replace").decode("utf-8")


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and all statements in it. Expressions, of which there are many more, hold no docstrings."""
    yield node
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, name, None)
        for child in inner if isinstance(inner, list) else ():
            yield from _statements(child)


def _pattern(names: Iterable[str], whole_word: bool) -> re.Pattern[str]:
    """Returns a pattern for a class name, also inside words (`LoggingError`), unless the name is very short."""
    around = r"(?<![^\W_])%s(?![^\W_])"
    longest_first = sorted(filter(None, names), key=lambda name: (-len(name), name))
    alternatives = [around % re.escape(n) if whole_word or len(n) < 3 else re.escape(n) for n in longest_first]
    return re.compile("|".join(alternatives) or r"(?!)", re.IGNORECASE)


def _unambiguous(rows: list[Example]) -> list[Example]:
    """Drops repeated rows, and every text that was found in two packages: it has no right answer."""
    labels_of = defaultdict(set)
    for row in rows:
        labels_of[row.text.casefold()].add(row.label)
    unique = {row.text.casefold(): row for row in sorted(rows, key=lambda row: row.text)}
    return [row for key, row in unique.items() if len(labels_of[key]) == 1]


def _capped(rows: list[Example]) -> list[Example]:
    kept: list[Example] = []
    sizes: Counter[str] = Counter()
    for row in sorted(rows, key=lambda row: text_hash(row.text)):
        sizes[row.label] += 1
        if sizes[row.label] <= MAX_PER_CLASS:
            kept.append(row)
    return kept
