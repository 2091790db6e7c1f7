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
TITLES = {  # of entries of the log; other names are their own titles
    "loss": "Loss",
    "eval_loss": "Evaluation: loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "zero/tokens_per_second": "Tokens per second, all ranks",
    "zero/rows_per_second": "Rows per second, all ranks",
    "zero/mfu": "MFU",
    "zero/peak_memory_mib": "Peak memory of a rank, MiB",
}
# Entries of time and progress; all other numbers have a curve.
HIDDEN = re.compile(r"(eval|train)_(runtime|.*_per_second|model_preparation_time)|train_loss|total_flos|epoch|step")
WIDTH, HEIGHT = 480, 200  # of a chart, in pixels
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
        time = [("training time", f"{entry['train_runtime']:.0f} s") for entry in log if "train_runtime" in entry]
        page = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True).render(
            title=folder.name,
            summary=f"{config.task}: {base} on {source}",
            facts=[*shown, ("steps", trainer.state.global_step), *time],
            curves=[(title, [*curve.values()][-1], _chart(curve)) for title, curve in curves_of(log).items()],
            memory=memory_table(memory),
            notes=[without_folders(note, values) for note in data.notes],
            configuration=configuration,
        )
        write_whole(folder / REPORT_NAME, page.encode())
        trainer.card_sections = {"Recipe": f"```yaml\n{configuration}```"}
        trainer.create_model_card()
        say(f"report: {folder / REPORT_NAME}")

    run_on_all_ranks(comm, f"writing {REPORT_NAME}", on_first(comm, write))


def _shown_base(name: str) -> str:
    """Describes the base model without folders of this machine. Files in the cache of the Hub bear its name."""
    cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", name)
    if cached:
        name = f"{cached[1]}/{cached[2]}"
    return f"fine-tuned from {Path(name).name if Path(name).exists() else name}" if name else "trained"


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


def curves_of(log: Log) -> dict[str, dict[int, float]]:
    """Returns the numbers that were logged by step, under the titles of their names."""
    curves: dict[str, dict[int, float]] = {}
    for entry in log:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and not HIDDEN.fullmatch(name):
                metric = name.removeprefix("eval_").replace("_", " ")
                title = TITLES.get(name) or (f"Evaluation: {metric}" if name.startswith("eval_") else metric)
                curves.setdefault(title, {})[entry["step"]] = value
    return curves


def memory_table(memory: Sequence[dict[str, int]]) -> list[list[str]]:
    """Returns rows with the MiB of each rank, and those of plain data parallelism (DDP). The first row has titles."""
    rows = [["between backward and optimizer step", *(f"rank {rank}" for rank in range(len(memory))), "DDP"]]
    for title, name in MEMORY_CLASSES:
        nbytes = [*(report.get(name, 0) for report in memory), memory[0].get(f"ddp_{name}", 0)]
        rows += [[title, *(f"{each / MIB:.2f}" for each in nbytes)]] if any(nbytes) else []
    return rows


def _chart(curve: dict[int, float]) -> str:
    """Draws a curve over the steps of the run as an SVG element, and writes the range of both axes."""
    last, low, high = max(curve) or 1, min(curve.values()), max(curve.values())
    places = [
        f"{WIDTH * step / last:.1f},{HEIGHT * (high - value) / ((high - low) or 1.0):.1f}"
        for step, value in curve.items()
    ]
    labels = ((0, -6, f"{high:.4g}"), (0, HEIGHT + 16, f"{low:.4g}"), (WIDTH - 60, HEIGHT + 16, f"step {last}"))
    texts = "".join(f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in labels)
    # a marker shows a curve of one point
    dot = '<marker id="dot" refX="2" refY="2" markerWidth="4" markerHeight="4"><circle cx="2" cy="2" r="2"/></marker>'
    line = f'<polyline marker-start="url(#dot)" points="{" ".join(places)}"/>'
    return f'<svg viewBox="-8 -24 {WIDTH + 16} {HEIGHT + 48}">{dot}{line}{texts}</svg>'


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Returns a shell command that runs the trained model on an input of a pipeline of transformers."""
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
