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
COLUMNS = {0: "stage 0", 1: "stage 1", 2: "stage 2", 3: "stage 3"}
COLUMNS |= {"optimizer": "optimizer on CPU", "params": "params on CPU"}
YES, REFUSED, FAILED, UNTESTED = "yes", "refused", "**fails**", ""
HEADER = """# What works at which stage

Every cell is the result of tests on two ranks (gloo), most of them against plain `Trainer` or plain DDP; this page is
written by `make test-all` and never by hand. *refused*: with one clear line, whose text the test checks. Empty: no
test says anything about it. Architectures have [a page of their own](models.md).

The last columns are of runs that keep masters, optimizer state and gradients in the host's memory
(`--zero_offload optimizer`), or the parameters too (`params`, at stage 3): see [memory](memory.md).

What was run on which device:

- CPUs (gloo, through shared memory and by messages; Linux, torch 2.13.0): all that this page says, `hf-zero check`,
  the tests of `tests/gpu` in the full tier, and `python -m benchmarks.gpu --dry`. With torch 2.11.0+cu130 and
  transformers 5.17.0, without a GPU and without `datasets`: `hf-zero check`, and the tests of `tests/gpu` for memory,
  features and backends.
- CUDA and NCCL: nothing yet. Waits between streams were tried on a [simulated accelerator](design.md), and ranks that
  share one device in a loop-back on CPUs alone.

Three commands try a machine with NVIDIA GPUs. One GPU is enough; two try NCCL itself. In this order:

```bash
hf-zero check
make test-gpu
python -m benchmarks.gpu
```

The first says in a minute or two what is right and what is wrong, with the line for a bug report. The second tests
parity while streams are late: stages, shard groups, shared sequences, losses and MLPs in parts, values in few bits,
offload; and memory, fp16, fused optimizers, `torch.compile`, flash attention, ranks of gloo on one device, and NCCL
with one rank. The third measures tokens/s, MFU and peak memory at 0.5 to 8 B parameters, and the largest model, and
leaves the raw numbers in `benchmarks/results`.

Where there are few minutes, or nothing may be installed, one command does the most telling parts of all three, in
that order and each within its time, from a copy of the repository. What was found until the time is up stays:

```bash
python -m benchmarks.try_gpu --seconds 560 --output found
```

With transformers 5.17.0, the oldest that is allowed, 1,168 of the 1,171 quick tests of all rooms passed (`make
test-oldest`; 23 November 2026, torch 2.13.0, huggingface_hub 1.33.0, PEFT 0.21.2, TRL 1.16.0). Tensor parallelism over
some of the ranks needs a newer transformers and is skipped. Two tests found a table of `reliability.md` behind the
code, which no version changes; it was mended after that run.
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
    """The page, with one table for each area, rows in alphabetical order."""
    lines = [HEADER]
    for area in sorted({cell.area for cell in table}):
        lines += [f"## {area}", "", "| | " + " | ".join(COLUMNS.values()) + " |"]
        lines.append("|---|" + "---|" * len(COLUMNS))
        for feature in sorted({cell.feature for cell in table if cell.area == area}, key=str.lower):
            row = [table.get(Cell(area, feature, stage), UNTESTED) for stage in COLUMNS]
            lines.append(f"| {feature} | " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def parse(page: str) -> dict[Cell, str]:
    """The cells of a page that `render` made."""
    table, area = {}, ""
    for line in page.splitlines():
        if line.startswith("## "):
            area = line[3:]
        elif area and line.startswith("| ") and not line.startswith("| |"):
            feature, *row = [part.strip() for part in line.strip("|").split("|")]
            table.update({Cell(area, feature, stage): says for stage, says in zip(COLUMNS, row) if says})
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
