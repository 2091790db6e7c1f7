"""The report's charts, drawn by matplotlib."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.recipes.measured import Moment, Step
from hf_zero.trainer.card import MEMORY_CLASSES, MIB, NO_METRICS


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.0, 3.0)  # inches: on a phone 10-point letters then stay readable
TRAINING, EVALUATION = "#3465a4", "#e07b39"
COLORS = ("#3465a4", "#e07b39", "#4e9a5b", "#b5bac2", "#a05195", "#c8a415")
CLASSES = (
    *MEMORY_CLASSES,
    ("activations and other", "activation_nbytes"),
    ("on the host", "host_nbytes"),
)
MAX_RANKS_DRAWN = 4
MAX_UNITS_DRAWN = 24


@dataclass(frozen=True)
class Chart:
    """A chart of the report.

    Args:
        name (`str`): of its file, without an ending.
        title (`str`): above it.
        figure (`Figure`): drawn.
        is_of_step (`bool`): whether it shows one step; all others show the run, and are of one size.
    """

    name: str
    title: str
    figure: "Figure"
    is_of_step: bool = False

    def save(self, folder: Path) -> str:
        """Writes the chart as PNG, and returns the name of the file."""
        self.figure.savefig(folder / f"{self.name}.png", dpi=120)
        return f"{self.name}.png"

    def svg(self) -> str:
        """Returns the chart as an SVG element for a page."""
        stream = io.StringIO()
        self.figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        text = stream.getvalue()
        return text[text.index("<svg") :]


def draw(log: Sequence[dict[str, Any]], step: Step | None) -> list[Chart]:
    """Draws all charts that there is data for.

    Args:
        log (`Sequence[dict]`): the entries of the training's log.
        step (`Step`, *optional*): the one that was watched.
    """
    charts = [
        _loss(log),
        *_metrics(log),
        _line(log, "learning_rate", "learning_rate", "Learning rate"),
        _line(log, "grad_norm", "grad_norm", "Gradient norm"),
        _line(log, "zero/tokens_per_second", "speed", "Tokens per second, all ranks"),
        _line(log, "zero/rows_per_second", "speed", "Rows per second, all ranks"),
        _memory(step),
        _wire(step),
    ]
    return [chart for chart in charts if chart is not None]


def points(log: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a number was logged, and the numbers; the last one of each step."""
    found = {entry["step"]: entry[key] for entry in log if isinstance(entry.get(key), (int, float))}
    return list(found), list(found.values())


def metric_names(log: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the names of the metrics of evaluations, without the loss."""
    names = dict.fromkeys(name for entry in log for name in entry if name.startswith("eval_"))
    return [name for name in names if name != "eval_loss" and not NO_METRICS.match(name)]


def _figure(width: float = SIZE[0], height: float = SIZE[1]) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axes(figure: "Figure", ylabel: str, last_step: int) -> "Axes":
    """Adds axes over the steps of the run, from 0 to the last."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    _tidy(axes)
    last_step = max(1, last_step)
    axes.set_xlim(-0.02 * last_step, 1.02 * last_step)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    return axes


def _last_step(log: Sequence[dict[str, Any]]) -> int:
    return max((entry["step"] for entry in log), default=0)


def _tidy(axes: "Axes") -> None:
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def _plot(axes: "Axes", key: str, xs: list[int], ys: list[float], label: str | None = None) -> None:
    """Plots numbers of training as a line, and numbers of evaluations as markers."""
    if key.startswith("eval_"):
        axes.plot(xs, ys, color=EVALUATION, linewidth=0.8, linestyle=":")
        axes.plot(xs, ys, color=EVALUATION, label=label, linestyle="", marker="o", markersize=6)
    else:
        marker = "o" if len(xs) == 1 else None  # a line of one point is not seen
        axes.plot(xs, ys, color=TRAINING, label=label, linewidth=1.6, marker=marker, markersize=3.5)


def _loss(log: Sequence[dict[str, Any]]) -> Chart | None:
    series = [(label, key, *points(log, key)) for label, key in (("training", "loss"), ("evaluation", "eval_loss"))]
    series = [each for each in series if each[2]]
    if not series:
        return None
    figure = _figure()
    axes = _axes(figure, "loss", _last_step(log))
    for label, key, xs, ys in series:
        _plot(axes, key, xs, ys, label)
    axes.legend(frameon=False)
    return Chart("loss", "Loss", figure)


def _metrics(log: Sequence[dict[str, Any]]) -> list[Chart]:
    charts = []
    for name in metric_names(log):
        title = name.removeprefix("eval_").replace("_", " ")
        charts.append(_line(log, name, f"{name.replace('/', '_')}", f"Evaluation: {title}"))
    return [chart for chart in charts if chart is not None]


def _line(log: Sequence[dict[str, Any]], key: str, name: str, title: str) -> Chart | None:
    xs, ys = points(log, key)
    if not xs:
        return None
    figure = _figure()
    axes = _axes(figure, title.rpartition(": ")[2].partition(",")[0].lower(), _last_step(log))
    _plot(axes, key, xs, ys)
    if min(ys) >= 0:
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
    xs = range(len(moments))
    rows = [(title, color, _mib(moments, name)) for (title, name), color in zip(CLASSES, COLORS, strict=True)]
    rows = [row for row in rows if any(row[2])]
    axes.stackplot(
        xs, *(row[2] for row in rows), labels=[row[0] for row in rows], colors=[row[1] for row in rows], step="post"
    )
    ddp = max(map(ddp_nbytes, moments)) / MIB
    axes.axhline(ddp, color="black", linestyle="--", linewidth=1.2, label="DDP, without buffers")
    _tidy(axes)
    axes.margins(x=0)
    axes.set_ylim(0, 1.15 * max(ddp, max(sum(values) for values in zip(*(row[2] for row in rows), strict=True))))
    starts = {phase: min(i for i, moment in enumerate(moments) if moment.phase == phase) for phase in _phases(moments)}
    axes.set_xticks(list(starts.values()), list(starts), ha="left")
    for start in starts.values():
        axes.axvline(start, color="white", linewidth=0.8)


def _phases(moments: list[Moment]) -> list[str]:
    return list(dict.fromkeys(moment.phase for moment in moments))


def _mib(moments: list[Moment], name: str) -> list[float]:
    return [moment.nbytes.get(name, 0) / MIB for moment in moments]


def ddp_nbytes(moment: Moment) -> int:
    """The bytes of parameters, gradients and optimizer state of a rank under DDP."""
    return sum(moment.nbytes[f"ddp_{name}_nbytes"] for name in ("parameter", "gradient", "optimizer"))


def drawn_ranks(step: Step) -> list[int]:
    """Returns all ranks if they are few, otherwise those with the lowest and the highest peak."""
    if len(step.moments) <= MAX_RANKS_DRAWN:
        return list(range(len(step.moments)))
    most = [max(_total(moment) for moment in moments) for moments in step.moments]
    return sorted({most.index(min(most)), most.index(max(most))})


def _total(moment: Moment) -> int:
    return sum(moment.nbytes.get(name, 0) for _, name in CLASSES)


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
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
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
