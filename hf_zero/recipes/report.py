"""The report of a run, `report.html`: one HTML file without links to others. The model card shares its curves."""

import importlib.util
import io
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.engine import require_engine
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.output_dir import repeating_command
from hf_zero.recipes.run_config import RunConfig, yaml_text
from hf_zero.recipes.telemetry import Telemetry
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MEMORY_CLASSES, MIB, NO_METRICS, facts_of, fenced


REPORT_NAME = "report.html"
CHARTS_FOLDER = "report"  # the charts as PNG, which the model card shows
TEMPLATE = Path(__file__).with_name("report.html.jinja")
FACTS = {  # name of the last value of a log entry, and its format
    "train_runtime": ("training time", "{:.0f} s"),
    "loss": ("last training loss", "{:.4g}"),
    "zero/tokens_per_second": ("tokens per second", "{:,.0f}"),
    "zero/rows_per_second": ("rows per second", "{:,.0f}"),
    "zero/mfu": ("MFU", "{:.1%}"),
    "zero/peak_memory_mib": ("peak memory of a rank", "{:,.0f} MiB"),
}
CURVES = {  # title of each chart, and the numbers of the log that it shows
    "loss": ("Loss", "loss", "eval_loss"),
    "learning_rate": ("Learning rate", "learning_rate"),
    "grad_norm": ("Gradient norm", "grad_norm"),
    "speed": ("Tokens per second, all ranks", "zero/tokens_per_second"),
    "rows": ("Rows per second, all ranks", "zero/rows_per_second"),
    "memory": ("Peak memory of a rank, MiB", "zero/peak_memory_mib"),
}
Log = Sequence[dict[str, Any]]


class Table(NamedTuple):
    """A table of the page."""

    name: str  # in the page's HTML
    title: str
    head: list[str]
    rows: list[list[str]]


class Chart(NamedTuple):
    """A chart of the page."""

    name: str
    title: str
    svg: str


def write_report(
    trainer: ZeroTrainer,
    settings: RunConfig,
    data: Data,
    telemetry: Telemetry,
    answers: Sequence[Table],
    say: Callable[..., None],
) -> None:
    """Writes the report and the model card on rank 0. All ranks call it after training and saving."""
    comm = require_engine(trainer.model).comm
    memory = comm.all_gather_object(telemetry.memory)
    trainer.memory_of_ranks = tuple(comm.all_gather_object(trainer.memory_report()))

    def write() -> None:
        args, folder, log = trainer.args, Path(trainer.args.output_dir), trainer.state.log_history
        facts = facts_of(trainer, trainer.memory_of_ranks)
        base = f"fine-tuned from {facts.base_model}" if facts.base_model else "trained"
        values = {key: value for key, value in settings.non_default().items() if key != "output_dir"}
        configuration, source = (without_folders(text, values) for text in (yaml_text(values), data.source))
        charts = _draw(log, folder / CHARTS_FOLDER, say)
        shown = ("ZeRO stage", args.zero_stage), ("ranks", args.world_size), ("precision", facts.precision)
        page = render(
            title=facts.model_name,
            summary=f"{settings.task}: {base} on {source}",
            results=results_of(log),
            facts=[*shown, ("steps", trainer.state.global_step), *_facts(log)],
            charts=charts,
            # A page that is published shows no rows.
            tables=[*(() if args.push_to_hub else answers), memory_table(memory)],
            sample="" if args.push_to_hub else data.sample,
            notes=[without_folders(note, values) for note in data.notes],
            command=repeating_command(settings, "" if Path(args.output_dir).is_absolute() else args.output_dir),
            configuration=configuration,
        )
        write_whole(folder / REPORT_NAME, page.encode())
        trainer.card_sections = {"Recipe": fenced(configuration, "yaml")}
        if charts:
            pictures = [f"![{chart.title}]({CHARTS_FOLDER}/{chart.name}.png)" for chart in charts]
            trainer.card_sections["Curves"] = "\n".join(pictures)
        trainer.card_dataset = source
        trainer.create_model_card()
        say(f"report: {folder / REPORT_NAME}")

    run_on_all_ranks(comm, f"writing {REPORT_NAME}", on_first(comm, write))


def render(**contents: Any) -> str:
    """Returns the page, with the contents that report.html.jinja names."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(contents)


def without_folders(text: str, values: Any) -> str:
    """Replaces each path of this machine among the values of the settings by its last part: others may read the
    page."""
    for path in sorted(set(_paths(values)), key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _paths(item)
    elif isinstance(value, str) and os.sep in value and (os.path.isabs(value) or os.path.exists(value)):
        yield value


def points(log: Log, key: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a number was logged, and the last number of each."""
    found = {entry["step"]: entry[key] for entry in log if isinstance(entry.get(key), (int, float))}
    return list(found), list(found.values())


def metric_names(log: Log) -> list[str]:
    """Returns the names of the metrics of evaluations, the loss last."""
    names = dict.fromkeys(name for entry in log for name in entry if name.startswith("eval_"))
    return sorted((name for name in names if not NO_METRICS.match(name)), key=lambda name: name == "eval_loss")


def title_of(name: str) -> str:
    """Returns the name of a metric as a reader sees it."""
    return "evaluation loss" if name == "eval_loss" else name.removeprefix("eval_").replace("_", " ")


def results_of(log: Log) -> list[tuple[str, str]]:
    """Returns the metrics of the last evaluation, or the training loss if there was none."""
    results = [(title_of(name), f"{points(log, name)[1][-1]:.4g}") for name in metric_names(log)]
    return results or [("training loss", f"{value:.4g}") for value in points(log, "loss")[1][-1:]]


def _facts(log: Log) -> list[tuple[str, str]]:
    return [
        (title, form.format(points(log, key)[1][-1])) for key, (title, form) in FACTS.items() if points(log, key)[1]
    ]


def memory_table(memory: Sequence[dict[str, int]]) -> Table:
    """Returns the table of the MiB that each rank holds, and those that plain data parallelism (DDP) would hold."""
    head = ["between backward and optimizer step", *(f"rank {rank}" for rank in range(len(memory))), "DDP"]
    rows = []
    for title, name in (*MEMORY_CLASSES, ("on the host", "host_nbytes")):
        nbytes = [*(report.get(name, 0) for report in memory), memory[0].get(f"ddp_{name}", 0)]
        rows += [[title, *(f"{each / MIB:.2f}" for each in nbytes)]] if any(nbytes) else []
    return Table("memory", "Tensors of each rank in MiB, without activations", head, rows)


def _draw(log: Log, folder: Path, say: Callable[..., None]) -> list[Chart]:
    """Draws a chart for each number that was logged, and writes it to the folder as PNG."""
    if importlib.util.find_spec("matplotlib") is None:
        say(f"{REPORT_NAME}: without charts, as matplotlib is not installed; pip install 'hf-zero[recipes]'")
        return []
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.png"):  # of an earlier run in this folder
        path.unlink()
    metrics = {name: (f"Evaluation: {title_of(name)}", name) for name in metric_names(log) if name != "eval_loss"}
    charts = []
    for name, (title, *keys) in (CURVES | metrics).items():
        name = name.replace("/", "_")
        series = {key: points(log, key) for key in keys if points(log, key)[0]}
        if series:
            charts.append(Chart(name, title, _chart(series, folder / f"{name}.png")))
    return charts


def _chart(series: dict[str, tuple[list[int], list[float]]], path: Path) -> str:
    """Draws numbers over the steps of the run. Writes a PNG, and returns the chart as an SVG element."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.0, 3.0), layout="constrained")  # inches: 10-point letters stay readable on a phone
    axes = figure.add_subplot(xlabel="step")
    axes.grid(axis="y", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    for key, (xs, ys) in series.items():
        is_evaluation = key.startswith("eval_")
        color, label = ("#e07b39", "evaluation") if is_evaluation else ("#3465a4", "training")
        axes.plot(xs, ys, color=color, label=label, marker="o" if is_evaluation or len(xs) == 1 else None)
    axes.set_xlim(left=0)
    if len(series) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Returns a shell command that runs the trained model on whatever the pipeline of transformers takes."""
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
