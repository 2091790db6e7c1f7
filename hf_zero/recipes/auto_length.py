"""`--max_length auto` of a run: the longest rows with which it fits the memory of its devices."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from hf_zero.errors import ConfigError
from hf_zero.recipes.earlier_run import holds_model, saved_in
from hf_zero.recipes.parser import AUTO
from hf_zero.recipes.planned_run import device_nbytes
from hf_zero.recipes.planned_tasks import planned
from hf_zero.recipes.settings import NEVER, Settings, with_length
from hf_zero.trainer.disk_space import checkpoints_in


def with_longest(settings: Settings, say: Callable[[str], object]) -> Settings:
    """Returns the settings of a run with the longest rows that fit, or with those of the run that it goes on with;
    `say` is told which. Raises [`ConfigError`] where such a run is not planned, its memory is not known, or no rows
    fit."""
    before, folder = _length_before(settings)
    if before is not None:
        say(f"max_length auto: {before} tokens, as in the run that {folder} holds")
        return with_length(settings, before)
    if (settings.launched or 1) > 1 and settings.memory is None:
        raise ConfigError("max_length auto: each process sees its own device alone; add --memory with the GiB of one")
    on_cpu = settings.training["use_cpu"] or not torch.accelerator.is_available()
    num_ranks = settings.launched or settings.num_processes or 1
    run = planned(replace(settings, num_processes=num_ranks, training={**settings.training, "use_cpu": on_cpu}))
    if settings.launched is not None and (per_host := os.environ.get("LOCAL_WORLD_SIZE")):
        run = replace(run, ranks_per_host=int(per_host))
    found = replace(run, memory_nbytes=device_nbytes(settings.memory, on_cpu=on_cpu)).longest()
    for line in (*run.notes, found.render()):
        say(line)
    return with_length(settings, found.num_tokens)


def _length_before(settings: Settings) -> tuple[int | None, Path]:
    """Returns the length in the configuration of the run that this one goes on with, and its folder."""
    is_named = settings.resume not in (AUTO, NEVER)
    folder = Path(settings.resume).absolute().parent if is_named else Path(settings.training["output_dir"])
    if settings.resume == NEVER or not (is_named or checkpoints_in(folder) or holds_model(folder)):
        return None, folder
    length = (saved_in(folder) or {}).get("max_length")
    return (length if isinstance(length, int) else None), folder


def with_same_length(settings: Settings, training: Any) -> Settings:
    """Returns the settings with the length that rank 0 has found, which the training arguments get too, in place. All
    ranks call it: hosts may see other folders."""
    if not settings.takes_longest:
        return settings
    length = gather_object([settings.length])[0]
    if hasattr(training, "max_length"):
        training.max_length = length
    return with_length(settings, length)
