"""Every task with rows, settings and what a run says in the end, for models of a few thousand weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import set_seed

from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.tasks import TASKS
from tests.recipes.conftest import TEXTS
from tests.recipes.preferences import preferences, write_rows
from tests.recipes.ranks import flags_of
from tests.trainer.harness import reset_accelerate


REWARDS = """
def short(completions, colour, **_):
    return [float(any(name in text for name in colour)) - len(text) / 100 for text in completions]

number = 3
"""
GENERATING = {"num_generations": 2, "max_completion_length": 6, "max_steps": 2}
LENGTH = {"max_length": 48}
# Of a run of any task: six steps, each logged, and no checkpoint that nobody asks for.
SETTINGS = {
    "learning_rate": 3e-3,
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
}


def completions(count: int) -> list[dict]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(count)]


def texts(count: int) -> list[dict]:
    return [{"text": row["prompt"] + row["chosen"]} for row in preferences(count)]


def judged(count: int) -> list[dict]:
    rows = preferences(count)
    answers = (("chosen", True), ("rejected", False))
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": good} for row in rows for name, good in answers
    ]


def prompts(count: int) -> list[dict]:
    return [{"prompt": row["prompt"], "colour": row["chosen"].split()[0]} for row in preferences(count)]


def labelled(count: int) -> list[dict]:
    words = [(a, b) for a in ("cold", "hot", "fine", "long") for b in ("dull", "bright", "kind", "film")]
    rows = [{"text": text.format(*pair), "label": label} for pair in words for label, text in TEXTS.items()]
    return rows[:count]


@dataclass(frozen=True)
class Case:
    """One task as tests run it.

    Args:
        task (`str`): a key of `TASKS`.
        rows (`Callable[[int], list[dict]]`): makes rows.
        line (`str`): a pattern of what is said of the test rows in the end.
        settings (`dict[str, Any]`): beyond or instead of `SETTINGS`; "MODEL" stands for the model's folder.
        trainer (`str`): TRL's name for what trains it; empty where that is `Trainer`.
        pipeline (`str`): of transformers, which tries the model; empty where it writes text.
    """

    task: str
    rows: Callable[[int], list[dict]]
    line: str
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: str = ""
    pipeline: str = ""

    def flags(self, model: Path, folder: Path, count: int = 16, **settings) -> list[str]:
        """The command line, whose rows and rewards are in `folder` then."""
        data = write_rows(folder / "rows.jsonl", self.rows(count))
        (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        own = {name: model if value == "MODEL" else value for name, value in self.settings.items()}
        return flags(self.task, model, data, **{**own, **settings})


def settings_of(model: Path, data: Path, **settings) -> dict[str, Any]:
    named = {"model_name_or_path": model, "train_file": data, "test_file": data, "output_dir": "out"}
    return {**named, **SETTINGS, **settings}


def flags(task: str, model: Path, data: Path, **settings) -> list[str]:
    more = LENGTH if task in ("reward", "kto") else {}
    return [task, *flags_of({**settings_of(model, data), **more, **settings})]


JUDGED = {**GENERATING, "reward_funcs": "rewards.py:short", "beta": 0.1}
REWARD_LINE = r"test rows: the mean reward of a generated answer is -?[\d.]+"
PREFERRED_LINE = r"test rows: [\d.]+ of the chosen answers are preferred"
LOSS_LINE = r"test rows: loss -?[\d.]+"
CASES = {
    "sft": Case("sft", completions, rf"{LOSS_LINE} a token", LENGTH, "SFT"),
    "pretrain": Case("pretrain", texts, rf"{LOSS_LINE} a token", LENGTH, "SFT"),
    "dpo": Case("dpo", preferences, PREFERRED_LINE, LENGTH, "DPO"),
    "reward": Case(
        "reward",
        preferences,
        r"test rows: [\d.]+ of the chosen answers score higher",
        LENGTH,
        "Reward",
        "text-classification",
    ),
    "kto": Case("kto", judged, LOSS_LINE, LENGTH, "KTO"),
    "kto-preferences": Case("kto", preferences, LOSS_LINE, LENGTH, "KTO"),
    "grpo": Case("grpo", prompts, REWARD_LINE, JUDGED, "GRPO"),
    "rloo": Case("rloo", prompts, REWARD_LINE, JUDGED, "RLOO"),
    "distill": Case(
        "distill",
        prompts,
        LOSS_LINE,
        {"max_completion_length": 6, "max_steps": 2, "teacher_model_name_or_path": "MODEL"},
        "Distillation",
    ),
    "classify": Case("classify", labelled, r"test accuracy: [\d.]+ before", {}, "", "text-classification"),
}


@dataclass
class Loaded:
    """The rows of a run as a task loads them, before it loads the model."""

    argv: list[str]  # the task and its flags

    def __post_init__(self):
        reset_accelerate()
        self.config = RunConfig.parse(self.argv[0], self.argv[1:])
        self.task, self.arguments = TASKS[self.argv[0]].load(), self.config.arguments
        self.task.check(self.arguments, self.config.training)
        self.training = self.config.training_arguments()
        self.data = self.task.load_data(self.arguments, self.training)

    def load_model(self) -> Any:
        set_seed(self.training.seed)
        return self.task.load_model(self.arguments, self.training, self.data)

    def make_trainer(self) -> Any:
        return self.task.make_trainer(self.load_model(), self.arguments, self.training, self.data)
