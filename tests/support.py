"""The matrix of docs/support.md, from the results of the tests that carry `@pytest.mark.support`.

    @pytest.mark.support("PEFT: LoRA", area="Adapters")
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_lora_trains_as_in_ddp(stage): ...

A test's stage is its parameter of that name; a test that goes through several itself names them (`stages=(1, 2, 3)`).
Of one with a parameter `offload` the column is what is offloaded ("optimizer", "params"), which may stand among the
named stages too. A test that something is refused says `refused=True`. Each cell is what all tests of that feature and
column said.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


PAGE = Path(__file__).parents[1] / "docs" / "support.md"
COLUMNS = (0, 1, 2, 3, "optimizer", "params")
YES, REFUSED, FAILED = "yes", "refused", "fails"
SEPARATOR = " · "
HEADER = """# What works at which stage

`make test-all` writes this page from the results of tests on two ranks (gloo), most of which compare with plain
`Trainer` or DDP. Each line lists the features that were tested and work at the stages in bold. *optimizer* and
*params* are values of `--zero_offload`. *refused* means that hf_zero raises an error of one line, whose text the test
checks. [Models](models.md) have their own page.

## Devices

- CPU (gloo messages and shared memory; Linux, torch 2.13.0): everything on this page. `hf-zero check` and a part of
  `tests/gpu` also ran with torch 2.11.0+cu130 and transformers 5.17.0, without a GPU. With transformers 5.17.0, the
  oldest supported version, 1,168 of 1,171 tests of `make test-oldest` passed (23 November 2026). The other three
  check a table of the documentation, and tensor parallelism over a subset of the ranks, which needs a newer version.
- CUDA and NCCL: nothing. No GPU has ever run hf_zero. The order of work on streams is tested on a [simulated
  accelerator](design.md#tests-on-a-simulated-accelerator) and on a test device.

On a machine with NVIDIA GPUs, run these commands in order. One GPU is enough; with two, they also test NCCL.

```bash
hf-zero check
make test-gpu
python -m benchmarks.gpu
```

`hf-zero check` takes about two minutes. `make test-gpu` compares training with delayed streams, offload, fp16,
compilation and flash attention with plain torch. `benchmarks.gpu` measures tokens/s, MFU and peak memory for 0.5 to 8
B parameters. If time is short, run the most important parts of all three with one command, in a clone of the
repository:

```bash
python -m benchmarks.try_gpu --seconds 560 --output found
```
"""


@dataclass(frozen=True)
class Claim:
    """What one test says: that a feature works in some columns (stages, or what is offloaded), or is refused there."""

    area: str
    feature: str
    stages: tuple[int | str, ...]
    says: str


@dataclass(frozen=True)
class Cell:
    area: str
    feature: str
    stage: int | str


def claim_of(item: pytest.Item) -> Claim | None:
    """The claim of a collected test, or `None` when it carries no mark.

    Raises:
        `pytest.UsageError`: for a mark without stage.
    """
    mark = item.get_closest_marker("support")
    if mark is None:
        return None
    params = item.callspec.params if hasattr(item, "callspec") else {}
    column = params.get("offload", params.get("stage"))
    stages = mark.kwargs.get("stages", (column,) if column is not None else None)
    if stages is None:
        raise pytest.UsageError(f"{item.nodeid}: the mark `support` needs a parameter `stage`, or `stages=(1, 2, 3)`")
    says = REFUSED if mark.kwargs.get("refused") else YES
    return Claim(mark.kwargs["area"], mark.args[0].format(**params), tuple(stages), says)


def cells(results: Iterable[tuple[Claim, bool]]) -> dict[Cell, str]:
    """What all tests together say of each feature and stage.

    Args:
        results (iterable): each claim, and whether its test passed.
    """
    table: dict[Cell, str] = {}
    for claim, passed in results:
        for stage in claim.stages:
            cell = Cell(claim.area, claim.feature, stage)
            says = claim.says if passed else FAILED
            table[cell] = says if table.get(cell, says) == says else FAILED
    return table


def render(table: dict[Cell, str]) -> str:
    """The page, with the features of each area by the stages at which they were tested."""
    lines = [HEADER]
    for area in sorted({cell.area for cell in table}):
        lines += [f"## {area}", ""]
        by_stages: dict[str, list[str]] = {}
        for feature in sorted({cell.feature for cell in table if cell.area == area}, key=str.lower):
            row = [table.get(Cell(area, feature, column)) for column in COLUMNS]
            found = {
                says: [str(c) for c, each in zip(COLUMNS, row) if each == says] for says in (YES, REFUSED, FAILED)
            }
            shown = [" ".join([says] * (says != YES) + columns) for says, columns in found.items() if columns]
            by_stages.setdefault(", ".join(shown), []).append(feature)
        lines += [f"- **{stages}**: {SEPARATOR.join(names)}" for stages, names in sorted(by_stages.items())]
        lines.append("")
    return "\n".join(lines)


def parse(page: str) -> dict[Cell, str]:
    """The cells of a page that `render` made."""
    table, area, by_name = {}, "", {str(column): column for column in COLUMNS}
    for line in page.splitlines():
        if line.startswith("## "):
            area = line[3:]
        elif line.startswith("- **"):
            stages, _, features = line.removeprefix("- **").partition("**: ")
            for words in stages.split(", "):
                says = next((says for says in (REFUSED, FAILED) if says in words), YES)
                columns = [by_name[word] for word in words.split() if word in by_name]
                for feature in features.split(SEPARATOR):
                    table.update({Cell(area, feature, column): says for column in columns})
    return table


class Recorder:
    """The pytest plugin: notes what the tests that ran said, and writes it into the page when asked to. Cells that no
    test claims any more are taken out by hand: `tests/test_support.py` names them.

    Args:
        writes (`bool`): whether to write the page at the end.
    """

    def __init__(self, writes: bool):
        self.writes = writes
        self.claims: dict[str, Claim] = {}  # of all that was collected, by node id
        self.results: dict[str, bool] = {}  # of what ran

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        # before any is left out: the page has the claims of all
        self.claims = {item.nodeid: claim for item in items if (claim := claim_of(item)) is not None}
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid in self.claims and not report.skipped and (report.when == "call" or report.failed):
            self.results[report.nodeid] = report.passed and self.results.get(report.nodeid, True)

    def cells(self) -> dict[Cell, str]:
        return cells((self.claims[nodeid], passed) for nodeid, passed in self.results.items())

    def pytest_sessionfinish(self) -> None:
        if self.writes and self.results:
            written = parse(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
            PAGE.write_text(render({**written, **self.cells()}), encoding="utf-8")
