"""Blocks of README.md and of the pages of docs/, and the parts of pages that tests generate.

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; `--write-docs` writes it.
"""

import re
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def text_of(page: str) -> str:
    """The text of a page of docs/, or of another one that is named by its path from the root."""
    path = DOCS / page if (DOCS / page).exists() else ROOT / page
    return path.read_text(encoding="utf-8")


def fenced_blocks(markdown: str) -> list[Block]:
    found = re.findall(r"^ *```([^\n]*)\n(.*?)^ *```$", markdown, re.MULTILINE | re.DOTALL)
    return [Block(language.strip(), text) for language, text in found]


def blocks(page: str, language: str) -> list[str]:
    return [block.text for block in fenced_blocks(text_of(page)) if block.language == language]


def part(page: Path, name: str) -> str:
    """What stands between the marks."""
    return _match(page.read_text(encoding="utf-8"), page, name)[2].strip()


def write_part(page: Path, name: str, text: str) -> None:
    content = page.read_text(encoding="utf-8")
    match = _match(content, page, name)
    new = f"{content[: match.start()]}{match[1]}\n{text}\n{match[3]}{content[match.end() :]}"
    page.write_text(new, encoding="utf-8")


def check_part(page: Path, name: str, text: str, writes: bool) -> None:
    """Compares a generated part, after writing it if `writes`. Tests take the fixture of the same name."""
    if writes:
        write_part(page, name, text)
    assert part(page, name) == text.strip(), f"{page.name}, {name}: not up to date; run this test with --write-docs"


def _match(content: str, page: Path, name: str) -> re.Match:
    found = re.search(rf"(<!-- begin {name} -->)\n(.*?)(<!-- end {name} -->)", content, re.DOTALL)
    assert found, f"{page.name} has no part {name!r}"
    return found
