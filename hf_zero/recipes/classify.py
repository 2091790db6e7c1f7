"""Fine-tunes an encoder to tell classes of text apart, and leaves a folder that plain transformers loads."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import transformers
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PredictionOutput
from transformers.utils import ModelOutput

from hf_zero.errors import CheckpointError, ConfigError, DataError
from hf_zero.recipes.docstrings import load_docstrings
from hf_zero.recipes.examples import Example, split_by_hash
from hf_zero.recipes.files import check_file, load_file
from hf_zero.recipes.memory import MemoryRecorder
from hf_zero.recipes.models import resolve_model
from hf_zero.recipes.report import memory_table, usage_command
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


BUILT_IN = "python_docstrings"
NUM_VERIFIED = 64  # test rows that the reloaded model has to predict alike


@dataclass
class Arguments:
    """What `classify` takes beside the training arguments."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder, package:<name>/<folder inside an installed package>, or a hub id."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": f"A built-in data set: {BUILT_IN}. Leave it out and give train_file for your own."},
    )
    train_file: str | None = field(default=None, metadata={"help": "A local .csv, .json or .jsonl file."})
    test_file: str | None = field(
        default=None, metadata={"help": "The same for testing; without it 20%% of train_file are held out, by hash."}
    )
    text_column: str = field(default="text", metadata={"help": "The column of the files that holds the text."})
    label_column: str = field(default="label", metadata={"help": "The column of the files that holds the class."})
    num_classes: int = field(default=10, metadata={"help": f"How many packages {BUILT_IN} is made of."})
    max_length: int = field(default=128, metadata={"help": "Longer texts are cut to so many tokens."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Train on the first so many rows only."})
    max_test_rows: int | None = field(default=None, metadata={"help": "Test on the first so many rows only."})


@dataclass(frozen=True)
class _Data:
    train: list[Example]
    test: list[Example]
    labels: list[str]


def check(arguments: Arguments) -> None:
    """Refuses what cannot work, before a process is started.

    Args:
        arguments ([`Arguments`]): The parsed arguments.

    Raises:
        ConfigError: If the model is missing, or not exactly one data source is given.
        DataError: If a file is missing or lacks a column.
        CheckpointError: If the weights are truncated.
    """
    if not arguments.model_name_or_path:
        raise ConfigError("model_name_or_path: not set; name a folder, package:<name>/<folder> or a hub id")
    if (arguments.dataset_name is None) == (arguments.train_file is None):
        raise ConfigError(f"data: give either dataset_name ({BUILT_IN}) or train_file, and not both")
    if arguments.dataset_name not in (None, BUILT_IN):
        raise ConfigError(
            f"dataset_name {arguments.dataset_name!r}: expected {BUILT_IN}; for your own data give train_file"
        )
    for name, least in (("num_classes", 2), ("max_length", 8), ("max_train_rows", 1), ("max_test_rows", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}: expected {least} or more")
    for path in filter(None, (arguments.train_file, arguments.test_file)):
        check_file(path, (arguments.text_column, arguments.label_column))
    resolve_model(arguments.model_name_or_path)


def run(arguments: Arguments, training: ZeroTrainingArguments) -> None:
    """Trains, evaluates before and after, saves, and loads the result again with plain transformers.

    Args:
        arguments ([`Arguments`]): Checked arguments.
        training ([`ZeroTrainingArguments`]): Arguments of the trainer; every rank runs this function.

    Raises:
        DataError: If the data cannot be trained on.
        CheckpointError: If the saved model does not predict what the trained one did.
    """
    data = _load_data(arguments)
    transformers.set_seed(training.seed)
    model, tokenizer = _load_model(arguments, data.labels)
    trainer = ZeroTrainer(
        model=model,
        args=training,
        train_dataset=_tokenize(data.train, data.labels, tokenizer, arguments.max_length),
        eval_dataset=_tokenize(data.test, data.labels, tokenizer, arguments.max_length),
        processing_class=tokenizer,
        compute_metrics=_accuracy,
        compute_loss_func=partial(_mean_loss, label_smoothing=training.label_smoothing_factor),
    )
    memory = MemoryRecorder(trainer)
    trainer.add_callback(memory)
    say = partial(print, flush=True) if trainer.is_world_process_zero() else _say_nothing
    chance = max(Counter(example.label for example in data.test).values()) / len(data.test)
    say(
        f"{len(data.train)} training and {len(data.test)} test rows, {len(data.labels)} classes: "
        f"{', '.join(data.labels)}"
    )
    before = trainer.evaluate()["eval_accuracy"]
    say(f"test accuracy before training: {before:.3f} (always the largest class: {chance:.3f})")
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    predictions = _predict_in_order(trainer)
    trainer.save_model()
    say(f"\ntest accuracy: {before:.3f} before, {predictions.metrics['eval_accuracy']:.3f} after\n")
    say(memory_table(_gather_memory(trainer, memory), training.zero_stage) + "\n")
    if trainer.is_world_process_zero():
        _verify(training.output_dir, data.test, predictions, arguments.max_length)
        print(f"try it: {usage_command(training.output_dir, data.test[0].text)}")
    trainer.accelerator.end_training()


def _load_data(arguments: Arguments) -> _Data:
    if arguments.dataset_name == BUILT_IN:
        train, test = split_by_hash(load_docstrings(arguments.num_classes))
    elif arguments.test_file:
        columns = (arguments.text_column, arguments.label_column)
        train, test = load_file(arguments.train_file, *columns), load_file(arguments.test_file, *columns)
    else:
        train, test = split_by_hash(load_file(arguments.train_file, arguments.text_column, arguments.label_column))
    train, test = train[: arguments.max_train_rows], test[: arguments.max_test_rows]
    source = arguments.dataset_name or arguments.train_file
    labels = sorted({example.label for example in train})
    if len(labels) < 2 or not test:
        raise DataError(
            f"{source}: {len(labels)} classes, {len(test)} test rows; expected 2 classes or more and some test rows"
        )
    strangers = sorted({example.label for example in test} - set(labels))
    if strangers:
        raise DataError(f"{source}: class {strangers[0]!r} is in the test rows only; add training rows of it")
    return _Data(train, test, labels)


def _load_model(arguments: Arguments, labels: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = resolve_model(arguments.model_name_or_path)
    verbosity = transformers.logging.get_verbosity()
    # A new head on an old encoder is what we are here for; transformers reports it as a problem, once per rank.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=torch.float32,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path}: does not load as a text classifier ({str(error).splitlines()[0]})") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _tokenize(
    examples: list[Example], labels: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Dataset:
    encoded = tokenizer([example.text for example in examples], truncation=True, max_length=max_length)
    columns = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    return Dataset.from_dict({**columns, "labels": [labels.index(example.label) for example in examples]})


def _mean_loss(
    outputs: ModelOutput,
    labels: torch.Tensor,  # [rows of this micro-batch]
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The mean over all rows of an optimizer step, on all ranks and in all micro-batches.

    A classifier's own loss is the mean of one micro-batch. Trainer takes it for a sum over `num_items_in_batch`, and
    so multiplies it by the world size and by the accumulation steps.
    """
    logits = outputs.logits.float()
    if num_items_in_batch is None:  # evaluation
        return cross_entropy(logits, labels, label_smoothing=label_smoothing)
    return cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="sum") / num_items_in_batch


def _accuracy(predictions: PredictionOutput) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def _predict_in_order(trainer: ZeroTrainer) -> PredictionOutput:
    """Under group_by_length Trainer shuffles test rows as well; to compare predictions row i has to stay row i."""
    strategy, trainer.args.train_sampling_strategy = trainer.args.train_sampling_strategy, "random"
    try:
        return trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")
    finally:
        trainer.args.train_sampling_strategy = strategy


def _gather_memory(trainer: ZeroTrainer, memory: MemoryRecorder) -> list[dict[str, int]]:
    names = sorted(memory.largest)
    row = [memory.largest[name] for name in names]
    rows = trainer.accelerator.gather(torch.tensor([row], device=trainer.args.device))
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]


def _verify(folder: str, test: list[Example], predictions: PredictionOutput, max_length: int) -> None:
    """Loads the folder as any user would, without hf_zero, and compares it with what the trainer predicted."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [example.text for example in test[:NUM_VERIFIED]]
    batch = tokenizer(texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits.numpy()
    expected = predictions.predictions[: len(texts)]
    # fp32 differs by rounding only, as batches are padded to other lengths; a low-precision run by its own epsilon.
    tolerance = 1e-4 if expected.dtype == np.float32 else 5e-2
    equal = int((logits.argmax(-1) == expected.argmax(-1)).sum())
    error = float(np.abs(logits - expected).max())
    if error > tolerance * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(
            f"{folder}: its logits differ by {error:.2e} from the trained model's on {len(texts)} test rows, "
            f"expected {tolerance:.0e} at most ({equal} equal predictions); do not use this folder"
        )
    print(
        f"saved to {folder}: AutoModelForSequenceClassification.from_pretrained loads it and predicts the same "
        f"({equal} of {len(texts)} test rows, logits within {error:.1e})"
    )


def _say_nothing(*_: object) -> None:
    pass
