"""Direct preference optimization through TRL: a language model learns to prefer chosen answers to rejected ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel

from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.artifacts import usage_command
from hf_zero.recipes.causal import (
    LoadArguments,
    TemplateArguments,
    check_dtype,
    check_stream,
    check_template,
    load_causal_model,
    load_tokenizer,
)
from hf_zero.recipes.data import Data, check_sources, encode_rows, load_rows
from hf_zero.recipes.data.chat import template_notes
from hf_zero.recipes.data.preferences import COLUMNS, Preferences
from hf_zero.recipes.data.rows import cut_note, plural
from hf_zero.recipes.data.sources import shuffled
from hf_zero.recipes.loading import check_model, check_positions
from hf_zero.recipes.lora import AdapterArguments, check_adapter, lora_config
from hf_zero.recipes.measured import MemoryRecorder
from hf_zero.recipes.tasks import SourceArguments


try:
    from hf_zero.trl import ZeroDPOConfig, ZeroDPOTrainer
except ImportError as error:
    reason = error.__cause__ or error
    raise ConfigError(f"dpo: TRL cannot be imported ({reason}); pip install 'hf-zero[trl]'") from error


Training = ZeroDPOConfig


@dataclass
class Arguments(TemplateArguments, AdapterArguments, LoadArguments, SourceArguments):
    """What `dpo` takes beside the training arguments; `max_length` and `dataset_num_proc` are among those."""


def check(arguments: Arguments, training: Mapping[str, Any]) -> None:
    """Refuses what cannot work, before a process is started.

    Raises:
        ConfigError: If the model is missing, settings contradict each other, or one of TRL's has no effect here.
        DataError: If a file is missing.
        CheckpointError: If the weights are truncated.
    """
    check_sources(arguments)
    check_adapter(arguments)
    check_dtype(arguments)
    check_template(arguments)
    _check_training(training)
    check_stream(arguments, training)
    check_model(arguments)
    check_positions(arguments, training["max_length"])


def load_data(arguments: Arguments, training: ZeroDPOConfig) -> Data:
    """Reads the preferences. TRL tokenizes them when it makes the trainer.

    Raises:
        ConfigError: If a setting does not fit the rows.
        DataError: If the data cannot be trained on.
    """
    tokenizer = load_tokenizer(arguments)
    with training.main_process_first():
        train, is_chat, notes = _load_split(arguments, training, "train")
        test, _, test_notes = _load_split(arguments, training, "test")
    source = arguments.dataset_name or arguments.train_file
    first = next(iter(train), None)
    if first is None:
        raise DataError(f"{source}: no good row, expected one at least; correct them")
    if arguments.dataset_streaming:
        train = shuffled(train, arguments, training)
    chat = first["prompt"] + first["chosen"] if is_chat else None
    notes += template_notes(tokenizer, arguments.chat_template_path, chat=chat, source=source)
    return Data(
        train=train,
        test=test,
        processing_class=tokenizer,
        collate=None,
        source=source,
        notes=[*notes, *test_notes],
        sample="\n".join(f"{name}: {value!r}" for name, value in first.items()),
        extra={"prompt": first["prompt"]},
    )


def load_model(arguments: Arguments, training: ZeroDPOConfig, data: Data) -> PreTrainedModel:
    """The model to train, its weights still in their files; TRL puts the adapter on it, if there is to be one.

    Raises:
        ConfigError: It does not load as a language model, or does not fit the settings.
    """
    return load_causal_model(arguments, data.processing_class)


def make_trainer(model: nn.Module, arguments: Arguments, training: ZeroDPOConfig, data: Data) -> ZeroDPOTrainer:
    """The trainer, and the reference beside the model: the same weights, frozen and sharded.

    An adapter that is switched off is its own reference, and log probabilities that are computed beforehand need none.

    Raises:
        DataError: If no prompt leaves room for an answer.
    """
    needs_reference = not arguments.use_peft and not training.precompute_ref_log_probs
    trainer = ZeroDPOTrainer(
        model=model,
        ref_model=load_model(arguments, training, data) if needs_reference else None,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=data.processing_class,
        peft_config=lora_config(arguments),
    )
    if isinstance(trainer.train_dataset, Dataset) and not len(trainer.train_dataset):
        raise DataError(
            f"{data.source}: every prompt has {training.max_length} tokens or more; set a larger --max_length"
        )
    return trainer


def before(trainer: ZeroDPOTrainer, data: Data, say: Callable[..., None]) -> None:
    """Says what of the rows does not fit into `max_length`."""
    if not isinstance(data.train, Dataset) or trainer.args.max_length is None:
        return
    max_length, kept = trainer.args.max_length, trainer.train_dataset
    if len(kept) < len(data.train):
        lost = plural(len(data.train) - len(kept), "row")
        say(f"{lost} left out, whose prompt alone has {max_length} tokens or more")
    num_cut, num_lost = _cut(kept, max_length)
    if num_cut:
        say(cut_note(num_cut, max_length, num_lost))


def after(
    trainer: ZeroDPOTrainer, data: Data, memory: MemoryRecorder, arguments: Arguments, say: Callable[..., None]
) -> None:
    """Says how well the model tells chosen from rejected answers now, and how to use it."""
    if data.test is not None:
        metrics = trainer.evaluate()
        say(
            f"test rows: {metrics['eval_rewards/accuracies']:.3f} of the chosen answers are preferred, by a margin of "
            f"{metrics['eval_rewards/margins']:.3f}"
        )
    folder = trainer.args.output_dir
    say(f"saved to {folder}")
    say(f"try it: {usage_command(folder, data.extra['prompt'], 'text-generation')}")


def _check_training(training: Mapping[str, Any]) -> None:
    if training["model_init_kwargs"]:
        raise ConfigError("model_init_kwargs: has no effect; give dtype, attn_implementation or model_revision")
    if training["label_smoothing_factor"]:
        raise ConfigError("label_smoothing_factor: has no effect; give label_smoothing, that of DPO's loss")
    if training["trust_remote_code"]:
        raise ConfigError("trust_remote_code: not supported; train such a model with hf_zero.trl.ZeroDPOTrainer")


def _load_split(arguments: Arguments, training: ZeroDPOConfig, split: str) -> tuple[Any, bool, list[str]]:
    """The rows, whether they are chats, and what there is to say of them."""
    rows = load_rows(arguments, split)
    if rows is None:
        return None, False, []
    preferences = Preferences.of(rows)
    data, num_bad = encode_rows(
        rows,
        preferences.read,
        preferences.features,
        skip_bad_rows=arguments.skip_bad_rows,
        key=str(preferences),
        num_proc=training.dataset_num_proc,
    )
    notes = [f"{split}: a stream of rows" if rows.is_stream else f"{split}: {plural(len(data), 'row')}"]
    if num_bad:
        notes.append(f"{split}: {plural(num_bad, 'bad row')} left out")
    return data, preferences.is_chat, notes


def _cut(data: Dataset, max_length: int) -> tuple[int, int]:
    """How many rows have an answer that does not fit behind its prompt, and how many tokens both answers lose."""
    table = data.with_format("arrow")[:]
    prompt, *answers = (pc.list_value_length(table[f"{name}_ids"]).to_numpy() for name in COLUMNS)
    lost = sum(np.maximum(prompt + answer - max_length, 0) for answer in answers)
    return int((lost > 0).sum()), int(lost.sum())
