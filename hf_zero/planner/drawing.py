"""Pictures of what the streams of a device do in a step. They need matplotlib."""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.planner.throughput import NAMES
from hf_zero.planner.timeline import ACROSS, AVERAGE, COMPUTE, DOWN, EXCHANGE, HOST, NANO, SEQUENCE, UP, Span, StepTime


# What lanes are called in a picture, in the order of its rows.
LANE_NAMES = {
    COMPUTE: "computes",
    EXCHANGE: "exchanges",
    AVERAGE: "stream of averages",
    ACROSS: "across groups",
    SEQUENCE: "shared sequences",
    UP: "to the device",
    DOWN: "to the host",
    HOST: "on the host",
}
COLORS = {
    "kernels": "#98c1d9",
    NAMES["gather"]: "#1b7f79",
    NAMES["reduce"]: "#c8553d",
    NAMES["all_reduce"]: "#e09f3e",
    NAMES["heads"]: "#6d597a",
    NAMES[UP]: "#9a8c98",
    NAMES[DOWN]: "#4a4e69",
    NAMES[HOST]: "#a3b18a",
}
# What follows within such a share of a step looks like one.
GAP_SHARE = 5e-4

FORMATS = (".svg", ".png", ".pdf")
Bars = list[tuple[float, float]]  # (start, stop) of each, in milliseconds


@dataclass(frozen=True)
class Panel:
    """One step."""

    title: str  # what it says above
    rows: Mapping[str, Mapping[str, Bars]]  # by the name of a row, when it is busy with what


def check_drawing(path: str, setting: str) -> None:
    """Refuses a picture that could not be drawn at last; `setting` names it. Raises [`ConfigError`] where matplotlib
    is not installed, there is no such folder, or no such format."""
    if not path.endswith(FORMATS):
        raise ConfigError(f"{setting} {path}: expected a file that ends with {', '.join(FORMATS)}")
    if not Path(path).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"{setting} {path}: no such folder; make it")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{setting}: matplotlib is not installed; pip install 'hf-zero[recipes]'")


def step_panel(title: str, time: StepTime, spans: list[Span]) -> Panel:
    """Returns what the lanes of a step do, of something that has a title."""
    rows: dict[str, dict[str, Bars]] = {}
    for lane, name in LANE_NAMES.items():
        own = [each for each in spans if each.lane == lane and each.stop > each.start]
        kinds = dict.fromkeys(each.kind for each in own)
        bars = {
            kind: [(1e3 * each.start / NANO, 1e3 * each.stop / NANO) for each in own if each.kind == kind]
            for kind in kinds
        }
        if own:
            gap = 1e3 * GAP_SHARE * time.step_seconds()
            rows[name] = {NAMES.get(kind, "kernels"): joined(each, gap) for kind, each in bars.items()}
    exposed = sum(time.exposed_ns.values()) / 1e6
    return Panel(f"{title}: {1e3 * time.step_seconds():.2f} ms, {exposed:.2f} of it exposed", rows)


def joined(bars: Iterable[tuple[float, float]], gap: float) -> Bars:
    """Returns bars of which those that follow one another at once, or within a `gap`, are one."""
    found: Bars = []
    for start, stop in sorted(bars):
        if found and start - found[-1][1] < gap:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def draw_panels(panels: list[Panel], colors: Mapping[str, str], path: str, *, unit: str = "ms") -> None:
    """Draws steps one below the other, on the same scale, into a file, see `FORMATS`. `colors`: by what is done, in
    the order of the legend; `unit`: what stands at the axis of time."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [0.35 + 0.17 * len(panel.rows) for panel in panels]
    with matplotlib.rc_context({"svg.hashsalt": "timeline", "font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, sum(heights) + 0.6), layout="constrained")
        axes: Any = figure.subplots(len(panels), height_ratios=heights, sharex=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels):
            for row, busy in enumerate(panel.rows.values()):
                for what, bars in busy.items():
                    edges = [(start, stop - start) for start, stop in bars]
                    axis.broken_barh(edges, (row - 0.4, 0.8), facecolors=colors[what])
            axis.set_yticks(range(len(panel.rows)), list(panel.rows))
            axis.invert_yaxis()
            axis.set_title(panel.title, loc="left")
        axes[-1].set_xlabel(unit)
        drawn = {what for panel in panels for busy in panel.rows.values() for what in busy}
        legend = {what: Patch(facecolor=color) for what, color in colors.items() if what in drawn}
        figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=len(legend))
        figure.savefig(Path(path).expanduser(), metadata={"Date": None} if path.endswith(".svg") else None)
