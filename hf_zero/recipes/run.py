"""A run, in each of its processes. `--dry_run` and `--preprocess` prepare it in one process, without training."""

import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import transformers
from accelerate.utils import gather_object
from torch import nn

from hf_zero.comm.ranks import transport_errors
from hf_zero.engine.opaque import num_weights
from hf_zero.errors import ConfigError
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.generation import Samples
from hf_zero.recipes.lora import freeze_parameters
from hf_zero.recipes.output_dir import (
    check_rows,
    checkpoint_of,
    finished_message,
    record_end,
    record_start,
    remove_checkpoints,
    resume_message,
)
from hf_zero.recipes.parser import AUTO
from hf_zero.recipes.plan_input import PlanInput, device_nbytes
from hf_zero.recipes.report import Telemetry, write_report
from hf_zero.recipes.run_config import RunConfig, yaml_text
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


# Training arguments that have no effect without training.
QUIET = {
    **{"push_to_hub": False, "report_to": "none", "resume_from_checkpoint": None},
    # of some trainers only
    **{"precompute_ref_log_probs": False, "use_vllm": False, "activation_offloading": False},
}
# Training arguments that need the device of the run.
NO_DEVICE = {"use_cpu": True, "bf16": False, "fp16": False, "zero_autocast": False, "tf32": None}


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    data: Data
    trainer: ZeroTrainer

    @classmethod
    def prepare(cls, config: RunConfig, training: ZeroTrainingArguments, checkpoint: str | None = None) -> "Run":
        """Reads the rows, and makes model and trainer. All ranks call it."""
        task, arguments = config.kind, config.arguments
        data = task.load_data(arguments, training)
        if checkpoint is not None:
            check_rows(data, Path(checkpoint).absolute().parent)
        transformers.set_seed(training.seed)
        model = task.load_model(arguments, training, data)
        data.notes += freeze_parameters(model, arguments)
        trainer = task.make_trainer(model, arguments, training, data)
        return cls(data, trainer)


def run_task(config: RunConfig) -> None:
    """Runs a task in this process, unless the same run has finished before."""
    with transport_errors(config.task):
        training = config.training_arguments()
        message = gather_object([finished_message(config, Path(training.output_dir))])[0]
        if message is None:
            train(config, training).accelerator.end_training()
        else:
            _sayer(training)(message)
            training.distributed_state.destroy_process_group()


def train(config: RunConfig, training: ZeroTrainingArguments) -> ZeroTrainer:
    """Trains, and writes the model, the report and the model card. All ranks call it. Returns the trainer, whose
    process group still exists."""
    say = _sayer(training)
    checkpoint = checkpoint_of(config, training, say)
    if checkpoint is not None:
        say(resume_message(checkpoint, config, training))
    run = Run.prepare(config, training, checkpoint)
    task, data, trainer = config.kind, run.data, run.trainer
    for note in data.notes:
        say(note)
    _stop_on_ctrl_c(trainer, config)
    telemetry = Telemetry(trainer)
    trainer.callback_handler.callbacks.insert(0, telemetry)  # before the callbacks that report its numbers
    task.before(trainer, data, say)
    if checkpoint is None and config.overwrite_output_dir:
        remove_checkpoints(trainer)
    record_start(trainer, config, data.rows_summary())
    samples = Samples(trainer, data, getattr(config.arguments, "samples", 0), say)
    if checkpoint is None:
        samples.answer("before")
    trainer.leaves_model = True
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(_internal_call=True)  # one push at the end includes report and card
    task.after(trainer, data, config.arguments, say)
    samples.answer("after")
    write_report(trainer, config, data, telemetry, say)
    record_end(trainer)  # a run that is interrupted earlier resumes from its newest checkpoint
    if training.push_to_hub:
        trainer.push_to_hub(commit_message=f"{config.task}: end of training", revision=training.hub_revision)
    return trainer


def _stop_on_ctrl_c(trainer: ZeroTrainer, config: RunConfig) -> None:
    """Makes Ctrl-C save a checkpoint, like SIGTERM. Trainers in notebooks do not."""
    trainer.stop_on_signal.signals += (signal.SIGINT,)
    again = "again" if config.resume == AUTO else f"with --resume {AUTO}"
    again += " and without --overwrite_output_dir" if config.overwrite_output_dir else ""
    trainer.stop_on_signal.remedy = f"to go on, run the same command {again}"


def _sayer(training: ZeroTrainingArguments) -> Callable[..., None]:
    return partial(print, flush=True) if training.process_index == 0 else lambda *_: None


def dry_run(config: RunConfig) -> None:
    """Prints the configuration, the data, the size of the model and the predicted memory of a run. Prepares the run as
    it would be trained, so the same errors are raised."""
    with _prepared(config, QUIET, "--dry_run") as run:
        _print_section("configuration", yaml_text(config.non_default()).splitlines())
        _print_section(
            "data", [*run.data.notes, "first row:", *(f"  {line}" for line in run.data.sample.splitlines())]
        )
        _print_section("model", [_parameters_line(run.trainer.model)])
        _print_section("memory of each rank", predicted(run.trainer, config))
    print("\ndry run: nothing was trained or written")


def preprocess(config: RunConfig) -> None:
    """Prepares the rows of a run, and prints how many there are. The run finds them in the cache of `datasets`, under
    names that depend on files, tokenizer, settings and code."""
    if config.arguments.dataset_streaming:
        raise ConfigError("--preprocess: dataset_streaming reads rows while training goes on; leave one of them out")
    if hasattr(config.arguments, "attn_implementation"):
        config = replace(config, arguments=replace(config.arguments, attn_implementation=None))
    with _prepared(config, {**QUIET, **NO_DEVICE}, "--preprocess") as run:
        print(*run.data.notes, sep="\n")
    print(f"preprocessed: the run finds these rows in {datasets.config.HF_DATASETS_CACHE}")


@contextmanager
def _prepared(config: RunConfig, changes: Mapping[str, Any], flag: str) -> Iterator[Run]:
    """Prepares a run in this process with other training arguments, and without an output folder."""
    if (config.launched or 1) > 1:
        raise ConfigError(
            f"{flag}: runs in one process, and the launcher has started {config.launched}; leave the launcher out"
        )
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder:
        # Trainer makes the output folder when it is made.
        known = {key: value for key, value in changes.items() if key in config.training}
        changed = replace(config, training={**config.training, **known, "output_dir": folder})
        yield Run.prepare(config, changed.training_arguments())


def _parameters_line(model: nn.Module) -> str:
    counts = [(num_weights(param), param.requires_grad) for param in model.parameters()]
    trained = sum(count for count, is_trained in counts if is_trained)
    return f"{sum(count for count, _ in counts):,} parameters, {trained:,} of them trained"


def predicted(trainer: ZeroTrainer, config: RunConfig) -> list[str]:
    """Returns lines with the predicted memory of each rank, for rows of the maximum length. Lengths of prompts, and
    images, are those of the rows."""
    task, on_cpu = config.kind, trainer.args.device.type == "cpu"
    config = replace(config, training={**config.training, "use_cpu": on_cpu})
    batch = next(iter(trainer.get_train_dataloader()))
    num_tokens = None
    if isinstance(batch, list):  # of rows, for which answers are generated
        num_tokens = _prompt_tokens(trainer, batch) + trainer.args.max_completion_length
    elif {**config.training, **vars(config.arguments)}.get("max_length") is None:
        num_tokens = batch["input_ids"].shape[1]
    model_config = task.load_config(config.arguments)
    model_config.num_labels = trainer.model.config.num_labels  # those of the data
    memory_nbytes = device_nbytes(None, on_cpu=on_cpu)
    planned = PlanInput.of(task, config, config=model_config, num_tokens=num_tokens, memory_nbytes=memory_nbytes)
    if planned.is_one_row and num_tokens is not None:  # of all rows together
        planned = replace(planned, num_tokens=-(-num_tokens // planned.num_rows))
    if "input_ids" in batch and "pixel_values" in batch:
        example, (num_rows, num_tokens) = planned.batch, batch["input_ids"].shape
        planned = replace(planned, batch_of=lambda *_: {**example, **batch}, num_rows=num_rows, num_tokens=num_tokens)
    num_rows, num_tokens = planned.shape
    of_rows = f"{num_rows} rows" + (f" x {num_tokens} tokens" if "input_ids" in planned.batch else "")
    return [f"a micro-batch: {of_rows}", *planned.predict().render().splitlines()]


def _prompt_tokens(trainer: ZeroTrainer, rows: list[dict[str, Any]]) -> int:
    """Returns the number of tokens of the longest prompt among some rows."""
    tokenize, prompts = trainer.processing_class, [row["prompt"] for row in rows]
    texts = [p if isinstance(p, str) else tokenize.apply_chat_template(p, tokenize=False) for p in prompts]
    return max(len(ids) for ids in tokenize(texts)["input_ids"])


def _print_section(title: str, lines: list[str]) -> None:
    print(f"\n{title}", *(f"  {line}" for line in lines), sep="\n")
