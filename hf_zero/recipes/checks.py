"""What can be refused before a process is started or a weight is read."""

import os
from collections.abc import Mapping
from typing import Any

from hf_zero.config import REDUCE_DTYPES, STAGES, choose
from hf_zero.errors import ConfigError
from hf_zero.trainer.arguments import LAUNCHER_VARIABLES, check_output_dir, refuse_other_engines


def check_training_settings(settings: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
    """Refuses settings that no task could work with.

    Args:
        settings (`Mapping[str, Any]`): The fields of the training arguments, parsed but not yet acted upon.
        environment (`Mapping[str, str]`, *optional*): Instead of `os.environ`.

    Raises:
        ConfigError: If a setting of ZeRO is not valid, another sharding engine is asked for, or `output_dir` cannot be
            written. What only the training arguments know about each other is found when they are made.
    """
    choose("zero_stage", settings["zero_stage"], STAGES)
    choose("zero_reduce_dtype", settings["zero_reduce_dtype"], REDUCE_DTYPES)
    refuse_other_engines(settings, environment)
    check_output_dir(settings.get("output_dir"))


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
