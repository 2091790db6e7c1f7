"""Tasks of EleutherAI's library lm_eval, which a language model is given after its training.

All ranks ask the model the same together. So its parameters stay sharded, and no rank waits for one that asks less.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_zero.engine import require_engine
from hf_zero.errors import ConfigError, DataError, nearest
from hf_zero.recipes.data import Data
from hf_zero.recipes.parser import option, refuse_less
from hf_zero.recipes.silence import silenced
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


NUM_BOOTSTRAPS = 1000  # for standard errors that have no formula
NO_METRICS = ("name", "alias", "sample_len", "samples")  # what lm_eval says beside the metrics of a task


@dataclass
class LmEvalArguments:
    """Keys of tasks whose models write text."""

    lm_eval_tasks: list[str] | None = option(
        None, "Tasks, groups or YAML files of lm_eval, on which the model is evaluated after training."
    )
    lm_eval_limit: int | None = option(None, "Takes the first so many rows of each of these tasks.")
    lm_eval_num_fewshot: int | None = option(
        None, "Shows so many solved rows before each; by default as the task says."
    )
    lm_eval_apply_chat_template: bool = option(
        False, "Asks by the chat template; without it the model continues texts."
    )


def check_lm_eval(arguments: LmEvalArguments, *, writes_text: bool) -> None:
    """Refuses tasks that cannot be evaluated, before a process is started. Raises [`ConfigError`] where lm_eval is not
    installed, a file is not there, a number is out of range, or a key has no effect."""
    given = [name for name in vars(LmEvalArguments()) if getattr(arguments, name)]
    if not arguments.lm_eval_tasks:
        if given:
            raise ConfigError(f"{given[0]}: has no effect without lm_eval_tasks; give them, or leave it out")
        return
    if not writes_text:
        raise ConfigError("lm_eval_tasks: are for models that write text; leave them out")
    if find_spec("lm_eval") is None:
        raise ConfigError("lm_eval_tasks: lm_eval is not installed; pip install 'hf-zero[lm-eval]'")
    refuse_less(arguments, lm_eval_limit=1, lm_eval_num_fewshot=0)
    for name in filter(_is_file, arguments.lm_eval_tasks):
        if not Path(name).is_file():
            raise ConfigError(f"lm_eval_tasks {name}: no such file; check the path")


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def load_lm_tasks(arguments: Any, training: ZeroTrainingArguments) -> Any:
    """Reads the tasks and their rows, before anything is trained, and returns lm_eval's `TaskManager`; `None` where
    there are none. All ranks call it. Raises [`ConfigError`] where a task is not known, and [`DataError`] where one
    does not load."""
    names = getattr(arguments, "lm_eval_tasks", None)
    if not names:
        return None
    from lm_eval.tasks import TaskManager

    with training.main_process_first(), _first_prints(training):
        manager = TaskManager(include_defaults=not all(map(_is_file, names)))
        for name in names:
            if not _is_file(name) and name not in manager.task_index:
                near = nearest(name, manager.task_index)
                hint = f"; did you mean {near}?" if near else "; `lm_eval ls tasks` lists those there are"
                raise ConfigError(f"lm_eval_tasks: {name!r} is no task of lm_eval{hint}")
            try:
                manager.load([name])
            except Exception as error:  # of a file's YAML, a data set's Python, or the network
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise DataError(f"lm_eval_tasks: {name} does not load ({reason}); correct it") from error
    return manager


def _first_prints(training: ZeroTrainingArguments) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if training.process_index == 0 else silenced()


def evaluate_lm_tasks(
    trainer: ZeroTrainer, data: Data, arguments: LmEvalArguments, manager: Any, say: Callable[..., None]
) -> None:
    """Evaluates the model, and logs what comes of it as metrics of an evaluation. All ranks call it."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm_eval would fork this process, which has threads and connections
    device, tokenizer = trainer.args.device.type, data.processing_class
    with trainer.compute_loss_context_manager(), _first_prints(trainer.args):
        model = HFLM(
            pretrained=trainer.model,
            tokenizer=getattr(tokenizer, "tokenizer", tokenizer),
            batch_size=trainer.args.per_device_eval_batch_size,
            softmax_dtype=torch.float32,
            mixed_precision_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        )
        found = lm_eval.simple_evaluate(
            model,
            tasks=arguments.lm_eval_tasks,
            task_manager=manager,
            limit=arguments.lm_eval_limit,
            num_fewshot=arguments.lm_eval_num_fewshot,
            apply_chat_template=arguments.lm_eval_apply_chat_template,
            bootstrap_iters=NUM_BOOTSTRAPS,
            log_samples=False,
        )
    metrics = require_engine(trainer.model).comm.broadcast_object(found and lm_metrics_of(found))
    trainer.log({f"eval_{name}": value for name, value in metrics.items()})
    say("\n".join(["lm_eval:", *(f"  {name.replace('_', ' ')}: {value:.4g}" for name, value in metrics.items())]))


def lm_metrics_of(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of what `lm_eval.simple_evaluate` has found, by task and metric. Of a group they are the
    group's own."""
    numbers = {
        task: {
            "_".join([task, *metric.removesuffix(",none").split(",")]): float(value)
            for metric, value in values.items()
            if metric not in NO_METRICS and isinstance(value, int | float)
        }
        for task, values in found["results"].items()
    }
    parts = {part for group, names in found["group_subtasks"].items() for part in names if numbers.get(group)}
    return {name: value for task in numbers if task not in parts for name, value in numbers[task].items()}
