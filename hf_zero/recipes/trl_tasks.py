"""The tasks that TRL's trainers train: `dpo`, `reward`, `kto`, `grpo`, `rloo` and `distill`."""

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_zero.errors import ConfigError
from hf_zero.recipes.data.preferences import COLUMNS, JUDGED, PREFERENCES, PROMPTS
from hf_zero.recipes.data.rows import Data, cut_notes, plural
from hf_zero.recipes.language_models import LoadArguments, load_language_model
from hf_zero.recipes.loading import is_adapter, load_config, load_tokenizer, resolve_model
from hf_zero.recipes.parser import option
from hf_zero.recipes.trl_task import TrlArguments, TrlTask, TrlTemplateArguments
from hf_zero.recipes.user_code import check_function, load_function
from hf_zero.trl import (
    ZeroDistillationTrainer,
    ZeroDPOTrainer,
    ZeroGRPOTrainer,
    ZeroKTOTrainer,
    ZeroRewardTrainer,
    ZeroRLOOTrainer,
    ZeroTrlArgumentsMixin,
)


Reward = Callable[..., list[float | None]]
LONG_PROMPT = "whose prompt alone has {} tokens or more"
NAMED_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # of trl.rewards


@dataclass
class RewardedArguments(TrlTemplateArguments):
    """Keys of tasks whose answers are generated and judged, under the names that TRL's scripts gave them."""

    reward_funcs: list[str] | None = option(
        None,
        f"Reward functions: {', '.join(NAMED_REWARDS)}, or file.py:function. A function receives "
        "prompts, completions and the other columns, and returns a number for each completion.",
    )
    reward_model_name_or_path: str | None = option(None, "Reward model, for example trained by the task reward.")


# Reference models, teachers and rewards


def _with_reference(task: TrlTask, arguments: TrlArguments, training: Any, data: Data) -> dict[str, Any]:
    """The reference beside the model, frozen and sharded. An adapter that is switched off is its own, and log
    probabilities that are computed beforehand need none."""
    if arguments.use_peft or training.precompute_ref_log_probs:
        return {}
    return {"ref_model": task.load_model(arguments, training, data)}


def _with_teacher(task: TrlTask, arguments: TrlArguments, training: Any, data: Data) -> dict[str, Any]:
    """The model whose answers are learned, by name: TRL loads it. Raises [`ConfigError`] where its tokens are others:
    TRL compares no more than how many there are."""
    path = resolve_model(training.teacher_model_name_or_path, "teacher_model_name_or_path")
    theirs: dict[str, int] = {}
    with suppress(ConfigError):  # it has no tokenizer of its own
        theirs = load_tokenizer(path).get_vocab()
    for token, number in data.processing_class.get_vocab().items() if theirs else ():
        if theirs.get(token) != number:
            raise ConfigError(
                f"teacher_model_name_or_path {path}: token {token!r} has the id {theirs.get(token)} there, and "
                f"{number} in the tokenizer of the model; give a teacher that has the same tokenizer"
            )
    return {"teacher_model": path}


def _check_teacher(arguments: TrlArguments, training: Mapping[str, Any]) -> None:
    if not training["teacher_model_name_or_path"]:
        raise ConfigError("teacher_model_name_or_path: is missing; give the model whose answers are learned")
    resolve_model(training["teacher_model_name_or_path"], "teacher_model_name_or_path")


def _check_rewards(arguments: RewardedArguments, training: Mapping[str, Any]) -> None:
    """Checks names and files. No code of the user's runs yet: this may be the launcher."""
    for name in arguments.reward_funcs or ():
        _check_reward(name)
    if arguments.reward_model_name_or_path:
        _check_scorer(resolve_model(arguments.reward_model_name_or_path, "reward_model_name_or_path"))
    elif not arguments.reward_funcs:
        raise ConfigError(
            "reward_funcs: nothing judges the answers; give --reward_funcs file.py:function, or "
            "--reward_model_name_or_path"
        )
    if arguments.model_revision and training["beta"] and not arguments.use_peft:
        raise ConfigError(
            f"model_revision {arguments.model_revision}: TRL loads the reference model by its name alone; give the "
            "folder of a model, --use_peft, or --beta 0"
        )


def _check_scorer(path: str) -> None:
    """Refuses a model that has no head to score answers with: TRL would give it a random one."""
    if is_adapter(Path(path)):
        return
    kinds = load_config(path).architectures or ()
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(
            f"reward_model_name_or_path {path}: is a {', '.join(kinds) or 'model of no known class'}, which gives no "
            "score; give a model that the task reward trained"
        )


def _check_reward(name: str) -> None:
    if name in NAMED_REWARDS:
        if name != "think_format_reward" and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"reward_funcs {name}: math-verify is not installed; pip install math-verify")
        return
    check_function("reward_funcs", name, NAMED_REWARDS)


def rewards_of(arguments: RewardedArguments) -> list[Reward | str]:
    """Loads what judges generated answers: functions, and the folder of a model."""
    found: list[Reward | str] = [_reward_of(name) for name in arguments.reward_funcs or ()]
    if arguments.reward_model_name_or_path:
        found.append(resolve_model(arguments.reward_model_name_or_path, "reward_model_name_or_path"))
    return found


def _reward_of(name: str) -> Reward:
    if name in NAMED_REWARDS:
        from trl import rewards

        return getattr(rewards, name)

    def as_rewards(found: Any, /, completions: list, **_: Any) -> list[float | None]:
        rewards = [None if value is None else float(value) for value in found]
        if len(rewards) != len(completions):
            raise ConfigError(
                f"reward_funcs {name}: gave {len(rewards)} numbers for {len(completions)} completions; give one for "
                "each, or None"
            )
        return rewards

    return load_function("reward_funcs", name, as_rewards)


# Models


def _load_scorer(
    arguments: LoadArguments, training: ZeroTrlArgumentsMixin, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """A model with a head of one number, a new one unless the model has one."""
    kind = (AutoModelForSequenceClassification, "a model that gives one number")
    model = load_language_model(arguments, training, tokenizer, *kind, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


# What is said


def left_out(why: str, trainer: Any, data: Data) -> list[str]:
    """How many rows TRL has left out, for they do not fit into `max_length`."""
    # KTO makes two rows of one with a chosen and a rejected answer
    num_rows = len(data.train) * (2 if isinstance(trainer, ZeroKTOTrainer) and "chosen" in data.train.features else 1)
    lost = num_rows - len(trainer.train_dataset)
    return [f"{plural(lost, 'row')} left out, {why.format(trainer.args.max_length)}"] if lost > 0 else []


def _cut_preferences(trainer: Any, data: Data) -> list[str]:
    """How many preferences do not fit into `max_length`, and how many are cut."""
    max_length, kept = trainer.args.max_length, trainer.train_dataset
    table = kept.with_format("arrow")[:]
    prompt, *answers = (pc.list_value_length(table[f"{name}_ids"]).to_numpy() for name in COLUMNS)
    lost = sum(np.maximum(prompt + answer - max_length, 0) for answer in answers)
    return [*left_out(LONG_PROMPT, trainer, data), *cut_notes(lost, max_length)]


PREFERRED = (
    "{eval_rewards/accuracies:.3f} of the chosen answers are preferred, by a margin of {eval_rewards/margins:.3f}"
)
DPO = TrlTask(ZeroDPOTrainer, (PREFERENCES,), PREFERRED, parts=_with_reference, lost=_cut_preferences)
REWARD = TrlTask(
    ZeroRewardTrainer,
    (PREFERENCES,),
    "{eval_accuracy:.3f} of the chosen answers score higher, by a margin of {eval_margin:.3f}",
    Arguments=TrlArguments,
    load=_load_scorer,
    lost=partial(left_out, "of which an answer has more than {} tokens"),
    scores=True,
)
KTO = TrlTask(
    ZeroKTOTrainer,
    (JUDGED, PREFERENCES),
    "loss {eval_loss:.4f}",
    parts=_with_reference,
    lost=partial(left_out, LONG_PROMPT),
    decisive_too=("per_device_train_batch_size",),  # answers are paired with those of other rows within a batch
)
GRPO = TrlTask(
    ZeroGRPOTrainer,
    (PROMPTS,),
    "the mean reward of a generated answer is {eval_reward:.3f}",
    Arguments=RewardedArguments,
    parts=lambda task, arguments, training, data: {"reward_funcs": rewards_of(arguments)},
    check_more=_check_rewards,
    generates=True,
)
RLOO = replace(GRPO, trainer=ZeroRLOOTrainer)
DISTILL = TrlTask(
    ZeroDistillationTrainer,
    (PROMPTS,),
    "loss {eval_loss:.4f}",
    parts=_with_teacher,
    check_more=_check_teacher,
    generates=True,
)
