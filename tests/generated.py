"""Parts of pages that tests make: between `<!-- begin NAME -->` and `<!-- end NAME -->`, written by `--write-docs`."""

import re
from pathlib import Path


def part(page: Path, name: str) -> str:
    """What stands between the marks."""
    return _match(page.read_text(encoding="utf-8"), page, name)[2].strip()


def write_part(page: Path, name: str, text: str) -> None:
    """Puts something else there."""
    content = page.read_text(encoding="utf-8")
    match = _match(content, page, name)
    new = f"{content[: match.start()]}{match[1]}\n{text}\n{match[3]}{content[match.end() :]}"
    page.write_text(new, encoding="utf-8")


def check_part(page: Path, name: str, text: str, writes: bool) -> None:
    """Compares, or writes if asked to.

    Args:
        page (`Path`): of docs/.
        name (`str`): of the part.
        text (`str`): what is to stand there.
        writes (`bool`): whether the tests run with `--write-docs`.
    """
    if writes:
        write_part(page, name, text)
    assert part(page, name) == text.strip(), f"{page.name}, {name}: not up to date; run this test with --write-docs"


def _match(content: str, page: Path, name: str) -> re.Match:
    found = re.search(rf"(<!-- begin {name} -->)\n(.*?)(<!-- end {name} -->)", content, re.DOTALL)
    assert found, f"{page.name} has no part {name!r}"
    return found
