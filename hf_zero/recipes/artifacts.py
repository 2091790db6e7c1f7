"""The files that a run leaves beside its model: configuration, report and model card."""

import importlib.util
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.folders import write_whole
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.engine import require_engine
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.measured import MEASURED_NAME, Step, Watch
from hf_zero.recipes.metrics import LOG_NAME, read_log
from hf_zero.recipes.page import Chart, Table, draw, numbers_of, page_html, results_of, tables_of
from hf_zero.recipes.parser import program
from hf_zero.recipes.settings import Settings, yaml_text
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import facts_of, fenced


REPORT_NAME = "report.html"
REPORT_FOLDER = "report"  # of its charts as PNGs, and what was measured
RESOLVED_NAME = "resolved.yaml"
ROWS_LINE = "# Rows: "  # begins the line of it that says which rows are trained on
SAMPLES_NAME = "_samples.json"  # it holds rows, and Trainer uploads nothing that begins so
HIDDEN_NAME = f"_{RESOLVED_NAME}"  # it names folders of this machine, and Trainer uploads nothing that begins so
WEIGHTS = (
    *("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "adapter_model.bin"),
)
# What a run leaves in its folder beside checkpoints, by exact names: the folder may hold files of the user's
# (deepspeed_config.json, tokenizer_notes.txt), which stay.
LEFT = (
    *WEIGHTS,
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "config.json", "generation_config.json"),
    *("adapter_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates", "training_args.bin", MANIFEST_NAME, "README.md"),
    *(REPORT_NAME, REPORT_FOLDER, LOG_NAME, RESOLVED_NAME, HIDDEN_NAME, SAMPLES_NAME),
)


def write_configuration(trainer: ZeroTrainer, settings: Settings, rows: str | None = None) -> None:
    """Writes the resolved configuration on rank 0, with a line about the rows, and removes an old report. All ranks
    call it."""

    def write() -> None:
        folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = resolved_name(settings)
        # First of all: beside the new configuration, an old report would say that this run has ended.
        (folder / REPORT_NAME).unlink(missing_ok=True)
        text = resolved_text(settings) + (f"{ROWS_LINE}{rows}\n" if rows else "")
        write_whole(folder / name, text.encode())
        (folder / ({RESOLVED_NAME, HIDDEN_NAME} - {name}).pop()).unlink(missing_ok=True)

    comm = trainer.accelerator.shard(trainer.model).comm
    run_on_all_ranks(comm, f"writing {RESOLVED_NAME}", on_first(comm, write))


def write_artifacts(
    trainer: ZeroTrainer, settings: Settings, data: Data, watch: Watch, answers: list[Table], say: Callable[..., None]
) -> None:
    """Writes the report and the model card on rank 0. All ranks call it after training and saving."""
    comm = require_engine(trainer.model).comm
    measured = watch.gather()
    trainer.memory_of_ranks = tuple(comm.all_gather_object(trainer.memory_report()))

    def write() -> None:
        args, folder = trainer.args, Path(trainer.args.output_dir)
        (folder / REPORT_FOLDER).mkdir(exist_ok=True)
        log = read_log(folder / LOG_NAME)
        found = measured.kept(folder / REPORT_FOLDER / MEASURED_NAME, is_trained=watch.num_steps > 0)
        charts = _draw(folder / REPORT_FOLDER, log, found.step, say)
        facts = facts_of(trainer, trainer.memory_of_ranks)
        configuration = yaml_text(_shown(settings))
        base, given = f"fine-tuned from {facts.base_model}" if facts.base_model else "trained", args.output_dir
        page = page_html(
            title=facts.model_name,
            summary=f"{settings.task}: {base} on {_name(data.source)}",
            results=results_of(log, args.metric_for_best_model, args.greater_is_better),
            facts=numbers_of(trainer, facts.precision or "", log, found),
            charts=charts,
            tables=[*(() if args.push_to_hub else answers), *tables_of(log, found)],
            notes=[_without_folders(note, settings) for note in data.notes],
            sample="" if args.push_to_hub else data.sample,  # a page that is published shows no data
            command=_repeating_command(settings, "" if Path(given).is_absolute() else given),
            configuration=configuration,
        )
        write_whole(folder / REPORT_NAME, page.encode())
        trainer.card_sections = {"Recipe": fenced(configuration, "yaml")}
        if charts:
            pictures = [f"![{chart.title}]({REPORT_FOLDER}/{chart.name}.png)" for chart in charts]
            trainer.card_sections["Curves"] = "\n".join(pictures)
        trainer.card_dataset = _name(data.source)
        trainer.create_model_card()
        if not watch.num_steps:
            say("nothing was left to train; --overwrite_output_dir trains anew")
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


def _shown(settings: Settings) -> dict[str, Any]:
    """Returns the keys of a run for others to see. Paths of this machine are replaced by the last part of each."""
    return {key: _name(value) for key, value in settings.non_default().items() if key != "output_dir"}


def _without_folders(text: str, settings: Settings) -> str:
    values = settings.non_default()
    for value in (*values.values(), *(each["path"] for each in values.get("datasets") or ())):
        if isinstance(value, str):
            text = text.replace(value, _name(value))
    return text


def _name(value: Any) -> Any:
    if isinstance(value, list):
        return [_name(item) for item in value]
    if isinstance(value, dict):
        return {key: _name(item) for key, item in value.items()}
    is_path = isinstance(value, str) and os.sep in value and (os.path.isabs(value) or os.path.exists(value))
    return Path(value).name if is_path else value


def resolved_name(settings: Settings) -> str:
    """Returns the name of the file for the configuration."""
    return HIDDEN_NAME if settings.training["push_to_hub"] else RESOLVED_NAME


def configuration_of(folder: Path) -> Path | None:
    """Returns the configuration file that a run has left in a folder, or `None`."""
    return next((path for name in (RESOLVED_NAME, HIDDEN_NAME) if (path := folder / name).exists()), None)


def _repeating_command(settings: Settings, folder: str) -> str:
    """Returns the command line that repeats a run, whose configuration is in a folder, in another one."""
    path = shlex.quote(str(Path(folder) / resolved_name(settings)))
    return f"{program()} {settings.task} --config {path} --output_dir {shlex.quote(f'{folder}-again'.lstrip('-'))}"


def resolved_text(settings: Settings) -> str:
    """Returns YAML of all keys: first those that differ from their defaults, then the others."""
    set_by_user = settings.non_default()
    values = {key: value for key, value in settings.values().items() if key not in set_by_user}
    values = {key: value for key, value in values.items() if value not in (None, [])}
    return (
        f"# Repeats this run: {_repeating_command(settings, settings.training['output_dir'])}\n"
        f"{yaml_text(set_by_user)}\n"
        "# What was left at its default, so that a version with other defaults repeats it too.\n"
        f"{yaml_text(values)}"
    )


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Returns a shell command that runs the trained model on whatever the pipeline of transformers takes."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = Path(os.path.relpath(python))
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(str(python))} -c {shlex.quote(code)}"
