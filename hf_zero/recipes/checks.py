"""What can be refused before a process is started or a weight is read."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hf_zero.accelerator.launched import LAUNCHER_VARIABLES, refuse_other_engines
from hf_zero.errors import ConfigError, size_text
from hf_zero.recipes.settings import Settings
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.checks import check_arguments, check_output_dir, check_schedule


try:
    import resource
except ImportError:  # not a Unix
    resource = None


def check_training_settings(settings: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
    """Refuses settings that no task could work with.

    Args:
        settings (`Mapping[str, Any]`): The fields of the training arguments, parsed but not yet acted upon.
        environment (`Mapping[str, str]`, *optional*): Instead of `os.environ`.

    Raises:
        ConfigError: If a setting of ZeRO is not valid, another sharding engine is asked for, `output_dir` cannot be
            written, or a value cannot work. What only the training arguments know about each other is found when they
            are made.
    """
    ZeroArgumentsMixin.zero_config(cast(ZeroArgumentsMixin, SimpleNamespace(**settings)))
    refuse_other_engines(settings, environment)
    check_output_dir(settings.get("output_dir"))
    check_arguments(settings)
    check_schedule(settings)


def check_file_sizes(model: str | None) -> None:
    """Refuses to train a model whose files could not be written here again, for all the room there is.

    Args:
        model (`str`, *optional*): A folder; of a hub id the files need not be here yet.

    Raises:
        ConfigError: If the process may not write files of that size.
    """
    folder = Path(model or "").expanduser()
    if resource is None or not folder.is_dir():
        return
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = max((path.stat().st_size for path in folder.glob("*.safetensors")), default=0)
    if resource.RLIM_INFINITY != limit < largest:
        raise ConfigError(
            f"ulimit -f: a file may have {size_text(limit)} here, and the largest one of {model} has "
            f"{size_text(largest)}; raise the limit (ulimit -f unlimited)"
        )


def check_test_set(settings: Settings) -> None:
    """Refuses evaluation where there is nothing to evaluate on.

    Args:
        settings ([`Settings`]): Of the run.

    Raises:
        ConfigError: If nothing is, naming the setting that asks for it.
    """
    arguments, training = settings.arguments, settings.training
    if TASKS[settings.task].holds_out or arguments.test_file or arguments.dataset_test_split:
        return
    strategy = training["eval_strategy"]
    asks = {
        f"eval_strategy {getattr(strategy, 'value', strategy)}": strategy != "no",
        "eval_on_start": training["eval_on_start"],
        "load_best_model_at_end": training["load_best_model_at_end"],
    }
    for name, is_asked in asks.items():
        if is_asked:
            raise ConfigError(
                f"{name}: there is no test set to evaluate on; give --dataset_test_split or --test_file, or leave "
                "it out"
            )


def launched_world_size(num_processes: int | None, environment: Mapping[str, str] | None = None) -> int | None:
    """Reads what an outer launcher such as torchrun has set, and holds it against `--num_processes`.

    Args:
        num_processes (`int`, *optional*): What the user asked for, if anything.
        environment (`Mapping[str, str]`, *optional*): Instead of `os.environ`.

    Returns:
        `int` or `None`: The number of processes that the outer launcher started; None when there is none.

    Raises:
        ConfigError: If the variables are incomplete or contradict each other or `num_processes`.
    """
    environment = os.environ if environment is None else environment
    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"--num_processes {num_processes}: expected 1 or more")
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if "WORLD_SIZE" in missing and "RANK" in missing:
        return None
    if missing:
        found = "WORLD_SIZE" if "WORLD_SIZE" not in missing else "RANK"
        raise ConfigError(
            f"{found}={environment[found]} is set but {', '.join(missing)} not: "
            "start with torchrun, which sets them all, or unset them and use --num_processes"
        )
    try:
        world_size, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
    except ValueError as error:
        raise ConfigError(f"WORLD_SIZE and RANK: {error}; expected the integers that torchrun sets") from error
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={world_size}: expected a rank below it; start with torchrun")
    if num_processes not in (None, world_size):
        raise ConfigError(
            f"--num_processes {num_processes}, but the launcher set WORLD_SIZE={world_size}; leave it out"
        )
    return world_size
