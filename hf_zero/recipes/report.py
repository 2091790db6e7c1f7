"""The report of a run, `report.html`: results, curves, memory and configuration, in one HTML file without links."""

import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.engine import require_engine
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.run_config import RunConfig, yaml_text
from hf_zero.recipes.telemetry import MIB, Telemetry
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.hub import precision_of


REPORT_NAME = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
FACTS = {  # title and format of the last value of some entries of the log
    "train_runtime": ("training time", "{:.0f} s"),
    "loss": ("last training loss", "{:.4g}"),
    "zero/tokens_per_second": ("tokens per second", "{:,.0f}"),
    "zero/rows_per_second": ("rows per second", "{:,.0f}"),
    "zero/mfu": ("MFU", "{:.1%}"),
    "zero/peak_memory_mib": ("peak memory of a rank", "{:,.0f} MiB"),
}
CURVES = {  # entries of the log in each chart, by its title
    "Loss": ("loss", "eval_loss"),
    "Learning rate": ("learning_rate",),
    "Gradient norm": ("grad_norm",),
    "Tokens per second, all ranks": ("zero/tokens_per_second",),
    "Rows per second, all ranks": ("zero/rows_per_second",),
    "Peak memory of a rank, MiB": ("zero/peak_memory_mib",),
}
WIDTH, HEIGHT, COLORS = 480, 200, ("#3465a4", "#e07b39")  # of a chart, in pixels; of training and of evaluation
# Entries of time and progress; all other names that begin with "eval_" are metrics.
NO_METRICS = re.compile(r"eval_(runtime|.*_per_second|model_preparation_time)$")
MEMORY_CLASSES = (
    ("parameters", "parameter_nbytes"),
    ("gradients", "gradient_nbytes"),
    ("optimizer state", "optimizer_nbytes"),
    ("reused buffers", "buffer_nbytes"),
    ("on the host", "host_nbytes"),
)
Log = Sequence[dict[str, Any]]


def write_report(
    trainer: ZeroTrainer, config: RunConfig, data: Data, telemetry: Telemetry, say: Callable[..., None]
) -> None:
    """Writes the report and the model card on rank 0. All ranks call it after training and saving."""
    comm = require_engine(trainer.model).comm
    memory = comm.all_gather_object(telemetry.memory)

    def write() -> None:
        args, folder, log = trainer.args, Path(trainer.args.output_dir), trainer.state.log_history
        base = _shown_base(getattr(trainer.model.config, "_name_or_path", ""))
        values = {key: value for key, value in config.non_default().items() if key != "output_dir"}
        configuration, source = (without_folders(text, values) for text in (yaml_text(values), data.source))
        shown = ("ZeRO stage", args.zero_stage), ("ranks", args.world_size), ("precision", precision_of(trainer))
        page = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True).render(
            title=folder.name,
            summary=f"{config.task}: {base} on {source}",
            results=results_of(log),
            facts=[*shown, ("steps", trainer.state.global_step), *_facts(log)],
            charts=charts_of(log),
            memory=memory_table(memory),
            notes=[without_folders(note, values) for note in data.notes],
            configuration=configuration,
        )
        write_whole(folder / REPORT_NAME, page.encode())
        trainer.card_sections = {"Recipe": fenced(configuration, "yaml")}
        trainer.create_model_card()
        say(f"report: {folder / REPORT_NAME}")

    run_on_all_ranks(comm, f"writing {REPORT_NAME}", on_first(comm, write))


def _shown_base(name: str) -> str:
    """Describes the base model without folders of this machine. Files in the cache of the Hub bear its name."""
    cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", name)
    if cached:
        name = f"{cached[1]}/{cached[2]}"
    return f"fine-tuned from {Path(name).name if Path(name).exists() else name}" if name else "trained"


def fenced(text: str, language: str = "") -> str:
    """Returns a fenced code block. The fence is longer than any run of backticks in the text."""
    quotes = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{quotes}{language}\n{text.rstrip()}\n{quotes}"


def without_folders(text: str, values: Any) -> str:
    """Replaces each local path among the values by its last part, since others may read the page."""
    for path in sorted(set(_paths(values)), key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _paths(item)
    elif isinstance(value, str) and os.sep in value and (os.path.isabs(value) or os.path.exists(value)):
        yield value


def points(log: Log, key: str) -> dict[int, float]:
    """Returns the last number that was logged at each step."""
    return {entry["step"]: entry[key] for entry in log if isinstance(entry.get(key), (int, float))}


def metric_names(log: Log) -> list[str]:
    """Returns the names of the metrics of evaluations, the loss last."""
    names = dict.fromkeys(name for entry in log for name in entry if name.startswith("eval_"))
    return sorted((name for name in names if not NO_METRICS.match(name)), key=lambda name: name == "eval_loss")


def title_of(name: str) -> str:
    """Returns the title of a metric."""
    return "evaluation loss" if name == "eval_loss" else name.removeprefix("eval_").replace("_", " ")


def results_of(log: Log) -> list[tuple[str, str]]:
    """Returns the metrics of the last evaluation, or the training loss if there was none."""
    results = [(title_of(name), f"{[*points(log, name).values()][-1]:.4g}") for name in metric_names(log)]
    return results or [("training loss", f"{value:.4g}") for value in [*points(log, "loss").values()][-1:]]


def _facts(log: Log) -> list[tuple[str, str]]:
    last = {key: [*points(log, key).values()][-1:] for key in FACTS}
    return [(title, form.format(last[key][0])) for key, (title, form) in FACTS.items() if last[key]]


def memory_table(memory: Sequence[dict[str, int]]) -> list[list[str]]:
    """Returns rows with the MiB of each rank, and those of plain data parallelism (DDP). The first row has titles."""
    rows = [["between backward and optimizer step", *(f"rank {rank}" for rank in range(len(memory))), "DDP"]]
    for title, name in MEMORY_CLASSES:
        nbytes = [*(report.get(name, 0) for report in memory), memory[0].get(f"ddp_{name}", 0)]
        rows += [[title, *(f"{each / MIB:.2f}" for each in nbytes)]] if any(nbytes) else []
    return rows


def charts_of(log: Log) -> dict[str, str]:
    """Returns an SVG element for each chart, by its title."""
    metrics = {f"Evaluation: {title_of(name)}": (name,) for name in metric_names(log) if name != "eval_loss"}
    charts = {}
    for title, keys in (CURVES | metrics).items():
        curves = [found for key in keys if (found := points(log, key))]
        if curves:
            charts[title] = _chart(curves)
    return charts


def _chart(curves: list[dict[int, float]]) -> str:
    """Draws curves over the steps of the run, and writes the range of both axes."""
    last = max(max(curve) for curve in curves) or 1
    low, high = (choose(value for curve in curves for value in curve.values()) for choose in (min, max))
    shapes = []
    for curve, color in zip(curves, COLORS):
        places = [
            f"{WIDTH * step / last:.1f},{HEIGHT * (high - value) / ((high - low) or 1.0):.1f}"
            for step, value in curve.items()
        ]
        # a marker shows a curve of one point
        shapes.append(f'<polyline stroke="{color}" marker-start="url(#dot)" points="{" ".join(places)}"/>')
    for x, y, text in (
        (0, -6, f"{high:.4g}"),
        (0, HEIGHT + 16, f"{low:.4g}"),
        (WIDTH - 60, HEIGHT + 16, f"step {last}"),
    ):
        shapes.append(f'<text x="{x}" y="{y}">{text}</text>')
    dot = '<marker id="dot" refX="2" refY="2" markerWidth="4" markerHeight="4"><circle cx="2" cy="2" r="2"/></marker>'
    return f'<svg viewBox="-8 -24 {WIDTH + 16} {HEIGHT + 48}">{dot}{"".join(shapes)}</svg>'


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Returns a shell command that runs the trained model on an input of a pipeline of transformers."""
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
