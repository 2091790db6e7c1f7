"""The tasks that TRL's trainers train: `dpo`, `reward`, `kto`, `grpo`, `rloo` and `distill`."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from hf_zero.errors import ConfigError
from hf_zero.planner import EVALUATED, REFERENCE, TRAINED
from hf_zero.recipes.data.formats import JUDGED, PREFERENCES, PROMPTS, in_texts
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.models import is_adapter, load_config, load_language_model, load_tokenizer, resolve_model
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
    ZeroTrlTrainerMixin,
)


Reward = Callable[..., list[float | None]]
NAMED_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")  # of trl.rewards


@dataclass
class RewardedArguments(TrlTemplateArguments):
    """Keys of tasks that generate answers and judge them, under the names of TRL's scripts."""

    reward_funcs: list[str] | None = option(
        None,
        f"Reward functions: {', '.join(NAMED_REWARDS)}, or file.py:function. A function receives "
        "prompts, completions and the other columns, and returns a number for each completion.",
    )
    reward_model_name_or_path: str | None = option(None, "Reward model, for example trained by the task reward.")


def rewards_of(arguments: RewardedArguments, in_blocks: bool = False) -> list[Reward | str]:
    """Returns the reward functions, and the folder of a reward model. `in_blocks`: the trainer's prompts hold texts in
    blocks, which functions get as texts."""
    if in_blocks and arguments.reward_model_name_or_path:
        raise ConfigError(
            "reward_model_name_or_path: the chat template of the trained model takes texts in blocks, and TRL would "
            "give these to the reward model; give --reward_funcs, or --chat_template_path a file that takes texts"
        )
    found: list[Reward | str] = [_reward_of(name, in_blocks) for name in arguments.reward_funcs or ()]
    if arguments.reward_model_name_or_path:
        found.append(resolve_model(arguments.reward_model_name_or_path, "reward_model_name_or_path"))
    return found


def _reward_of(name: str, in_blocks: bool) -> Reward:
    if name in NAMED_REWARDS:
        from trl import rewards

        return getattr(rewards, name)

    function = load_function("reward_funcs", name)
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return function

    @wraps(function)  # rewards are logged under its name
    def counted(*args: Any, completions: list, **kwargs: Any) -> list[float | None]:
        if in_blocks:
            kwargs["prompts"] = [in_texts(prompt) for prompt in kwargs["prompts"]]
        rewards = list(function(*args, completions=completions, **kwargs))
        if len(rewards) != len(completions):  # TRL would give one number to all
            raise ValueError(
                f"reward_funcs {name}: returned {len(rewards)} numbers for {len(completions)} completions; return one "
                "for each, or None"
            )
        return rewards

    return counted


class ReferencedTask(TrlTask):
    """A task whose loss compares the model with a frozen reference model, which is sharded too."""

    fused_head = True

    def parts(self, arguments: TrlArguments, training: Any, data: Data) -> dict[str, Any]:
        # an adapter that is switched off is its own reference, and precomputed log probabilities need none
        if arguments.use_peft or training.precompute_ref_log_probs:
            return {}
        return {"ref_model": self.load_model(arguments, training, data)}


class Dpo(ReferencedTask):
    """Trains a language model on preferences."""

    name = "dpo"
    trainer = ZeroDPOTrainer
    formats = (PREFERENCES,)
    test_line = (
        "{eval_rewards/accuracies:.3f} of the chosen answers are preferred, by a margin of {eval_rewards/margins:.3f}"
    )
    rows_of_one = 2

    def forwards(self, training: Mapping[str, Any]) -> tuple[str, ...]:
        return (TRAINED, *[REFERENCE] * (not training["precompute_ref_log_probs"]))


class RewardModel(TrlTask):
    """Trains a model with a head of one number on preferences."""

    name = "reward"
    trainer = ZeroRewardTrainer
    formats = (PREFERENCES,)
    test_line = "{eval_accuracy:.3f} of the chosen answers score higher, by a margin of {eval_margin:.3f}"
    Arguments = TrlArguments
    scores = True
    rows_of_one = 2
    takes_labels = False

    def load_model(self, arguments: TrlArguments, training: Any, data: Data) -> PreTrainedModel:
        """Loads the model with its head, a new one unless it has one."""
        kind, tokenizer = (AutoModelForSequenceClassification, "a model that gives one number"), data.processing_class
        model = load_language_model(arguments, training, tokenizer, *kind, num_labels=1)
        model.config.pad_token_id = tokenizer.pad_token_id
        return model

    def auto_class(self, config: PretrainedConfig) -> Any:
        config.num_labels = 1
        return AutoModelForSequenceClassification


class Kto(ReferencedTask):
    """Trains a language model on answers that are labeled good or bad."""

    name = "kto"
    trainer = ZeroKTOTrainer
    formats = (JUDGED, PREFERENCES)
    test_line = "loss {eval_loss:.4f}"
    decisive_too = ("per_device_train_batch_size",)  # answers are paired with those of other rows within a batch

    def num_examples(self, data: Data) -> int:
        # TRL makes two of a chosen and a rejected answer
        return len(data.train) * (2 if "chosen" in data.train.features else 1)

    def forwards(self, training: Mapping[str, Any]) -> tuple[str, ...]:
        refers = not training["precompute_ref_log_probs"]
        if training["loss_type"] == "apo_zero_unpaired":
            return (TRAINED, *[REFERENCE] * refers)
        return (EVALUATED, TRAINED, *[REFERENCE] * (2 * refers))  # the divergence is of answers to other prompts


class Grpo(TrlTask):
    """Trains a language model on rewards of answers that it generates."""

    name = "grpo"
    trainer: ClassVar[type[ZeroTrlTrainerMixin]] = ZeroGRPOTrainer
    formats = (PROMPTS,)
    test_line = "the mean reward of a generated answer is {eval_reward:.3f}"
    Arguments = RewardedArguments
    generates = True
    fused_head = True

    def check(self, arguments: RewardedArguments, training: Mapping[str, Any]) -> None:
        """Also checks names and files of rewards. No code of the user's runs yet: this may be the launcher."""
        for name in arguments.reward_funcs or ():
            if name not in NAMED_REWARDS:
                check_function("reward_funcs", name, NAMED_REWARDS)
            elif name != "think_format_reward" and importlib.util.find_spec("math_verify") is None:
                raise ConfigError(f"reward_funcs {name}: math-verify is not installed; pip install math-verify")
        if arguments.reward_model_name_or_path:
            path = resolve_model(arguments.reward_model_name_or_path, "reward_model_name_or_path")
            kinds = () if is_adapter(Path(path)) else load_config(path).architectures or ("model of no known class",)
            if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
                raise ConfigError(  # TRL would give it a random head
                    f"reward_model_name_or_path {path}: is a {', '.join(kinds)}, which gives no score; give a model "
                    "that the task reward trained"
                )
        elif not arguments.reward_funcs:
            raise ConfigError(
                "reward_funcs: nothing judges the answers; give --reward_funcs file.py:function, or "
                "--reward_model_name_or_path"
            )
        if arguments.model_revision and training["beta"] and not arguments.use_peft:
            raise ConfigError(
                f"model_revision {arguments.model_revision}: TRL loads the reference model by its name alone; give "
                "the folder of a model, --use_peft, or --beta 0"
            )
        super().check(arguments, training)

    def parts(self, arguments: RewardedArguments, training: Any, data: Data) -> dict[str, Any]:
        return {"reward_funcs": rewards_of(arguments, data.extra["in_blocks"])}

    def forwards(self, training: Mapping[str, Any]) -> tuple[str, ...]:
        return (*[REFERENCE] * (training["beta"] != 0), TRAINED)  # the reference sees what was just generated


class Rloo(Grpo):
    """Trains like GRPO, with leave-one-out baselines."""

    name = "rloo"
    trainer = ZeroRLOOTrainer


class Distill(TrlTask):
    """Trains a language model on a larger model's predictions for the answers that it generates."""

    name = "distill"
    trainer = ZeroDistillationTrainer
    formats = (PROMPTS,)
    test_line = "loss {eval_loss:.4f}"
    generates = True
    reads_logits = True

    def check(self, arguments: TrlArguments, training: Mapping[str, Any]) -> None:
        """Also compares the tokens of model and teacher: TRL compares only their number."""
        if not training["teacher_model_name_or_path"]:
            raise ConfigError("teacher_model_name_or_path: is missing; give the model whose answers are learned")
        path = resolve_model(training["teacher_model_name_or_path"], "teacher_model_name_or_path")
        super().check(arguments, training)
        ours: dict[str, int] = {}
        with suppress(ConfigError):  # a teacher may have no tokenizer of its own
            theirs = load_tokenizer(path, training["teacher_model_revision"]).get_vocab()
            ours = load_tokenizer(resolve_model(arguments.model_name_or_path), arguments.model_revision).get_vocab()
        for token, number in ours.items():
            if theirs.get(token) != number:
                raise ConfigError(
                    f"teacher_model_name_or_path {path}: token {token!r} has the id {theirs.get(token)} there, and "
                    f"{number} in the tokenizer of the model; give a teacher that has the same tokenizer"
                )

    def parts(self, arguments: Any, training: Any, data: Data) -> dict[str, Any]:
        """Returns the teacher by name, since TRL loads it."""
        return {"teacher_model": resolve_model(training.teacher_model_name_or_path, "teacher_model_name_or_path")}

    def check_plan(self, arguments: TrlArguments) -> None:
        raise ConfigError(
            f"plan: {self.name} is not planned, for what its teacher takes is not known; its student is, by "
            f"`plan {arguments.model_name_or_path}`"
        )
