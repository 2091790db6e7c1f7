"""The files that a run writes beside its model: its configuration, a report to look at, a model card."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.recipes.charts import Chart, draw
from hf_zero.recipes.data import Data
from hf_zero.recipes.log import LOG_NAME, read_log
from hf_zero.recipes.measured import MEASURED_NAME, Measured
from hf_zero.recipes.page import Page, held_nbytes, results_of, tables_of
from hf_zero.recipes.resolved import (
    HIDDEN_NAME,
    RESOLVED_NAME,
    non_default_settings,
    repeating_command,
    resolved_name,
    resolved_text,
    yaml_text,
)
from hf_zero.recipes.settings import Settings
from hf_zero.recipes.step_trace import Step
from hf_zero.recipes.watch import Watch
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MIB, facts_of, fenced


REPORT_NAME = "report.html"
REPORT_FOLDER = "report"  # of its charts as PNGs, and what was measured


def write_configuration(trainer: ZeroTrainer, settings: Settings) -> None:
    """Writes the resolved configuration, from rank 0: from now on the run has not ended. All ranks call it.

    Args:
        trainer ([`ZeroTrainer`]): Of the run.
        settings ([`Settings`]): Of the run.
    """

    def write() -> None:
        folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = resolved_name(settings)
        # First of all: beside the new configuration, an old report would say that this run has ended.
        (folder / REPORT_NAME).unlink(missing_ok=True)
        write_whole(folder / name, resolved_text(settings).encode())
        (folder / ({RESOLVED_NAME, HIDDEN_NAME} - {name}).pop()).unlink(missing_ok=True)

    comm = trainer.accelerator.shard(trainer.model).comm
    run_on_all_ranks(comm, f"writing {RESOLVED_NAME}", on_first(comm, write))


def write_artifacts(
    trainer: ZeroTrainer, settings: Settings, data: Data, watch: Watch, say: Callable[..., None]
) -> None:
    """Writes report and model card, from rank 0. All ranks call it, after training and saving.

    Args:
        trainer ([`ZeroTrainer`]): That has trained.
        settings ([`Settings`]): Of the run.
        data ([`Data`]): What it was trained on.
        watch ([`Watch`]): What has watched it.
        say (`Callable`): Prints, on rank 0.
    """
    comm = trainer._engine.comm
    measured = Measured(watch.memory.gather(), watch.step.gather(), watch.memory.planned)
    trainer.memory_of_ranks = tuple(comm.all_gather_object(trainer.memory_report()))

    def write() -> None:
        folder = Path(trainer.args.output_dir)
        (folder / REPORT_FOLDER).mkdir(exist_ok=True)
        log = read_log(folder / LOG_NAME)
        found = measured.kept(folder / REPORT_FOLDER / MEASURED_NAME, is_trained=watch.step.num_steps > 0)
        pictures = _draw(folder / REPORT_FOLDER, log, found.step, say)
        page = _page(trainer, settings, data, log, found, pictures)
        write_whole(folder / REPORT_NAME, page.html().encode())
        trainer.card_sections = _sections(settings, pictures)
        trainer.card_dataset = _name(data.source)
        trainer.create_model_card()
        if not watch.step.num_steps:
            say("nothing was left to train; --resume never trains anew")
        say(f"report: {folder / REPORT_NAME}")

    run_on_all_ranks(comm, f"writing {REPORT_NAME}", on_first(comm, write))


def _draw(folder: Path, log: list[dict[str, Any]], step: Step | None, say: Callable[..., None]) -> list[Chart]:
    if importlib.util.find_spec("matplotlib") is None:
        say(f"{REPORT_NAME}: without charts, as matplotlib is not installed; pip install 'hf-zero[recipes]'")
        return []
    for drawn_before in folder.glob("*.png"):
        drawn_before.unlink()
    charts = draw(log, step)
    for chart in charts:
        chart.save(folder)
    return charts


def _page(trainer, settings: Settings, data: Data, log, found: Measured, charts: list[Chart]) -> Page:
    facts, output_dir = facts_of(trainer, trainer.memory_of_ranks), settings.training["output_dir"]
    base = f"fine-tuned from {facts.base_model}" if facts.base_model else "trained"
    return Page(
        title=facts.model_name,
        summary=f"{settings.task}: {base} on {_name(data.source)}",
        results=results_of(log, trainer.args.metric_for_best_model, trainer.args.greater_is_better),
        facts=_numbers(trainer, facts.precision or "", log, found),
        charts=charts,
        tables=tables_of(log, found),
        notes=[_without_folders(note, settings) for note in data.notes],
        sample="" if trainer.args.push_to_hub else data.sample,  # a page that is published shows no data
        command=repeating_command(settings, "" if Path(output_dir).is_absolute() else output_dir),
        configuration=yaml_text(_shown(settings)),
    )


def _numbers(
    trainer: ZeroTrainer, precision: str, log: list[dict[str, Any]], found: Measured
) -> list[tuple[str, str]]:
    """The numbers below the result, as far as they are known."""
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
    if any(found.memory):
        numbers.append(
            ("tensors of a rank, without activations", f"{max(map(held_nbytes, found.memory)) / MIB:,.0f} MiB")
        )
    return numbers


def _sections(settings: Settings, charts: list[Chart]) -> dict[str, str]:
    """Markdown for the model card."""
    sections = {"Recipe": fenced(yaml_text(_shown(settings)), "yaml")}
    if charts:
        pictures = [f"![{chart.title}]({REPORT_FOLDER}/{chart.name}.png)" for chart in charts]
        sections["Curves"] = "\n".join(pictures)
    return sections


def _shown(settings: Settings) -> dict[str, Any]:
    """The keys of a run for others to see: files and folders of this machine go by their names."""
    return {key: _name(value) for key, value in non_default_settings(settings).items() if key != "output_dir"}


def _without_folders(text: str, settings: Settings) -> str:
    for value in non_default_settings(settings).values():
        if isinstance(value, str):
            text = text.replace(value, _name(value))
    return text


def _name(value: Any) -> Any:
    if isinstance(value, list):
        return [_name(item) for item in value]
    is_path = isinstance(value, str) and os.sep in value and (os.path.isabs(value) or os.path.exists(value))
    return Path(value).name if is_path else value
