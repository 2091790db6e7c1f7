"""The `output_dir` of a run: whether a run may start, resume or replace another one there, and its own records.

`resolved.yaml` contains all keys of the run, and `run.json` says whether it has finished.
"""

import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hf_zero.checkpoint.folders import read_json, remove_folder, write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.models import named_model
from hf_zero.recipes.parser import AUTO, program
from hf_zero.recipes.run_config import NEVER, RunConfig, yaml_text
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments
from hf_zero.trainer.resumable import age_of, check_resumable, checkpoints_in, newest_whole, read_step


RESOLVED_NAME = "resolved.yaml"
RUN_NAME = "run.json"
WEIGHTS = tuple(
    f"{name}*.{end}" for name in ("model", "adapter_model", "pytorch_model") for end in ("safetensors", "bin")
)
# A run that resumes keeps its task, the task's arguments except these, the task's decisive training arguments, and the
# order of rows.
FREE = ("dataset_num_proc", "skip_bad_rows", "attn_implementation", "compute_metrics", "samples")
TEST_SOURCES = ("test_file", "dataset_test_split")
TEST_ROWS = (*TEST_SOURCES, "max_test_rows")  # free unless other training rows are held out
ORDER = ("seed", "data_seed", "train_sampling_strategy")
# Beginnings of keys that do not change the trained model.
NOT_OF_THE_MODEL = (
    *("logging_", "log_", "disable_tqdm", "include_num_input_tokens_seen", "skip_memory_metrics"),
    *("report_to", "run_name", "project", "trackio_", "push_to_hub", "hub_"),
    *("dataloader_num_workers", "dataloader_p", "num_processes", "output_dir", *FREE),
)


def check_start(config: RunConfig) -> None:
    """Raises [`ConfigError`] if a run cannot resume from the checkpoints in its folder, or would replace the model of
    another run, or of a finished run that it does not make longer, without `--overwrite_output_dir`."""
    folder = Path(config.training["output_dir"])
    checkpoints, weights = checkpoints_in(folder), weights_in(folder)
    if config.resume == NEVER and config.overwrite_output_dir:
        key, name = named_model(config.arguments)
        path = Path(name or "").expanduser().resolve()
        if name and {each.resolve() for each in checkpoints}.intersection((path, *path.parents)):
            raise ConfigError(
                f"{key} {name!r}: is among the checkpoints that --overwrite_output_dir removes; give another "
                "output_dir"
            )
        return
    if config.resume == NEVER:
        if left := [*checkpoints, *weights, *folder.glob(RESOLVED_NAME)]:
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds {left[0].name} of an earlier run; give another output_dir, or "
                "--overwrite_output_dir, which replaces it"
            )
        return
    checkpoint = next(iter(checkpoints), None)
    if config.resume != AUTO:
        checkpoint = Path(config.resume)
        if not checkpoint.is_dir():
            raise ConfigError(f"resume {config.resume!r}: no such folder; give auto, never or a checkpoint's folder")
        check_resumable(checkpoint)
    if checkpoint is not None:
        check_unchanged(config, checkpoint.absolute().parent)
    replaces = weights and not config.overwrite_output_dir
    run, saved = read_run(folder), saved_in(folder) if replaces else None
    reason = _difference(config, saved) or (None if run.get("finished") else "it has not finished")
    if replaces and reason is not None:
        if checkpoint is None or checkpoint.resolve().parent != folder.resolve():
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds a model of another run ({reason}); give another output_dir, or "
                "--overwrite_output_dir, which replaces it"
            )
        if config.resume == AUTO and run.get("finished") and not _is_longer(config, saved, run["step"]):
            earlier = f"--resume {checkpoint} trains again from there and replaces the model, "
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds the model of a run that has finished at step {run['step']} "
                f"({reason}); increase max_steps or num_train_epochs to continue it, "
                f"{earlier if age_of(checkpoint)[0] < run['step'] else ''}--overwrite_output_dir starts over"
            )
    last = config.training["max_steps"]
    step = 0 if checkpoint is None else age_of(checkpoint)[0] if config.resume == AUTO else read_step(checkpoint)
    if 0 < last < step:
        raise ConfigError(  # Trainer would train nothing, or one more step
            f"max_steps {last}: {checkpoint} is of step {step}, so nothing is left to train; increase max_steps, or "
            "give an earlier checkpoint with --resume"
        )


def _is_longer(config: RunConfig, saved: dict[str, Any] | None, end: int) -> bool:
    """Whether this run is longer than a saved one, which has finished at step `end`."""
    steps, epochs = (config.diff(saved or {}, [key]) for key in ("max_steps", "num_train_epochs"))
    if steps is not None:
        return steps[1] > end
    return config.training["max_steps"] <= 0 and epochs is not None and epochs[1] > epochs[2]


def checkpoint_of(config: RunConfig, training: ZeroTrainingArguments, say: Callable[[str], object]) -> str | None:
    """Returns the checkpoint to resume from, or `None` to start over. All ranks call it. `say` is called with one line
    for each newer checkpoint that is damaged. Raises [`CheckpointError`] if there are checkpoints, and no complete
    one."""
    if config.resume != AUTO:
        return None if config.resume == NEVER else config.resume
    choice = newest_whole(training.output_dir, say=say, strict=training.zero_resume_strict)
    if choice.folder is None and choice.faults:
        raise CheckpointError(
            f"{training.output_dir}: none of its checkpoints can be resumed from{choice.reasons}; "
            "--overwrite_output_dir removes them and starts over"
        )
    return choice.folder


def resume_message(checkpoint: str, config: RunConfig, training: ZeroTrainingArguments) -> str:
    """Returns the line that names the checkpoint, the remaining length of the run, and a changed norm to clip to:
    other hyperparameters of the optimizer come from the checkpoint."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    step, steps, epochs = state["global_step"], training.max_steps, training.num_train_epochs
    place = f"step {step} of {steps}" if steps > 0 else f"step {step}, epoch {state['epoch']:.4g} of {epochs:g}"
    changed = config.diff(saved_in(Path(checkpoint).absolute().parent) or {}, ["max_grad_norm"])
    clips = "" if changed is None else f", with max_grad_norm {changed[1]} as given (it was {changed[2]})"
    return f"resume: going on from {checkpoint}, {place}{clips}; --overwrite_output_dir starts over"


def finished_message(config: RunConfig, folder: Path) -> str | None:
    """Returns the line for a run that has finished, or `None`."""
    run = read_run(folder)
    if config.resume != AUTO or not run.get("finished") or not weights_in(folder):
        return None
    if _difference(config, saved_in(folder)) is not None:
        return None
    loss = f", last loss {run['loss']:.4g}" if run.get("loss") is not None else ""
    return (
        f"{folder}: this run has finished (step {run['step']}{loss}), and nothing is left to train; "
        "--overwrite_output_dir trains again and replaces it"
    )


def remove_checkpoints(trainer: ZeroTrainer) -> None:
    """Removes the checkpoints of an earlier run, from which `--resume auto` would resume. All ranks call it."""

    def remove(folder: Path) -> None:
        for path in checkpoints_in(folder):
            path.unlink() if path.is_symlink() else remove_folder(path)

    _on_first(trainer, "removing the checkpoints of an earlier run", remove)


def record_start(trainer: ZeroTrainer, config: RunConfig, rows: str | None = None) -> None:
    """Writes `resolved.yaml` and `run.json`, with a summary of the rows. All ranks call it."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RUN_NAME, json.dumps({"finished": False, "rows": rows}).encode())
        write_whole(folder / RESOLVED_NAME, resolved_text(config).encode())

    _on_first(trainer, f"writing {RESOLVED_NAME}", write)


def record_end(trainer: ZeroTrainer) -> None:
    """Writes to `run.json` that the run has finished. All ranks call it once the model is saved."""

    def write(folder: Path) -> None:
        loss = next((entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry), None)
        run = {**read_run(folder), "finished": True, "step": trainer.state.global_step, "loss": loss}
        write_whole(folder / RUN_NAME, json.dumps(run).encode())

    _on_first(trainer, f"writing {RUN_NAME}", write)


def _on_first(trainer: ZeroTrainer, what: str, act: Callable[[Path], None]) -> None:
    """Calls a function with the output folder on rank 0. All ranks raise if it fails."""
    comm, folder = trainer.accelerator.shard(trainer.model).comm, Path(trainer.args.output_dir)
    run_on_all_ranks(comm, f"{folder}: {what}", on_first(comm, lambda: act(folder)))


def read_run(folder: Path) -> dict[str, Any]:
    """Reads `run.json`. Returns an empty dict if it does not exist or is damaged."""
    with suppress(FileNotFoundError, CheckpointError):
        return read_json(folder / RUN_NAME)
    return {}


def weights_in(folder: Path) -> list[Path]:
    """Returns the files with weights of a model or an adapter in a folder, not those of its checkpoints."""
    return [path for pattern in WEIGHTS for path in folder.glob(pattern)]


def resolved_text(config: RunConfig) -> str:
    """Returns YAML of all keys: first those that differ from their defaults, then the others."""
    set_by_user = config.non_default()
    values = {key: value for key, value in config.values().items() if key not in set_by_user}
    values = {key: value for key, value in values.items() if value not in (None, [])}
    folder = config.training["output_dir"]
    path, other = (shlex.quote(text) for text in (str(Path(folder) / RESOLVED_NAME), f"{folder}-again"))
    return (
        f"# Repeats this run: {program()} {config.task} --config {path} --output_dir {other}\n"
        f"{yaml_text(set_by_user)}\n"
        "# Defaults, so that a version with other defaults repeats the run too.\n"
        f"{yaml_text(values)}"
    )


def check_unchanged(config: RunConfig, folder: Path) -> None:
    """Raises [`ConfigError`] if a run that resumes has another task, model or data than the one of the folder."""
    saved = saved_in(folder)
    has_test_rows = [any(values.get(name) for name in TEST_SOURCES) for values in (config.values(), saved or {})]
    free = FREE if config.kind.holds_out and len(set(has_test_rows)) > 1 else (*FREE, *TEST_ROWS)
    own = [field.name for field in fields(config.arguments) if field.name not in free]
    changed = None if saved is None else config.diff(saved, ["task", *own, *config.kind.decisive, *ORDER])
    if changed is not None:
        key, now, before = changed
        raise ConfigError(
            f"{key}: {now!r} now, {before!r} in the run that {folder} holds checkpoints of "
            f"({folder / RESOLVED_NAME}); go on with the same, or give another output_dir or --overwrite_output_dir"
        )


def check_rows(data: Data, folder: Path) -> None:
    """Raises [`ConfigError`] if a run that resumes has other rows, or another order of rows."""
    before, now = read_run(folder).get("rows"), data.rows_summary()
    if before and now and before != now:
        raise ConfigError(
            f"{data.source}: {now} now, {before} in the run that {folder} holds checkpoints of; give the same rows "
            "in the same order, or another output_dir or --overwrite_output_dir"
        )


def saved_in(folder: Path) -> dict[str, Any] | None:
    """Reads the configuration in a folder. Returns `None` if there is none."""
    path = folder / RESOLVED_NAME
    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({' '.join(str(error).split())}), so this run cannot be compared with the one "
            "before; --overwrite_output_dir starts over"
        ) from error


def _difference(config: RunConfig, saved: dict[str, Any] | None) -> str | None:
    """Returns the first key that differs from a saved configuration and changes the model, with its values."""
    if saved is None:
        return f"there is no {RESOLVED_NAME}"
    keys = [key for key in config.values() if not key.startswith(NOT_OF_THE_MODEL)]
    changed = config.diff(saved, keys)
    return None if changed is None else f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"
