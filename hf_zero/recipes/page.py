"""The report page, one HTML file without links to others: charts, which matplotlib draws, and tables."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jinja2

from hf_zero.recipes.measured import Measured, Moment, Step
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MEMORY_CLASSES, MIB, NO_METRICS


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html.jinja")
EVAL_LOSS = "eval_loss"
UNKNOWN = "–"
MEMORY_NOTE = (
    "MiB, the largest that was measured between backward and optimizer step, summed over tensors. plan: what was told "
    "before the first step, as `hf-zero plan` tells it. DDP: what plain data parallelism would hold of the same "
    "model, without its buffers. Activations are not in it, nor what else makes a process's resident memory on CPUs: "
    "the interpreter, libraries, and what the allocator keeps."
)
SENT_NOTE = "MiB in one step, gathered and reduced together, the mean of the ranks."
SIZE = (5.0, 3.0)  # inches: on a phone 10-point letters then stay readable
TRAINING, EVALUATION = "#3465a4", "#e07b39"
COLORS = ("#3465a4", "#e07b39", "#4e9a5b", "#b5bac2", "#a05195", "#c8a415")
CLASSES = (*MEMORY_CLASSES, ("activations and other", "activation_nbytes"), ("on the host", "host_nbytes"))
ON_DEVICE = [name for _, name in MEMORY_CLASSES]
DDP_CLASSES = ("ddp_parameter_nbytes", "ddp_gradient_nbytes", "ddp_optimizer_nbytes")
MAX_RANKS_DRAWN = 4
MAX_UNITS_DRAWN = 24


class Table(NamedTuple):
    """A table of the page."""

    name: str  # in the page's HTML
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def page_html(**contents: Any) -> str:
    """Returns the page as HTML, of what report.html.jinja names: `title` and `summary`; `results` and `facts`, names
    with texts, of which the former are seen first; `tables`; `command`, which repeats the run; `configuration`, YAML;
    and where there are such, `charts`, and `notes` and `sample` of the data."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    optional: dict[str, Any] = {"kind": "training report", "charts": (), "notes": (), "sample": ""}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render({**optional, **contents})


def results_of(
    log: Sequence[dict[str, Any]], metric: str | None = None, greater_is_better: bool | None = None
) -> list[tuple[str, str]]:
    """Returns the results of the last evaluation and the best step by a metric, by default the loss, or the training
    loss if there was no evaluation."""
    series = {name: points(log, name)[1] for name in [*metric_names(log), EVAL_LOSS]}
    results = [(title_of(name), f"{values[-1]:.4g}") for name, values in series.items() if values]
    compared = f"eval_{(metric or 'loss').removeprefix('eval_')}"
    steps, values = points(log, compared)
    if values:
        best = (max if greater_is_better else min)(range(len(values)), key=values.__getitem__)
        results.append(("best step", f"{steps[best]} ({title_of(compared)} {values[best]:.4g})"))
    losses = points(log, "loss")[1]
    return results or [("training loss", f"{value:.4g}") for value in losses[-1:]]


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
        held = max(_sum(report, ON_DEVICE) for report in measured.memory) / MIB
        numbers.append(("tensors of a rank, without activations", f"{held:,.0f} MiB"))
    return numbers


def tables_of(log: Sequence[dict[str, Any]], measured: Measured) -> list[Table]:
    """Returns the tables of the page that there is data for."""
    series = {name.removeprefix("eval_"): points(log, name)[1] for name in [EVAL_LOSS, *metric_names(log)]}
    results = [[name, f"{values[0]:.4g}", f"{values[-1]:.4g}"] for name, values in series.items() if values]
    tables = [Table("results", "Evaluation", ["", "first", "last"], results)]
    if any(measured.memory):
        head = ["", *(f"rank {rank}" for rank in range(len(measured.memory))), "plan", "DDP"]
        rows = memory_rows(measured.memory, measured.planned)
        tables.append(Table("memory", "Tensors of each rank", head, rows, MEMORY_NOTE))
    if measured.step is not None:
        sent = sent_by_unit(measured.step)
        sent += [("all", sum(nbytes for _, nbytes in sent))] if sent else []
        rows = [[name, f"{nbytes / MIB:.4g}"] for name, nbytes in sent]
        title = f"{measured.step.exchanged} per rank and step, by unit"
        tables.append(Table("sent", title, ["unit", "MiB"], rows, SENT_NOTE))
    return [table for table in tables if table.rows]


def memory_rows(per_rank: Sequence[dict[str, int]], planned: dict[str, int]) -> list[list[str]]:
    """Returns rows of MiB by tensor class: of each rank, as planned, and for DDP, by the fields of `MemoryReport`."""
    rows = []
    for title, names in (*((title, [name]) for title, name in CLASSES), ("all on the device", ON_DEVICE)):
        held, plan = [_sum(report, names) for report in per_rank], _sum(planned, names)
        ddp = max(_sum(report, [f"ddp_{name}" for name in names]) for report in per_rank)
        if any(held) or ddp or plan:
            rows.append([title, *map(_mib, held), _mib(plan) if planned else UNKNOWN, _mib(ddp) if ddp else UNKNOWN])
    return rows


def memory_table(per_rank: Sequence[dict[str, int]], zero_stage: int) -> str:
    """Returns a table in plain text of the MiB of each tensor class, by the fields of `MemoryReport`: of the largest
    rank, what plain data parallelism (DDP) would hold, without its buffers, and their ratio."""
    rows = [
        (title, max(report[name] for report in per_rank), max(report.get(f"ddp_{name}", 0) for report in per_rank))
        for title, name in MEMORY_CLASSES
    ]
    rows.append(("total", sum(held for _, held, _ in rows), sum(ddp for *_, ddp in rows)))
    lines = [f"{'MiB per rank, measured':24}{f'ZeRO stage {zero_stage}':>14}{'DDP':>10}{'ratio':>8}"]
    for title, held, ddp in rows:
        compared = f"{ddp / MIB:>10.1f}{held / ddp:>8.2f}" if ddp else f"{'-':>10}{'-':>8}"
        lines.append(f"{title:24}{held / MIB:>14.1f}{compared}")
    return "\n".join(lines)


def _sum(nbytes: Mapping[str, int], names: Sequence[str]) -> int:
    return sum(nbytes.get(name, 0) for name in names)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f}"


@dataclass(frozen=True)
class Chart:
    """A chart of the report."""

    name: str  # of its file, without an ending
    title: str
    figure: "Figure"
    is_of_step: bool = False  # whether it shows one step; all others show the run, and are of one size

    def save(self, folder: Path) -> None:
        """Writes the chart as PNG."""
        self.figure.savefig(folder / f"{self.name}.png", dpi=120)

    def svg(self) -> str:
        """Returns the chart as an SVG element for a page."""
        stream = io.StringIO()
        self.figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = stream.getvalue()
        return text[text.index("<svg") :]


def draw(log: Sequence[dict[str, Any]], step: Step | None) -> list[Chart]:
    """Draws all charts that there is data for."""
    evaluated = {name.replace("/", "_"): (f"Evaluation: {title_of(name)}", name) for name in metric_names(log)}
    curves = {
        "loss": ("Loss", "loss", "eval_loss"),
        **evaluated,
        "learning_rate": ("Learning rate", "learning_rate"),
        "grad_norm": ("Gradient norm", "grad_norm"),
        "speed": ("Tokens per second, all ranks", "zero/tokens_per_second"),
    }
    if not points(log, "zero/tokens_per_second")[0]:
        curves["speed"] = ("Rows per second, all ranks", "zero/rows_per_second")
    charts = [_curves(log, name, *what) for name, what in curves.items()]
    return [chart for chart in (*charts, _memory(step), _wire(step)) if chart is not None]


def points(log: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a number was logged, and the numbers; the last one of each step."""
    found = {entry["step"]: entry[key] for entry in log if isinstance(entry.get(key), (int, float))}
    return list(found), list(found.values())


def metric_names(log: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the names of the metrics of evaluations, without the loss."""
    names = dict.fromkeys(name for entry in log for name in entry if name.startswith("eval_"))
    return [name for name in names if name != EVAL_LOSS and not NO_METRICS.match(name)]


def title_of(name: str) -> str:
    """Returns the name of a metric as a reader sees it."""
    return "evaluation loss" if name == EVAL_LOSS else name.removeprefix("eval_").replace("_", " ")


def _figure(height: float = SIZE[1]) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(SIZE[0], height), layout="constrained")


def _tidy(axes: "Axes", numbers: Literal["x", "y"] = "y") -> None:
    axes.grid(axis=numbers, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _curves(log: Sequence[dict[str, Any]], name: str, title: str, *keys: str) -> Chart | None:
    """Draws numbers of the log over the steps of the run, from 0 to the last."""
    from matplotlib.ticker import MaxNLocator

    series = {key: points(log, key) for key in keys if points(log, key)[0]}
    if not series:
        return None
    figure = _figure()
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(title.rpartition(": ")[2].partition(",")[0].lower())
    _tidy(axes)
    last = max(1, *(entry["step"] for entry in log))
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    for key, (xs, ys) in series.items():
        if key.startswith("eval_"):
            axes.plot(xs, ys, color=EVALUATION, linewidth=0.8, linestyle=":")
            axes.plot(xs, ys, color=EVALUATION, label="evaluation", linestyle="", marker="o", markersize=6)
        else:
            marker = "o" if len(xs) == 1 else None  # a line of one point is not seen
            axes.plot(xs, ys, color=TRAINING, label="training", linewidth=1.6, marker=marker, markersize=3.5)
    if len(keys) > 1:
        axes.legend(frameon=False)
    elif min(ys) >= 0:
        axes.set_ylim(0, 1.06 * max(ys) or 1)
    return Chart(name, title, figure)


def _memory(step: Step | None) -> Chart | None:
    """Draws stacked bytes by tensor class over the moments of one step, with a panel for each rank."""
    if step is None:
        return None
    ranks = drawn_ranks(step)
    figure = _figure(height=_height_of_step(step))
    panels: Any = figure.subplots(len(ranks), sharex=True, sharey=True, squeeze=False)[:, 0]
    for rank, axes in zip(ranks, panels, strict=True):
        _stack(axes, step.moments[rank])
        axes.set_ylabel(f"rank {rank}, MiB")
    panels[-1].set_xlabel("moments of the step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return Chart("memory", f"Memory by tensor class over step {step.number}", figure, is_of_step=True)


def _stack(axes: "Axes", moments: list[Moment]) -> None:
    moments = [*moments, moments[-1]]  # the last one is seen too
    rows = [
        (title, color, [moment.nbytes.get(name, 0) / MIB for moment in moments])
        for (title, name), color in zip(CLASSES, COLORS, strict=True)
    ]
    titles, colors, values = zip(*(row for row in rows if any(row[2])), strict=True)
    axes.stackplot(range(len(moments)), *values, labels=titles, colors=colors, step="post")
    ddp = max(_sum(moment.nbytes, DDP_CLASSES) for moment in moments) / MIB
    axes.axhline(ddp, color="black", linestyle="--", linewidth=1.2, label="DDP, without buffers")
    _tidy(axes)
    axes.margins(x=0)
    axes.set_ylim(0, 1.15 * max(ddp, max(map(sum, zip(*values, strict=True)))))
    starts = {moment.phase: at for at, moment in reversed(list(enumerate(moments)))}
    axes.set_xticks(list(starts.values()), list(starts), ha="left")
    for start in starts.values():
        axes.axvline(start, color="white", linewidth=0.8)


def drawn_ranks(step: Step) -> list[int]:
    """Returns all ranks if they are few, otherwise those with the lowest and the highest peak."""
    if len(step.moments) <= MAX_RANKS_DRAWN:
        return list(range(len(step.moments)))
    names = [name for _, name in CLASSES]
    most = [max(_sum(moment.nbytes, names) for moment in moments) for moments in step.moments]
    return sorted({most.index(min(most)), most.index(max(most))})


def _wire(step: Step | None) -> Chart | None:
    """Draws the MiB that a rank sends or reads of each unit. Units beyond the first ones are summed."""
    shown = _drawn_units(step) if step is not None else []
    if not shown:
        return None
    figure = _figure(height=_height_of_step(step))
    axes = figure.add_subplot()
    axes.barh(range(len(shown)), [nbytes / MIB for _, nbytes in shown], color=COLORS[0])
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("MiB, mean of the ranks")
    _tidy(axes, "x")
    return Chart("wire", f"{step.exchanged} per rank in step {step.number}, by unit", figure, is_of_step=True)


def _drawn_units(step: Step) -> list[tuple[str, float]]:
    rows = sent_by_unit(step)
    shown, others = rows[:MAX_UNITS_DRAWN], rows[MAX_UNITS_DRAWN:]
    return [*shown, (f"{len(others)} others", sum(nbytes for _, nbytes in others))] if others else shown


def _height_of_step(step: Step) -> float:
    """The height in inches of both charts of a step, which stand side by side."""
    return max(0.6 + 2.3 * len(drawn_ranks(step)), 1.0 + 0.24 * len(_drawn_units(step)))


def sent_by_unit(step: Step) -> list[tuple[str, float]]:
    """Returns the bytes that a rank sent of each unit, the mean of all ranks, in the order of the units."""
    names = dict.fromkeys(name for sent in step.sent_nbytes for name in sent)
    means = {name: sum(sent.get(name, 0) for sent in step.sent_nbytes) / len(step.sent_nbytes) for name in names}
    return [(name, nbytes) for name, nbytes in means.items() if nbytes]
