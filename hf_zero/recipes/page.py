"""`report.html`: one file that shows a run, and needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from hf_zero.recipes.charts import CLASSES, Chart, metric_names, points, sent_by_unit
from hf_zero.recipes.step_trace import Step
from hf_zero.trainer.card import MIB


TEMPLATE = Path(__file__).with_name("report.html.jinja")
MEMORY_NOTE = (
    "MiB, the largest that was measured between backward and optimizer step. DDP: what plain data parallelism would "
    "hold of the same model, without its buffers."
)
SENT_NOTE = "MiB in one step, gathered and reduced together, the mean of the ranks."


@dataclass(frozen=True)
class Table:
    """One table of the page; cells are shown as they are."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Args:
        title (`str`): the model's name.
        summary (`str`): what was trained on what, in a sentence.
        facts (`list[tuple[str, str]]`): the numbers at its top, by name.
        charts (`list[Chart]`): may be empty, where they cannot be drawn.
        tables (`list[Table]`): below them.
        notes (`list[str]`): what there is to say of the data.
        sample (`str`): its first row.
        command (`str`): that repeats the run.
        configuration (`str`): YAML.
    """

    title: str
    summary: str
    facts: list[tuple[str, str]]
    charts: list[Chart]
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    sample: str = ""
    command: str = ""
    configuration: str = ""

    def html(self) -> str:
        """The whole page."""
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(vars(self))


def memory_rows(per_rank: Sequence[dict[str, int]]) -> list[list[str]]:
    """MiB by tensor class: each rank, and DDP.

    Args:
        per_rank (`Sequence[dict[str, int]]`): the fields of `MemoryReport`, by rank.
    """
    rows = []
    for title, name in CLASSES:
        held = [report.get(name, 0) for report in per_rank]
        ddp = max(report.get(f"ddp_{name}", 0) for report in per_rank)
        if any(held) or ddp:
            rows.append([title, *(f"{nbytes / MIB:.2f}" for nbytes in held), f"{ddp / MIB:.2f}" if ddp else "–"])
    return rows


def tables_of(log: Sequence[dict[str, Any]], per_rank: Sequence[dict[str, int]], step: Step | None) -> list[Table]:
    """The tables of a run.

    Args:
        log (`Sequence[dict]`): the entries of the training's log.
        per_rank (`Sequence[dict[str, int]]`): the largest values of `MemoryReport`'s fields, by rank.
        step (`Step`, *optional*): the one that was watched.
    """
    tables = []
    results = [[name.removeprefix("eval_"), *_first_and_last(log, name)] for name in ["eval_loss", *metric_names(log)]]
    results = [row for row in results if row[1]]
    if results:
        tables.append(Table("results", "Evaluation", ["", "first", "last"], results))
    if per_rank and any(per_rank):
        ranks = [f"rank {rank}" for rank in range(len(per_rank))]
        tables.append(
            Table("memory", "Memory per rank", ["", *ranks, "DDP"], memory_rows(per_rank), MEMORY_NOTE),
        )
    sent = sent_by_unit(step) if step is not None else []
    if sent:
        rows = [[name, f"{nbytes / MIB:.4g}"] for name, nbytes in sent]
        rows.append(["all", f"{sum(nbytes for _, nbytes in sent) / MIB:.4g}"])
        tables.append(Table("sent", f"{step.exchanged} per rank and step, by unit", ["unit", "MiB"], rows, SENT_NOTE))
    return tables


def _first_and_last(log: Sequence[dict[str, Any]], name: str) -> list[str]:
    values = points(log, name)[1]
    return [f"{values[0]:.4g}", f"{values[-1]:.4g}"] if values else ["", ""]
