"""The tasks that TRL's trainers train: `dpo`, `reward`, `kto`, `grpo`, `rloo` and `distill`."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.causal import LoadArguments, load_options
from hf_zero.recipes.data import Data
from hf_zero.recipes.data.preferences import COLUMNS, Judged, Preferences, Prompts
from hf_zero.recipes.data.rows import cut_note, plural
from hf_zero.recipes.loading import quiet, resolve_model
from hf_zero.recipes.trl_task import TrlArguments, TrlTask, TrlTemplateArguments
from hf_zero.trl import (
    ZeroDistillationTrainer,
    ZeroDPOTrainer,
    ZeroGRPOTrainer,
    ZeroKTOTrainer,
    ZeroRewardTrainer,
    ZeroRLOOTrainer,
)


Reward = Callable[..., list[float]]
NAMED_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # of trl.rewards


@dataclass
class RewardedArguments(TrlTemplateArguments):
    """Keys of tasks whose answers are generated and judged, under the names that TRL's scripts gave them."""

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"What judges the answers: {', '.join(NAMED_REWARDS)}, or file.py:function, which takes prompts, "
            "completions and the rows' other columns, and gives a number for each completion."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "A model that judges the answers, such as one that the task reward trained."}
    )


# Reference models, teachers and rewards


def _with_reference(task: TrlTask, arguments: TrlArguments, training: Any, data: Data) -> dict[str, Any]:
    """The reference beside the model: the same weights, frozen and sharded.

    An adapter that is switched off is its own reference, and log probabilities that are computed beforehand need none.
    """
    if arguments.use_peft or training.precompute_ref_log_probs:
        return {}
    return {"ref_model": task.load_model(arguments, training, data)}


def _with_teacher(task: TrlTask, arguments: TrlArguments, training: Any, data: Data) -> dict[str, Any]:
    teacher = resolve_model(training.teacher_model_name_or_path, "teacher_model_name_or_path")
    return {"teacher_model": str(teacher)}


def _check_teacher(arguments: TrlArguments, training: Mapping[str, Any]) -> None:
    if not training["teacher_model_name_or_path"]:
        raise ConfigError("teacher_model_name_or_path: is missing; give the model whose answers are learned")
    resolve_model(training["teacher_model_name_or_path"], "teacher_model_name_or_path")


def _with_rewards(task: TrlTask, arguments: RewardedArguments, training: Any, data: Data) -> dict[str, Any]:
    return {"reward_funcs": rewards_of(arguments)}


def _check_rewards(arguments: RewardedArguments, training: Mapping[str, Any]) -> None:
    rewards_of(arguments)


def rewards_of(arguments: RewardedArguments) -> list[Reward | str]:
    """What judges generated answers: functions, and the folder of a model.

    Args:
        arguments ([`RewardedArguments`]): say which.

    Raises:
        ConfigError: none is given, or one cannot be had.
    """
    found: list[Reward | str] = [_reward_of(name) for name in arguments.reward_funcs or ()]
    if arguments.reward_model_name_or_path:
        found.append(str(resolve_model(arguments.reward_model_name_or_path, "reward_model_name_or_path")))
    if not found:
        raise ConfigError(
            "reward_funcs: nothing judges the answers; give --reward_funcs file.py:function, or "
            "--reward_model_name_or_path"
        )
    return found


def _reward_of(name: str) -> Reward:
    if name in NAMED_REWARDS:
        from trl import rewards

        if name != "think_format_reward" and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"reward_funcs {name}: math-verify is not installed; pip install math-verify")
        return getattr(rewards, name)
    file, separator, function = name.rpartition(":")
    path = Path(file).expanduser()
    if not separator or path.suffix != ".py":
        raise ConfigError(f"reward_funcs {name!r}: expected one of {', '.join(NAMED_REWARDS)}, or file.py:function")
    if not path.is_file():
        raise ConfigError(f"reward_funcs {name}: there is no file {path}; give where it is")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"reward_funcs {name}: {path} fails ({type(error).__name__}: {error}); correct it"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"reward_funcs {name}: {path} has no function {function!r}; give the name of one")
    return found


# Models


def _load_scorer(arguments: LoadArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with a head of one number, a new one unless the model has one."""
    path = resolve_model(arguments.model_name_or_path)
    with quiet():
        try:
            model = load_pretrained(AutoModelForSequenceClassification, path, num_labels=1, **load_options(arguments))
        except (CheckpointError, ConfigError):
            raise
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"{path}: does not load as a model that gives one number ({reason})") from error
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


# What is said


def _say_cut_preferences(trainer: Any, data: Data, say: Callable[..., None]) -> None:
    """Says how many preferences do not fit into `max_length`."""
    if not isinstance(data.train, Dataset) or trainer.args.max_length is None:
        return
    max_length, kept = trainer.args.max_length, trainer.train_dataset
    if len(kept) < len(data.train):
        lost = plural(len(data.train) - len(kept), "row")
        say(f"{lost} left out, whose prompt alone has {max_length} tokens or more")
    table = kept.with_format("arrow")[:]
    prompt, *answers = (pc.list_value_length(table[f"{name}_ids"]).to_numpy() for name in COLUMNS)
    lost = sum(np.maximum(prompt + answer - max_length, 0) for answer in answers)
    if num_cut := int((lost > 0).sum()):
        say(cut_note(num_cut, max_length, int(lost.sum())))


def _preference_line(metrics: Mapping[str, float]) -> str:
    accuracy, margin = metrics["eval_rewards/accuracies"], metrics["eval_rewards/margins"]
    return f"{accuracy:.3f} of the chosen answers are preferred, by a margin of {margin:.3f}"


def _reward_line(metrics: Mapping[str, float]) -> str:
    accuracy, margin = metrics["eval_accuracy"], metrics["eval_margin"]
    return f"{accuracy:.3f} of the chosen answers score higher, by a margin of {margin:.3f}"


def _generated_line(metrics: Mapping[str, float]) -> str:
    return f"the mean reward of a generated answer is {metrics['eval_reward']:.3f}"


def _loss_line(metrics: Mapping[str, float]) -> str:
    return f"loss {metrics['eval_loss']:.4f}"


DPO = TrlTask(ZeroDPOTrainer, (Preferences,), _preference_line, parts=_with_reference, say_more=_say_cut_preferences)
REWARD = TrlTask(
    ZeroRewardTrainer,
    (Preferences,),
    _reward_line,
    Arguments=TrlArguments,
    load=_load_scorer,
    peft_task="SEQ_CLS",
    pipeline="text-classification",
)
KTO = TrlTask(ZeroKTOTrainer, (Judged, Preferences), _loss_line, parts=_with_reference)
GRPO = TrlTask(
    ZeroGRPOTrainer,
    (Prompts,),
    _generated_line,
    Arguments=RewardedArguments,
    parts=_with_rewards,
    check_more=_check_rewards,
    generates=True,
)
RLOO = TrlTask(
    ZeroRLOOTrainer,
    (Prompts,),
    _generated_line,
    Arguments=RewardedArguments,
    parts=_with_rewards,
    check_more=_check_rewards,
    generates=True,
)
DISTILL = TrlTask(
    ZeroDistillationTrainer,
    (Prompts,),
    _loss_line,
    parts=_with_teacher,
    check_more=_check_teacher,
    generates=True,
)
