"""The report page, a single HTML file without links to others, and the table of memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from hf_zero.recipes.charts import CLASSES, Chart, metric_names, points, sent_by_unit
from hf_zero.recipes.measured import Measured
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MEMORY_CLASSES, MIB


EVAL_LOSS = "eval_loss"
UNKNOWN = "–"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
MEMORY_NOTE = (
    "MiB, the largest that was measured between backward and optimizer step, summed over tensors. plan: what was told "
    "before the first step, as `hf-zero plan` tells it. DDP: what plain data parallelism would hold of the same "
    "model, without its buffers. Activations are not in it, nor what else makes a process's resident memory on CPUs: "
    "the interpreter, libraries, and what the allocator keeps."
)
SENT_NOTE = "MiB in one step, gathered and reduced together, the mean of the ranks."


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    name: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """The contents of the page.

    Args:
        title (`str`): the model's name.
        summary (`str`): what was trained on what, in a sentence.
        results (`list[tuple[str, str]]`): what came of it, by name: the first thing that is seen.
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
    results: list[tuple[str, str]]
    facts: list[tuple[str, str]]
    charts: list[Chart]
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    sample: str = ""
    command: str = ""
    configuration: str = ""

    def html(self) -> str:
        """Returns the page as HTML."""
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(vars(self))


def results_of(
    log: Sequence[dict[str, Any]], metric: str | None = None, greater_is_better: bool | None = None
) -> list[tuple[str, str]]:
    """Returns the results of the last evaluation and the best step, or the training loss if there was no evaluation.

    Args:
        log (`Sequence[dict]`): the entries of the training's log.
        metric (`str`, *optional*): by which steps are compared, as `metric_for_best_model`; by default the loss.
        greater_is_better (`bool`, *optional*): of that metric.
    """
    names = [name for name in [*metric_names(log), EVAL_LOSS] if points(log, name)[1]]
    results = [(_title(name), f"{points(log, name)[1][-1]:.4g}") for name in names]
    compared = f"eval_{(metric or 'loss').removeprefix('eval_')}"
    steps, values = points(log, compared)
    if values:
        best = (max if greater_is_better else min)(range(len(values)), key=values.__getitem__)
        results.append(("best step", f"{steps[best]} ({_title(compared)} {values[best]:.4g})"))
    losses = points(log, "loss")[1]
    return results or [("training loss", f"{value:.4g}") for value in losses[-1:]]


def _title(name: str) -> str:
    return "evaluation loss" if name == EVAL_LOSS else name.removeprefix("eval_").replace("_", " ")


def _held_nbytes(report: dict[str, int]) -> int:
    """The bytes of all tensor classes that a rank holds on its device."""
    return _sum(report, [name for _, name in MEMORY_CLASSES])


def memory_rows(per_rank: Sequence[dict[str, int]], planned: dict[str, int]) -> list[list[str]]:
    """Returns rows of MiB by tensor class: of each rank, as predicted, and for DDP.

    Args:
        per_rank (`Sequence[dict[str, int]]`): the fields of `MemoryReport`, by rank.
        planned (`dict[str, int]`): likewise, told before the first step; empty where that is not known.
    """
    on_device = [name for _, name in MEMORY_CLASSES]
    rows = []
    for title, names in (*((title, [name]) for title, name in CLASSES), ("all on the device", on_device)):
        held = [_sum(report, names) for report in per_rank]
        ddp = max(_sum(report, [f"ddp_{name}" for name in names]) for report in per_rank)
        plan = _mib(_sum(planned, names)) if planned else UNKNOWN
        if any(held) or ddp or _sum(planned, names):
            rows.append([title, *map(_mib, held), plan, _mib(ddp) if ddp else UNKNOWN])
    return rows


def _sum(nbytes: dict[str, int], names: Sequence[str]) -> int:
    return sum(nbytes.get(name, 0) for name in names)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"


def tables_of(log: Sequence[dict[str, Any]], measured: Measured) -> list[Table]:
    """Returns the tables of the page.

    Args:
        log (`Sequence[dict]`): the entries of the training's log.
        measured ([`Measured`]): what its watchers have found.
    """
    tables, per_rank, step = [], measured.memory, measured.step
    results = [[name.removeprefix("eval_"), *_first_and_last(log, name)] for name in [EVAL_LOSS, *metric_names(log)]]
    results = [row for row in results if row[1]]
    if results:
        tables.append(Table("results", "Evaluation", ["", "first", "last"], results))
    if per_rank and any(per_rank):
        ranks = [f"rank {rank}" for rank in range(len(per_rank))]
        tables.append(
            Table(
                "memory",
                "Tensors of each rank",
                ["", *ranks, "plan", "DDP"],
                memory_rows(per_rank, measured.planned),
                MEMORY_NOTE,
            )
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


def numbers_of(
    trainer: ZeroTrainer, precision: str, log: list[dict[str, Any]], measured: Measured
) -> list[tuple[str, str]]:
    """Returns the numbers below the results, as far as they are known."""
    # on CPUs a process is measured: its libraries, activations and what its allocator keeps are in it
    is_process = trainer.args.device.type == "cpu"
    peak = "peak resident memory of a process" if is_process else "peak memory allocated on a device"
    formats = (
        ("training time", "zero/seconds", "{:.0f} s"),
        ("last training loss", "loss", "{:.4g}"),
        ("tokens per second", "zero/tokens_per_second", "{:,.0f}"),
        ("rows per second", "zero/rows_per_second", "{:,.0f}"),
        ("MFU", "zero/mfu", "{:.1%}"),
        (peak, "zero/peak_memory_mib", "{:,.0f} MiB"),
    )
    numbers = [("ZeRO stage", str(trainer.args.zero_stage)), ("ranks", str(trainer.args.world_size))]
    numbers += [("precision", precision), ("steps", str(trainer.state.global_step))]
    for name, key, form in formats:
        value = next((entry[key] for entry in reversed(log) if entry.get(key) is not None), None)
        if value is not None:
            numbers.append((name, form.format(value)))
    if any(measured.memory):
        numbers.append(
            ("tensors of a rank, without activations", f"{max(map(_held_nbytes, measured.memory)) / MIB:,.0f} MiB")
        )
    return numbers


def memory_table(per_rank: Sequence[dict[str, int]], zero_stage: int) -> str:
    """Returns a table in plain text of the measured MiB of each tensor class.

    Args:
        per_rank (`Sequence[dict[str, int]]`): One dict per rank, with the fields of `MemoryReport`, in bytes.
        zero_stage (`int`): Named in the heading.

    Returns:
        `str`: Lines of equal width: the largest rank, what plain data parallelism (DDP) would hold, and their ratio.
        Our buffers are counted, those of DDP are not.
    """
    lines = [f"{'MiB per rank, measured':24}{f'ZeRO stage {zero_stage}':>14}{'DDP':>10}{'ratio':>8}"]
    totals = [0, 0]
    *classes, (buffer_title, buffer_name) = MEMORY_CLASSES
    for title, name in classes:
        held = max(report[name] for report in per_rank)
        ddp = max(report[f"ddp_{name}"] for report in per_rank)
        totals = [totals[0] + held, totals[1] + ddp]
        lines.append(_memory_line(title, held, ddp))
    buffers = max(report[buffer_name] for report in per_rank)
    lines.append(f"{buffer_title:24}{buffers / MIB:>14.1f}{'-':>10}{'-':>8}")
    totals[0] += buffers
    lines.append(_memory_line("total", *totals))
    return "\n".join(lines)


def _memory_line(title: str, held: int, ddp: int) -> str:
    return f"{title:24}{held / MIB:>14.1f}{ddp / MIB:>10.1f}{held / max(ddp, 1):>8.2f}"
