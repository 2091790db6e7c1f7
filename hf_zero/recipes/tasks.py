"""The tasks and tools, and the arguments that tasks share.

A task trains. It is a module, or a [`TrlTask`], with

- `Arguments`, a dataclass over `SourceArguments`, and `Training`, the class of its training arguments;
- `check(arguments, training)`, which refuses what cannot work before a process is started; `training` is a mapping
  still, of fields to values;
- `load_data(arguments, training)`, which gives its [`Data`]: no model is loaded yet;
- `load_model(arguments, training, data)`: the model, its weights still in files, or not drawn yet, where that can be;
- `make_trainer(model, arguments, training, data)`;
- `before(trainer, data, say)` and `after(trainer, data, arguments, say)`, called by all ranks around the
  training; only rank 0's `say` prints;
- `defaults`, if need be: of its training arguments, in place of those of their class;
- `decisive`, if need be: which of its training arguments decide, as its own arguments do, what it learns of its
  rows. A run that goes on has to keep them.

A tool does one thing in this process. It is a module with `Arguments`, `POSITIONAL`, and `run`. POSITIONAL has name
and help of each value that the command line takes without a key: `(("folder", "the model folder"),)` for
`run(folder, arguments)`, `()` for `run(arguments)`. If it has `run_config(argv)`, that runs command lines with
`--config`.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.recipes.parser import option


@dataclass(frozen=True)
class Task:
    """A task or a tool."""

    summary: str  # one line for `--help`
    # its module beside this one, and behind a colon its name there, if it is not the module itself. Imported only when
    # it is asked for, so that `--help` stays quick
    place: str
    holds_out: bool = False  # whether it tests on a part of its rows where no test set is given
    sums_tokens: bool = False  # whether its loss is a sum over tokens, and so over parts of sequences

    def load(self) -> Any:
        """Imports it, and with it torch and transformers. Raises [`ConfigError`] where TRL cannot be imported."""
        module, _, name = self.place.partition(":")
        try:
            found = importlib.import_module(f"hf_zero.recipes.{module}")
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "trl":
                raise
            reason = error.__cause__ or error
            raise ConfigError(f"TRL cannot be imported ({reason}); pip install 'hf-zero[trl]'") from error
        return getattr(found, name) if name else found


TASKS: dict[str, Task] = {
    "classify": Task("fine-tune a classifier of texts or images", "classify", holds_out=True),
    "sft": Task("fine-tune a language model on prompts, chats or texts", "sft:SFT", sums_tokens=True),
    "pretrain": Task("pretrain a language model on plain text, new or continued", "sft:PRETRAIN", sums_tokens=True),
    "dpo": Task("DPO: train a language model on preferred and rejected answers", "trl_tasks:DPO"),
    "reward": Task("train a reward model on preferred and rejected answers", "trl_tasks:REWARD"),
    "kto": Task("KTO: train a language model on answers labeled good or bad", "trl_tasks:KTO"),
    "grpo": Task("GRPO: reinforcement learning with group-relative rewards", "trl_tasks:GRPO"),
    "rloo": Task("RLOO: reinforcement learning with leave-one-out baselines", "trl_tasks:RLOO"),
    "distill": Task("distill a larger language model into a smaller one", "trl_tasks:DISTILL"),
}

TOOLS: dict[str, Task] = {
    "plan": Task("estimate the memory per rank, and which stage fits", "plan"),
    "chat": Task("chat with a model in the terminal", "chat"),
    "generate": Task("generate answers for a file of prompts", "generate"),
    "verify": Task("check that a model folder is complete and loads", "inspection"),
    "merge": Task("merge a PEFT adapter into its base model", "merge"),
    "convert": Task("convert a checkpoint of DeepSpeed, FSDP or DCP, to resume from it", "convert"),
    "push": Task("upload a model folder to the hub", "push"),
    "env": Task("print versions, devices, memory and missing packages, for bug reports", "env"),
    "check": Task("test this machine before a run", "check"),
    "list": Task("print the tasks, the tools and the ready-made recipes", "listing"),
    "migrate": Task("translate a configuration of DeepSpeed or accelerate into flags", "migrate"),
}


def refuse_shared_sequences(task: str, num_parts: int) -> None:
    """Refuses ranks that share sequences in a task whose loss needs whole ones."""
    if num_parts > 1 and not TASKS[task].sums_tokens:
        raise ConfigError(f"zero_sequence_parallel: the loss of {task} is computed from whole sequences; leave it out")


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
