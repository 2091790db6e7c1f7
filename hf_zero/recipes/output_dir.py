"""The `output_dir` of a run: whether a run may start, resume or replace another there, and what it records of itself.

`resolved.yaml` has all config of the run, and `run.json` says whether it has finished. A run resumes if it is the
same run, by these two files.
"""

import json
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import gather_object

from hf_zero.checkpoint.folders import read_json, remove_folder, write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.language_models import named_model
from hf_zero.recipes.parser import AUTO, program
from hf_zero.recipes.run_config import NEVER, RunConfig, yaml_text
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments
from hf_zero.trainer.disk_space import age_of, checkpoints_in
from hf_zero.trainer.resumable import check_resumable, newest_whole, read_step


RESOLVED_NAME = "resolved.yaml"
RUN_NAME = "run.json"
WEIGHTS = (
    *("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "adapter_model.bin"),
)
# A run that resumes keeps its task, the task's arguments except these, the task's decisive training arguments, and the
# order of rows. These change how rows are read, attention is computed and the model is evaluated, not the results.
FREE = ("dataset_num_proc", "skip_bad_rows", "attn_implementation", "compute_metrics", "samples")
TEST_ROWS = ("test_file", "dataset_test_split", "max_test_rows")  # free if the task holds out no training rows
ORDER = ("seed", "data_seed", "train_sampling_strategy")
# These say how a run is watched, what of it is kept, and where it is uploaded; its model is the same.
NOT_OF_THE_MODEL = (
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
    *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "include_num_input_tokens_seen"),
    *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "skip_memory_metrics", "num_processes", "output_dir", *FREE),
)


def check_start(config: RunConfig) -> None:
    """Refuses a run that cannot resume from the checkpoints in its folder, or that would replace a model unasked."""
    folder, checkpoint = Path(config.training["output_dir"]), None
    if config.resume == NEVER:
        _check_can_start_anew(config, folder)
        return
    if config.resume != AUTO:
        checkpoint = Path(config.resume)
        if not checkpoint.is_dir():
            raise ConfigError(f"resume {config.resume!r}: no such folder; give auto, never or a checkpoint's folder")
        check_resumable(checkpoint)
    elif found := checkpoints_in(folder):
        checkpoint = found[0]
    if checkpoint is not None:
        check_unchanged(config, checkpoint.absolute().parent)
    if not config.overwrite_output_dir and holds_model(folder):
        _check_model_is_kept(config, folder, checkpoint)
    if checkpoint is not None:
        step, last = age_of(checkpoint)[0] if config.resume == AUTO else read_step(checkpoint), _max_steps(config)
        if 0 < last < step:  # Trainer would take one more step
            raise ConfigError(
                f"max_steps {last}: {checkpoint} is of step {step}, so nothing is left to train; set more max_steps, "
                "or give an earlier checkpoint with --resume"
            )


def _check_can_start_anew(config: RunConfig, folder: Path) -> None:
    checkpoints = checkpoints_in(folder)
    if not config.overwrite_output_dir:
        if left := [*checkpoints, *_weights_in(folder), *folder.glob(RESOLVED_NAME)]:
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds {left[0].name} of an earlier run; give another output_dir, or "
                "--overwrite_output_dir, which replaces it"
            )
        return
    removed = {path.resolve() for path in checkpoints}
    named = [named_model(config.arguments), ("tokenizer_name", getattr(config.arguments, "tokenizer_name", None))]
    for key, name in named:
        path = Path(name or "").expanduser().resolve()
        if name and removed.intersection((path, *path.parents)):
            raise ConfigError(
                f"{key} {name!r}: lies in output_dir {str(folder)!r}, whose checkpoints --overwrite_output_dir "
                "removes; give another output_dir"
            )


def _check_model_is_kept(config: RunConfig, folder: Path, checkpoint: Path | None) -> None:
    """Refuses a run that would replace the model of another run, or of a finished run that it does not make longer."""
    run, saved = read_run(folder), saved_in(folder)
    changed = difference(config, saved)
    if checkpoint is None or checkpoint.resolve().parent != folder.resolve():
        reason = f"there is no {RESOLVED_NAME}" if saved is None else changed and in_words(changed)
        reason = reason or (None if run.get("finished") else "it has not finished")
        if reason is not None:
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds a model of another run ({reason}); give another output_dir, "
                "or --overwrite_output_dir, which replaces it"
            )
    elif config.resume == AUTO and run.get("finished") and changed is not None:
        if not _is_longer(config, saved, run["step"]):
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds the model of a run that has ended at step {run['step']} "
                f"({in_words(changed)}), and its newest checkpoint is of step {age_of(checkpoint)[0]}; set more "
                f"max_steps or num_train_epochs to go on, --resume {checkpoint} trains again from there and replaces "
                "the model, --overwrite_output_dir starts anew"
            )


def _is_longer(config: RunConfig, saved: dict[str, Any] | None, end: int) -> bool:
    """Whether this run is longer than a saved one, which has ended at step `end`."""
    steps, epochs = (difference(config, saved, [name]) for name in ("max_steps", "num_train_epochs"))
    if steps is not None:
        return steps[1] > end
    return _max_steps(config) <= 0 and epochs is not None and epochs[1] > epochs[2]


def _max_steps(config: RunConfig) -> int:
    return config.training["max_steps"]


def checkpoint_of(config: RunConfig, training: ZeroTrainingArguments) -> str | None:
    """Returns the checkpoint to resume from, or `None` to start over. All ranks call it. Raises [`CheckpointError`] if
    there are checkpoints, and no complete one."""
    if config.resume != AUTO:
        return None if config.resume == NEVER else config.resume
    is_first = training.process_index == 0
    choice = newest_whole(training.output_dir, is_first=is_first, strict=training.zero_resume_strict)
    if choice.folder is None and choice.faults:
        reasons = "; ".join(f"{Path(path).name}: {fault}" for path, fault in choice.faults.items())
        raise CheckpointError(
            f"{training.output_dir}: none of its checkpoints can be resumed from ({reasons}); --overwrite_output_dir "
            "starts anew and removes them"
        )
    return choice.folder


def resume_message(checkpoint: str, config: RunConfig, training: ZeroTrainingArguments) -> str:
    """Returns the line that names the checkpoint, how far this run is there, and a norm that gradients are clipped to
    from now on: other hyperparameters of the optimizer come from the checkpoint."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    step, steps, epochs = state["global_step"], training.max_steps, training.num_train_epochs
    place = f"step {step} of {steps}" if steps > 0 else f"step {step}, epoch {state['epoch']:.4g} of {epochs:g}"
    changed = difference(config, saved_in(Path(checkpoint).absolute().parent), ["max_grad_norm"])
    clips = "" if changed is None else f", with max_grad_norm {changed[1]} as given (it was {changed[2]})"
    return f"resume: going on from {checkpoint}, {place}{clips}; --overwrite_output_dir starts anew"


def finished(config: RunConfig, training: ZeroTrainingArguments) -> str | None:
    """Returns a line, the same on all ranks, if this run has finished before. All ranks call it."""
    message = finished_message(config, Path(training.output_dir))
    return next((each for each in gather_object([message]) if each is not None), None)


def finished_message(config: RunConfig, folder: Path) -> str | None:
    """Returns the line for a run that has finished, or `None`."""
    run, saved = read_run(folder), saved_in(folder)
    if config.resume != AUTO or not run.get("finished") or saved is None or not holds_model(folder):
        return None
    if difference(config, saved) is not None:
        return None
    loss = f", last loss {run['loss']:.4g}" if run.get("loss") is not None else ""
    longer = ", more epochs or steps go on from its newest checkpoint" if checkpoints_in(folder) else ""
    upload = f", `push {folder}` uploads it" if config.training["push_to_hub"] else ""
    return (
        f"{folder}: this run has ended (step {run['step']}{loss}), and nothing is left to train; "
        f"--overwrite_output_dir trains anew and replaces it{longer}{upload}"
    )


def remove_checkpoints(trainer: ZeroTrainer) -> None:
    """Removes the checkpoints of an earlier run, which a later `--resume auto` would take for this run's. All ranks
    call it."""
    comm, folder = trainer.accelerator.shard(trainer.model).comm, Path(trainer.args.output_dir)

    def remove() -> None:
        for path in checkpoints_in(folder):
            path.unlink() if path.is_symlink() else remove_folder(path)

    run_on_all_ranks(comm, f"{folder}: removing the checkpoints of an earlier run", on_first(comm, remove))


def record_start(trainer: ZeroTrainer, config: RunConfig, rows: str | None = None) -> None:
    """Writes `resolved.yaml` and `run.json`, with a summary of the rows. All ranks call it."""

    def write() -> None:
        folder = Path(trainer.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RUN_NAME, json.dumps({"finished": False, "rows": rows}).encode())
        write_whole(folder / RESOLVED_NAME, resolved_text(config).encode())

    comm = trainer.accelerator.shard(trainer.model).comm
    run_on_all_ranks(comm, f"writing {RESOLVED_NAME}", on_first(comm, write))


def record_end(trainer: ZeroTrainer) -> None:
    """Writes in `run.json` that the run has finished. All ranks call it once the model is saved."""

    def write() -> None:
        folder, log = Path(trainer.args.output_dir), trainer.state.log_history
        loss = next((entry["loss"] for entry in reversed(log) if "loss" in entry), None)
        run = {**read_run(folder), "finished": True, "step": trainer.state.global_step, "loss": loss}
        write_whole(folder / RUN_NAME, json.dumps(run).encode())

    comm = trainer.accelerator.shard(trainer.model).comm
    run_on_all_ranks(comm, f"writing {RUN_NAME}", on_first(comm, write))


def read_run(folder: Path) -> dict[str, Any]:
    """Reads `run.json`. Returns an empty dict if there is none, or it is damaged."""
    with suppress(FileNotFoundError, CheckpointError):
        return read_json(folder / RUN_NAME)
    return {}


def holds_model(folder: Path) -> bool:
    """Whether a folder holds the weights of a model or adapter, those of its checkpoints apart."""
    return bool(_weights_in(folder))


def _weights_in(folder: Path) -> list[Path]:
    return [path for pattern in WEIGHTS for path in folder.glob(pattern)]


def repeating_command(config: RunConfig, folder: str) -> str:
    """Returns the command that repeats, in another folder, the run whose configuration is in a folder."""
    path = shlex.quote(str(Path(folder) / RESOLVED_NAME))
    return f"{program()} {config.task} --config {path} --output_dir {shlex.quote(f'{folder}-again'.lstrip('-'))}"


def resolved_text(config: RunConfig) -> str:
    """Returns YAML of all keys: first those that differ from their defaults, then the others."""
    set_by_user = config.non_default()
    values = {key: value for key, value in config.values().items() if key not in set_by_user}
    values = {key: value for key, value in values.items() if value not in (None, [])}
    return (
        f"# Repeats this run: {repeating_command(config, config.training['output_dir'])}\n"
        f"{yaml_text(set_by_user)}\n"
        "# Defaults, so that a version with other defaults repeats the run too.\n"
        f"{yaml_text(values)}"
    )


def check_unchanged(config: RunConfig, folder: Path) -> None:
    """Refuses to resume a run whose task, model or data were others, by the configuration in its folder."""
    free = FREE if config.kind.holds_out else (*FREE, *TEST_ROWS)
    own = [field.name for field in fields(config.arguments) if field.name not in free]
    changed = difference(config, saved_in(folder), ["task", *own, *config.kind.decisive, *ORDER])
    if changed is not None:
        key, now, before = changed
        raise ConfigError(
            f"{key}: {now!r} now, {before!r} in the run that {folder} holds checkpoints of "
            f"({folder / RESOLVED_NAME}); go on with the same, or give another output_dir or --overwrite_output_dir"
        )


def check_rows(data: Data, folder: Path) -> None:
    """Refuses to resume with other rows, or in another order, than the run in a folder."""
    before, now = read_run(folder).get("rows"), data.rows_summary()
    if before and now and before != now:
        raise ConfigError(
            f"{data.source}: {now} now, {before} in the run that {folder} holds checkpoints of; give the same rows "
            "in the same order, or another output_dir or --overwrite_output_dir"
        )


def saved_in(folder: Path) -> dict[str, Any] | None:
    """Reads the configuration in a folder; `None` if there is none."""
    path = folder / RESOLVED_NAME
    if not path.exists():
        return None
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(saved, dict):
            return saved
        reason = "it holds no keys"
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
    raise ConfigError(
        f"{path}: cannot be read ({reason}), so this run cannot be compared with the one before; "
        "--overwrite_output_dir starts anew"
    )


def difference(
    config: RunConfig, saved: dict[str, Any] | None, keys: Iterable[str] | None = None
) -> tuple[str, Any, Any] | None:
    """Returns the first key that differs from a saved configuration, its value now and its value there. By default all
    keys that the model depends on are compared; without a configuration, none."""
    if saved is None:
        return None
    return config.diff(saved, keys or [key for key in config.values() if key not in NOT_OF_THE_MODEL])


def in_words(changed: tuple[str, Any, Any]) -> str:
    return f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"
