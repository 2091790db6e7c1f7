"""The tasks and tools by name, and the arguments that tasks share.

A task trains: it is a subclass of `task.Task`. A tool does one thing in this process: it is a module with `Arguments`,
`POSITIONAL` and `run`. `POSITIONAL` has the name and help of each positional argument:
`(("folder", "the model folder"),)` for `run(folder, arguments)`, `()` for `run(arguments)`. If the module has
`run_config(argv)`, this function runs command lines with `--config`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import option


@dataclass(frozen=True)
class Command:
    """A task or a tool."""

    summary: str  # one line for `--help`
    # its module in this package; for a task also its class, as `module:Class`. Imported on demand, so that `--help` is
    # fast
    place: str

    def load(self) -> Any:
        """Imports the command's module, and thereby torch and transformers. Returns an instance of the task, or the
        module of the tool. Raises [`ConfigError`] if TRL cannot be imported."""
        module, _, name = self.place.partition(":")
        try:
            found = importlib.import_module(f"hf_zero.recipes.{module}")
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "trl":
                raise
            reason = error.__cause__ or error
            raise ConfigError(f"TRL cannot be imported ({reason}); pip install 'hf-zero[trl]'") from error
        return getattr(found, name)() if name else found


TASKS: dict[str, Command] = {
    "classify": Command("fine-tune a text or image classifier", "classify:Classify"),
    "sft": Command("fine-tune a language model on prompts, chats or texts", "sft:Sft"),
    "pretrain": Command("pretrain a language model on text, from scratch or from existing weights", "sft:Pretrain"),
    "dpo": Command("DPO: train a language model on preferred and rejected answers", "trl_tasks:Dpo"),
    "reward": Command("train a reward model on preferred and rejected answers", "trl_tasks:RewardModel"),
    "kto": Command("KTO: train a language model on answers labeled good or bad", "trl_tasks:Kto"),
    "grpo": Command("GRPO: reinforcement learning with group-relative rewards", "trl_tasks:Grpo"),
    "rloo": Command("RLOO: reinforcement learning with leave-one-out baselines", "trl_tasks:Rloo"),
    "distill": Command("distill a larger language model into a smaller one", "trl_tasks:Distill"),
}

TOOLS: dict[str, Command] = {
    "plan": Command("estimate the memory per rank, and which stage fits", "plan"),
    "chat": Command("chat with a model in the terminal", "chat"),
    "generate": Command("generate answers for a file of prompts", "generate"),
    "verify": Command("check that a model folder is complete and loads", "inspection"),
    "merge": Command("merge a PEFT adapter into its base model", "merge"),
    "convert": Command("convert a checkpoint of DeepSpeed, FSDP or DCP, to resume from it", "convert"),
    "push": Command("upload a model folder to the hub", "push"),
    "env": Command("print versions, devices, memory and missing packages, for bug reports", "env"),
    "check": Command("test this machine before a run", "check"),
    "list": Command("print the tasks, the tools and the ready-made recipes", "listing"),
    "migrate": Command("translate a configuration of DeepSpeed or accelerate into flags", "migrate"),
}


@dataclass
class SourceArguments:
    """Keys for the model and the data, under the names of TRL and transformers."""

    model_name_or_path: str | None = option(
        None, "A folder, package:<name>/<folder inside an installed package>, or a hub id."
    )
    model_revision: str | None = option(None, "A branch, tag or commit of the hub id.")
    dataset_name: str | None = option(
        None, "A hub id, or a local file or folder of JSONL, JSON, CSV, Parquet or text."
    )
    dataset_config: str | None = option(None, "Configuration of the Hub data set.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str | None = option(
        None, "Split to evaluate on. Without it and test_file nothing is evaluated."
    )
    dataset_streaming: bool = option(False, "Read rows during training; needs --max_steps.")
    dataset_shuffle_buffer: int = option(
        1000,
        "Rows of a stream in each rank's shuffle buffer. --train_sampling_strategy sequential reads them in order.",
    )
    train_file: str | None = option(None, "A local file, in place of dataset_name.")
    test_file: str | None = option(None, "A local file to evaluate on.")
    max_train_rows: int | None = option(None, "Train on at most this many rows, the first ones.")
    max_test_rows: int | None = option(None, "Test on at most this many rows, the first ones.")
    skip_bad_rows: bool = option(False, "Drop malformed rows and count them, instead of ending the run.")
