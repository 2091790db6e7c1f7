"""Decides what becomes of an earlier run in `output_dir`: a run goes on from it, replaces it or is refused.

To go on, it has to be the same run, by its settings and by the config of its model.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import gather_object
from transformers import PretrainedConfig

from hf_zero.checkpoint.folders import read_json, remove_folder
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.artifacts import (
    HIDDEN_NAME,
    LEFT,
    REPORT_NAME,
    RESOLVED_NAME,
    ROWS_LINE,
    SAMPLES_NAME,
    WEIGHTS,
    configuration_of,
)
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.language_models import config_of, named_model
from hf_zero.recipes.loading import ADAPTER_CONFIG_NAME, load_config
from hf_zero.recipes.metrics import LOG_NAME, read_log
from hf_zero.recipes.parser import AUTO
from hf_zero.recipes.settings import NEVER, Settings, parse_settings
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments
from hf_zero.trainer.disk_space import age_of, checkpoints_in
from hf_zero.trainer.resumable import check_resumable, newest_whole, read_step


# A run that goes on keeps its task, the task's own arguments but for these, its decisive training arguments, and those
# that say in which order rows come. These say how rows are read, attention is computed and the model is evaluated; the
# results are the same.
FREE = (*("dataset_num_proc", "skip_bad_rows", "attn_implementation", "compute_metrics", "samples"),)
# What is tested on, in tasks that hold out no training rows for it.
TEST_ROWS = ("test_file", "dataset_test_split", "max_test_rows")
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
# Numbers of a config that say no size: a tokenizer or a task may set them.
NO_SIZES = ("_id", "_ids", "_index", "label2id")
# What training, saving and reading set.
SET_BY_TRAINING = ("_name_or_path", "architectures", "dtype", "id2label", "transformers_version", "use_cache")

Change = tuple[str, Any, Any]  # a key, its value now and its value before


def check_resume(settings: Settings) -> None:
    """Refuses a run that could not go on from the checkpoints there are, or that would lose a model."""
    folder = Path(settings.training["output_dir"])
    if settings.resume == NEVER:
        _check_can_start_anew(settings, folder)
        return
    if settings.resume == AUTO:
        if checkpoints_in(folder):
            check_unchanged(settings, folder)
            check_same_model(settings, checkpoints_in(folder))
            _check_finished_is_kept(settings, folder)
            _check_not_past(settings, newest := checkpoints_in(folder)[0], age_of(newest)[0])
        else:
            _check_model_is_kept(settings, folder)
        return
    checkpoint = Path(settings.resume)
    if not checkpoint.is_dir():
        raise ConfigError(f"resume {settings.resume!r}: no such folder; give auto, never or a checkpoint's folder")
    check_resumable(checkpoint)
    check_unchanged(settings, checkpoint.absolute().parent)
    check_same_model(settings, [checkpoint])
    if checkpoint.resolve().parent != folder.resolve():
        _check_model_is_kept(settings, folder)
    _check_not_past(settings, checkpoint, read_step(checkpoint))


def _check_can_start_anew(settings: Settings, folder: Path) -> None:
    if not settings.overwrite_output_dir:
        if left := left_in(folder, with_model=True):
            raise ConfigError(
                f"output_dir {str(folder)!r}: holds {left[0].name} of an earlier run; give another output_dir, or "
                "--overwrite_output_dir, which replaces it"
            )
        return
    removed = {left.resolve() for left in left_in(folder, with_model=False)}
    named = [named_model(settings.arguments), ("tokenizer_name", getattr(settings.arguments, "tokenizer_name", None))]
    for key, name in named:
        path = Path(name or "").expanduser().resolve()
        if name and removed.intersection((path, *path.parents)):
            raise ConfigError(
                f"{key} {name!r}: lies in output_dir {str(folder)!r}, whose checkpoints --overwrite_output_dir "
                "removes; give another output_dir"
            )


def checkpoint_of(settings: Settings, training: ZeroTrainingArguments) -> str | None:
    """Returns the checkpoint to go on from, or `None` to start anew. All ranks call it. Raises [`CheckpointError`]
    where there are checkpoints, and none that all ranks find complete."""
    if settings.resume != AUTO:
        return None if settings.resume == NEVER else settings.resume
    is_first = training.process_index == 0
    choice = newest_whole(training.output_dir, is_first=is_first, strict=training.zero_resume_strict)
    if choice.folder is None and choice.faults:
        reasons = "; ".join(f"{Path(path).name}: {fault}" for path, fault in choice.faults.items())
        raise CheckpointError(
            f"{training.output_dir}: none of its checkpoints can be resumed from ({reasons}); --overwrite_output_dir "
            "starts anew and removes them"
        )
    return choice.folder


def resume_message(checkpoint: str, training: ZeroTrainingArguments) -> str:
    """Returns the line that names the checkpoint from which a run goes on, and how far this run is there."""
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    step, steps, epochs = state["global_step"], training.max_steps, training.num_train_epochs
    place = f"step {step} of {steps}" if steps > 0 else f"step {step}, epoch {state['epoch']:.4g} of {epochs:g}"
    return f"resume: going on from {checkpoint}, {place}; --overwrite_output_dir starts anew"


def remove_earlier(trainer: ZeroTrainer) -> None:
    """Removes the checkpoints and logs of an earlier run, for a run that replaces it: the next `--resume auto` could
    take them for this run's. Its model stays until the new one is saved. All ranks call it."""
    comm, folder = trainer.accelerator.shard(trainer.model).comm, Path(trainer.args.output_dir)

    def remove() -> None:
        for path in left_in(folder, with_model=False):
            if path.is_dir() and not path.is_symlink():
                remove_folder(path)
            else:
                path.unlink()

    run_on_all_ranks(comm, f"{folder}: removing what an earlier run has left", on_first(comm, remove))


def holds_model(folder: Path) -> bool:
    """Whether a folder holds the weights of a model or adapter, those of its checkpoints apart."""
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def left_in(folder: Path, *, with_model: bool) -> list[Path]:
    """Returns what an earlier run has left in its `output_dir`, with the files of its model or without."""
    with_model = with_model and holds_model(folder)
    checkpoints = checkpoints_in(folder)
    patterns = LEFT if with_model else (LOG_NAME, RESOLVED_NAME, HIDDEN_NAME, SAMPLES_NAME) if checkpoints else ()
    return sorted({*checkpoints, *(path for pattern in patterns for path in folder.glob(pattern))})


def _check_model_is_kept(settings: Settings, folder: Path) -> None:
    """Refuses a run that would write its model over that of another one in its `output_dir`."""
    if settings.overwrite_output_dir or not holds_model(folder):
        return
    whose = _why_another(settings, folder)
    if whose is not None:
        raise ConfigError(
            f"output_dir {str(folder)!r}: holds a model of another run ({whose}); give another output_dir, "
            "or --overwrite_output_dir, which replaces it"
        )


def _check_finished_is_kept(settings: Settings, folder: Path) -> None:
    """Refuses to train again after a finished run, unless a longer run is asked for: from its last step Trainer would
    take one more, and replace the model."""
    end, newest = _end_of(folder), checkpoints_in(folder)[0]
    changed = difference(settings, folder)
    if end is not None and changed is not None and not _is_longer(settings, folder, end):
        raise ConfigError(
            f"output_dir {str(folder)!r}: holds the model of a run that has ended at step {end} "
            f"({in_words(changed)}), and its newest checkpoint is of step {age_of(newest)[0]}; set more max_steps or "
            f"num_train_epochs to go on, --resume {newest} trains again from there and replaces the model, "
            "--overwrite_output_dir starts anew"
        )


def _check_not_past(settings: Settings, checkpoint: Path, step: int) -> None:
    """Refuses a checkpoint beyond the last step, from which Trainer would take one more."""
    if 0 < (last := settings.training["max_steps"]) < step:
        raise ConfigError(
            f"max_steps {last}: {checkpoint} is of step {step}, so nothing is left to train; set more max_steps, or "
            "give an earlier checkpoint with --resume"
        )


def _is_longer(settings: Settings, folder: Path, end: int) -> bool:
    """Whether this run is longer than the one in a folder, which has ended at a step."""
    steps, epochs = (difference(settings, folder, [name]) for name in ("max_steps", "num_train_epochs"))
    if steps is not None:
        return steps[1] > end
    return settings.training["max_steps"] <= 0 and epochs is not None and epochs[1] > epochs[2]


def finished(settings: Settings, training: ZeroTrainingArguments) -> str | None:
    """Returns a line, the same on all ranks, if this very run has ended before. All ranks call it."""
    message = _finished_message(settings, Path(training.output_dir))
    return next((each for each in gather_object([message]) if each is not None), None)


def _finished_message(settings: Settings, folder: Path) -> str | None:
    if settings.resume != AUTO or not holds_model(folder) or _why_another(settings, folder) is not None:
        return None
    end, losses = _end_of(folder), [entry["loss"] for entry in _log_of(folder) if entry.get("loss") is not None]
    steps = "all steps" if end is None else f"step {end}"
    loss = f", last loss {losses[-1]:.4g}" if losses else ""
    longer = ", more epochs or steps go on from its newest checkpoint" if checkpoints_in(folder) else ""
    upload = f", `push {folder}` uploads it" if settings.training["push_to_hub"] else ""
    return (
        f"{folder}: this run has ended ({steps}{loss}; report: {folder / REPORT_NAME}), and nothing is left to train; "
        f"--overwrite_output_dir trains anew and replaces it{longer}{upload}"
    )


def _log_of(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / LOG_NAME) if (folder / LOG_NAME).is_file() else []


def _end_of(folder: Path) -> int | None:
    """Returns the last step of the finished run in a folder, or `None` if it is unknown."""
    log = _log_of(folder) if holds_model(folder) and (folder / REPORT_NAME).exists() else []
    return log[-1]["step"] if log else None


def _why_another(settings: Settings, folder: Path) -> str | None:
    """Returns why the model in a folder is another run's, or `None` if it is this run's."""
    if configuration_of(folder) is None:
        return f"there is no {RESOLVED_NAME}"
    changed = difference(settings, folder)
    if changed is not None:
        return in_words(changed)
    return None if (folder / REPORT_NAME).exists() else f"there is no {REPORT_NAME}, so it did not end"


def check_unchanged(settings: Settings, folder: Path) -> None:
    """Refuses to go on with a run whose task, model or data were others, by the configuration that it left."""
    free = FREE if TASKS[settings.task].holds_out else (*FREE, *TEST_ROWS)
    own = [field.name for field in fields(settings.arguments) if field.name not in free]
    decisive = getattr(TASKS[settings.task].load(), "decisive", ())
    changed = difference(settings, folder, ["task", *own, *decisive, *ORDER])
    if changed is not None:
        key, now, before = changed
        raise ConfigError(
            f"{key}: {now!r} now, {before!r} in the run that {folder} holds checkpoints of "
            f"({configuration_of(folder)}); go on with the same, or give another output_dir or --overwrite_output_dir"
        )


def check_rows(data: Data, folder: Path) -> None:
    """Refuses to go on with other rows, or in another order, than the run whose configuration a folder has."""
    path, now = configuration_of(folder), data.rows_summary()
    before = path and re.search(rf"^{ROWS_LINE}(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if before and now and before[1] != now:
        raise ConfigError(
            f"{data.source}: {now} now, {before[1]} in the run that {folder} holds checkpoints of; give the same rows "
            "in the same order, or another output_dir or --overwrite_output_dir"
        )


def taken_anew(settings: Settings, folder: Path) -> list[str]:
    """Returns a line for each setting that a run which goes on takes as it is given, and that was another before."""
    changed = difference(settings, folder, ["max_grad_norm"])
    return (
        [] if changed is None else [f"resume: {changed[0]} is {changed[1]} from now on, as given; it was {changed[2]}"]
    )


def saved_in(folder: Path) -> dict[str, Any] | None:
    """Reads the configuration that a run has left in a folder; `None` where there is none."""
    path = configuration_of(folder)
    if path is None:
        return None
    try:
        saved = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({' '.join(str(error).split())}), so this run cannot be compared with the one "
            "before; --overwrite_output_dir starts anew"
        ) from error
    if not isinstance(saved, dict):
        raise ConfigError(
            f"{path}: holds no keys, so this run cannot be compared with it; --overwrite_output_dir starts anew"
        )
    return saved


def difference(settings: Settings, folder: Path, keys: Iterable[str] | None = None) -> Change | None:
    """Finds in what a run's model differs from that of an earlier run, by the configuration which that has left in a
    folder; without one nothing is compared.

    Returns the first of `keys` that has changed, by default of all but those that say where a log goes, how a run is
    watched, and by how many processes it is trained. Raises [`ConfigError`] where the configuration cannot be read.
    """
    saved = saved_in(folder)
    if saved is None:
        return None
    now, before = settings.values(), {**parse_settings(settings.task, []).values(), **saved}
    if keys is None:
        ignored = {*NOT_OF_THE_MODEL, "num_processes", "output_dir"}
        keys = [key for key in now if key not in ignored]
    return first_change(now, before, keys)


def check_same_model(settings: Settings, checkpoints: Iterable[Path]) -> None:
    """Refuses to go on from the checkpoints of another model, of which the first with a config is compared. Configs
    that cannot be read are left to loading."""
    for checkpoint in checkpoints:
        found = _model_difference(settings.arguments, checkpoint)
        if found is not None:
            raise ConfigError(
                f"output_dir {settings.training['output_dir']!r}: {checkpoint} is of another model ({found}); give "
                "another output_dir, or --overwrite_output_dir, which replaces it"
            )
        if any((checkpoint / name).is_file() for name in ("config.json", ADAPTER_CONFIG_NAME)):
            return


def first_change(now: dict[str, Any], before: dict[str, Any], keys: Iterable[str]) -> Change | None:
    """Returns the first of the keys whose value has changed, of those that there were before."""
    return next(((key, now[key], before[key]) for key in keys if key in before and now[key] != before[key]), None)


def in_words(changed: Change) -> str:
    return f"{changed[0]}: {changed[1]!r} now, {changed[2]!r} there"


def _model_difference(arguments: Any, checkpoint: Path) -> str | None:
    if (checkpoint / ADAPTER_CONFIG_NAME).is_file():
        if not arguments.use_peft:
            return "it is an adapter, and use_peft is not set"
        with suppress(CheckpointError, OSError):
            rank = read_json(checkpoint / ADAPTER_CONFIG_NAME).get("r")
            return None if rank == arguments.lora_r else in_words(("lora_r", arguments.lora_r, rank))
        return None
    before = now = None
    with suppress(ConfigError):  # that is said when it is loaded
        before = load_config(str(checkpoint)) if (checkpoint / "config.json").is_file() else None
        now = config_of(arguments)
    if before is not None and arguments.use_peft:
        return "it is no adapter, and use_peft trains one"
    if before is None or now is None:
        return None
    text = now.get_text_config()
    if before.model_type != now.model_type and before.model_type == text.model_type:
        now = text  # of a model of texts and images, AutoModelForCausalLM makes the part for texts
    is_new = named_model(arguments)[0] == "config_name"
    kept_now, kept_before = (
        {"model_type": config.model_type, **_kept(config, whole=is_new)} for config in (now, before)
    )
    if is_new:  # a key that the checkpoint's config has not
        kept_before = {**dict.fromkeys(kept_now), **kept_before}
    changed = first_change(kept_now, kept_before, kept_now)
    return changed and in_words(changed)


def _kept(config: PretrainedConfig, prefix: str = "", *, whole: bool) -> dict[str, Any]:
    """Returns what of a config has to stay, with that of the model's parts: the numbers that determine shapes, or
    `whole`, where a file of the user's is the one source of it, all but what training sets."""
    left_out = {*SET_BY_TRAINING, *config.sub_configs}
    kept = {
        prefix + key: value
        for key, value in json.loads(config.to_json_string(use_diff=False)).items()
        if not key.endswith(NO_SIZES) and (key not in left_out if whole else _is_size(value))
    }
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            kept |= _kept(part, f"{prefix}{name}.", whole=whole)
    return kept


def _is_size(value: Any) -> bool:
    return type(value) is int or isinstance(value, list) and all(type(each) is int for each in value)
