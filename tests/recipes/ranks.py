"""Whole runs on ranks that have imported everything already: quicker than processes of their own."""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from hf_zero.recipes.report import LOG_NAME
from tests.distributed import run_ranks


@dataclass(frozen=True)
class Ended:
    """How the command line ended on one rank."""

    code: int
    out: str
    err: str


def read_log(path: Path) -> list[dict]:
    """The entries of a run's log, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logged(folder: Path, name: str) -> list[float]:
    """What the log of the run that left a folder says of one number, oldest first."""
    return [entry[name] for entry in read_log(folder / LOG_NAME) if name in entry]


# Of a run that trains a few steps, each of which is logged.
BRIEF = {"output_dir": "out", "logging_steps": 1, "save_strategy": "no", "report_to": "none"}


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """The settings as a command line."""
    return [
        word
        for name, value in settings.items()
        for word in ([f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"])
    ]


def trained(task: str, folder, *, num_ranks: int = 2, **settings) -> str:
    """Runs a task on ranks, all of which end well, and of which only the first prints. Returns what it has printed."""
    first, *others = run_on_ranks([task, *flags_of({**BRIEF, **settings})], folder, num_ranks)
    assert {first.code, *(rank.code for rank in others)} == {0}, first.err + "".join(rank.err for rank in others)
    assert {rank.out for rank in others} <= {""}
    return first.out


def run_on_ranks(
    argv: list[str],
    folder,
    num_ranks: int = 2,
    timeout: float = 240.0,
    *,
    stop_in: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Ended]:
    """`python -m hf_zero.recipes` with these arguments, as a launcher would start it: one result per rank.

    Args:
        argv (`list[str]`): the task and its keys.
        folder: where the ranks are, and keep what `datasets` caches.
        num_ranks (`int`): how many.
        timeout (`float`): seconds.
        stop_in (`int`, *optional*): the last rank is sent SIGTERM while it computes this step.
        environment (`Mapping[str, str]`): variables that are set meanwhile.
    """
    return run_ranks(run_on_this_rank, num_ranks, argv, str(folder), stop_in, dict(environment), timeout=timeout)


def run_on_this_rank(
    argv: list[str],
    folder: str,
    stop_in: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """What `run_on_ranks` calls on each rank."""
    import datasets

    from hf_zero.recipes.cli import main
    from tests.trainer.harness import reset_accelerate

    reset_accelerate()
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    cache, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, f"{folder}/cache"
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ, environment),
            mock.patch("torch.distributed.destroy_process_group"),  # the group is the next test's, too
            _stopped_in(stop_in),
        ):
            code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    finally:
        if wandb := sys.modules.get("wandb"):
            wandb.finish()  # as it does when a process ends
        os.chdir(before)
        datasets.config.HF_DATASETS_CACHE = cache
    return Ended(code, out.getvalue(), err.getvalue())


def _stopped_in(step: int | None) -> contextlib.AbstractContextManager:
    """The last rank is sent SIGTERM in this step."""
    from transformers import DefaultFlowCallback  # which every trainer has

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == step and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return mock.patch.object(DefaultFlowCallback, "on_step_begin", on_step_begin)
