"""The files that a run writes beside its model: its configuration, a report to look at, a model card."""

import importlib.util
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.errors import ConfigError
from hf_zero.recipes.charts import Chart, draw
from hf_zero.recipes.data import Data
from hf_zero.recipes.measured import MEASURED_NAME, Measured, Step, Watch
from hf_zero.recipes.metrics import LOG_NAME, read_log
from hf_zero.recipes.page import Page, held_nbytes, results_of, tables_of
from hf_zero.recipes.parser import program
from hf_zero.recipes.settings import NEVER, Settings, parse_settings
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MEMORY_CLASSES, MIB, facts_of, fenced


REPORT_NAME = "report.html"
REPORT_FOLDER = "report"  # of its charts as PNGs, and what was measured
RESOLVED_NAME = "resolved.yaml"
HIDDEN_NAME = f"_{RESOLVED_NAME}"  # it names folders of this machine, and Trainer uploads nothing that begins so
SECRETS = ("hub_token", "push_to_hub_token")
# Where a run starts, and which process this is, are no part of what it is.
NOT_OF_THE_RUN = (*SECRETS, "resume_from_checkpoint", "local_rank")
# A run that goes on keeps its task, the task's own arguments but for these, its decisive training arguments, and those
# that say in which order rows come. These say how rows are read and attention is computed; the results are the same.
FREE = ("dataset_num_proc", "skip_bad_rows", "attn_implementation")
# These say how a run is watched, what of it is kept, and where it is told and uploaded; its model is the same.
NOT_OF_THE_MODEL = (
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
    *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "include_num_input_tokens_seen"),
    *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "skip_memory_metrics", *FREE),
)
ORDER = ("seed", "data_seed", "train_sampling_strategy")


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


def non_default_settings(settings: Settings) -> dict[str, Any]:
    """The keys of a run that differ from their defaults.

    Args:
        settings ([`Settings`]): Of the run.

    Returns:
        `dict[str, Any]`: Plain values by key, the task first.
    """
    defaults = _values(parse_settings(settings.task, []))
    return {
        key: value for key, value in _values(settings).items() if key == "task" or value != defaults.get(key, value)
    }


def resolved_name(settings: Settings) -> str:
    """The name of the file that the configuration goes into."""
    return HIDDEN_NAME if settings.training["push_to_hub"] else RESOLVED_NAME


def repeating_command(settings: Settings, folder: str) -> str:
    """The command line that repeats a run, from the folder in which it was started.

    Args:
        settings ([`Settings`]): Of the run.
        folder (`str`): Where its configuration is.
    """
    path = shlex.quote(str(Path(folder) / resolved_name(settings)))
    return f"{program()} {settings.task} --config {path} --resume {NEVER}"


def resolved_text(settings: Settings) -> str:
    """YAML of all keys: those that differ from their defaults, then the others as they were.

    Args:
        settings ([`Settings`]): Of the run.
    """
    set_by_user = non_default_settings(settings)
    values = {key: value for key, value in _values(settings).items() if key not in set_by_user}
    values = {key: value for key, value in values.items() if value not in (None, [])}
    return (
        f"# Repeats this run: {repeating_command(settings, settings.training['output_dir'])}\n"
        f"{yaml_text(set_by_user)}\n"
        "# What was left at its default, so that a version with other defaults repeats it too.\n"
        f"{yaml_text(values)}"
    )


def yaml_text(values: dict[str, Any]) -> str:
    """Lines of `key: value`, in the order given."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6)


def check_unchanged(settings: Settings, folder: Path) -> None:
    """Refuses to go on with a run whose task, model or data were others.

    Args:
        settings ([`Settings`]): Of this run.
        folder (`Path`): Where the run before left its configuration; without one nothing is compared.

    Raises:
        ConfigError: Naming the first key that has changed.
    """
    changed = _changed(settings, folder, _compared(settings))
    if changed is not None:
        key, now, before = changed
        raise ConfigError(
            f"{key}: {now!r} now, {before!r} in the run that {folder} holds checkpoints of ({_path(folder)}); go on "
            "with the same, or give --resume never or another output_dir"
        )


def difference(settings: Settings, folder: Path, keys: Iterable[str] | None = None) -> tuple[str, Any, Any] | None:
    """In what a run's model differs from that of the one before. Where it is told from, how it is watched, and by how
    many processes it is trained, does not count.

    Args:
        settings ([`Settings`]): Of this run.
        folder (`Path`): Where the run before left its configuration; without one nothing is compared.
        keys (`Iterable[str]`, *optional*): What is compared; by default all that the model depends on.

    Returns:
        The first key that has changed, its value now and its value before; `None` where all is as it was.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    if keys is None:
        ignored = {*NOT_OF_THE_MODEL, "num_processes", "output_dir"}
        keys = [key for key in _values(settings) if key not in ignored]
    return _changed(settings, folder, keys)


def _changed(settings: Settings, folder: Path, keys: Iterable[str]) -> tuple[str, Any, Any] | None:
    path = _path(folder)
    if path is None:
        return None
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({' '.join(str(error).split())}), so this run cannot be compared with the one "
            "before; --resume never starts anew"
        ) from error
    if not isinstance(saved, dict):
        raise ConfigError(f"{path}: holds no keys, so this run cannot be compared with it; --resume never starts anew")
    now, defaults = _values(settings), _values(parse_settings(settings.task, []))
    before = {**defaults, **saved}
    return next(((key, now[key], before[key]) for key in keys if now[key] != before[key]), None)


def _path(folder: Path) -> Path | None:
    """The configuration that a run has left in a folder."""
    return next((path for name in (RESOLVED_NAME, HIDDEN_NAME) if (path := folder / name).exists()), None)


def _compared(settings: Settings) -> list[str]:
    own = [field.name for field in fields(settings.arguments) if field.name not in FREE]
    return ["task", *own, *TASKS[settings.task].decisive, *ORDER]


def _values(settings: Settings) -> dict[str, Any]:
    """All keys of a run, as YAML knows them."""
    values = {
        "task": settings.task,
        **vars(settings.arguments),
        **settings.training,
        "num_processes": settings.num_processes,
    }
    return {key: _plain(value) for key, value in values.items() if key not in NOT_OF_THE_RUN}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def memory_table(per_rank: Sequence[dict[str, int]], zero_stage: int) -> str:
    """Draws the bytes of each tensor class, as measured.

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


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Writes a command that runs the trained model on a text, to be pasted into a shell as it is.

    Args:
        folder (`str`): Where the model was saved.
        text (`str`, `list` or `dict`): An example text, messages of a chat, or whatever else the pipeline takes.
        pipeline_task (`str`): As `transformers.pipeline` calls it.

    Returns:
        `str`: The command, with this Python.
    """
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = Path(os.path.relpath(python))
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(str(python))} -c {shlex.quote(code)}"
