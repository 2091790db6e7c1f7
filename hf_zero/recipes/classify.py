"""The task `classify`: fine-tunes a classifier of texts, pairs of texts, or images."""

import hashlib
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.trainer_utils import EvalPrediction
from transformers.utils import ModelOutput

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import CheckpointError, ConfigError, DataError
from hf_zero.recipes.data.images import check_pillow, decoded, find_image
from hf_zero.recipes.data.rows import BadRow, Data, Rows, encode_rows, plural, text_of
from hf_zero.recipes.data.sources import check_sources, is_local, load_rows
from hf_zero.recipes.docstrings import load_docstrings, text_hash
from hf_zero.recipes.lora import TrainedArguments, adapt, check_trained, head_of
from hf_zero.recipes.models import (
    check_model,
    check_positions,
    config_of,
    load_tokenizer,
    one_line,
    positions_of,
    resolve_model,
)
from hf_zero.recipes.parser import option, program, refuse_less
from hf_zero.recipes.report import usage_command
from hf_zero.recipes.task import Task
from hf_zero.recipes.tasks import SourceArguments
from hf_zero.recipes.user_code import check_function, metrics_of
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


BUILT_IN = "python_docstrings"
NUM_NAMED = 20  # classes that the first line of a run names
TEST_PERCENT = 20  # of the rows, if no test rows are given


@dataclass
class ClassifyArguments(TrainedArguments, SourceArguments):
    """Keys of `classify` beside the training arguments."""

    dataset_name: str | None = option(
        None,
        "A hub id, a local file or folder of JSONL, JSON, CSV or Parquet, a folder of images, or "
        f"{BUILT_IN}: the docstrings of Python's standard library and the packages they come from.",
    )
    dataset_test_split: str | None = option(
        None, "Split to test on. Without it and test_file a fifth of the training rows is held out."
    )
    text_column: str = option("text", "Text column.")
    text_pair_column: str | None = option(None, "Column of the second text of a pair.")
    image_column: str = option("image", "Image column, if there is no text column.")
    label_column: str = option("label", "Label column.")
    max_length: int = option(128, "Maximum number of tokens; longer texts are truncated.")
    compute_metrics: str | None = option(
        None,
        "file.py:function. Receives an EvalPrediction (logits and labels of the test rows) and returns a dict of "
        "additional metrics.",
    )


class Texts:
    """Reads and tokenizes the texts of one or two columns. Longer ones are cut to `max_length` tokens."""

    task = "text-classification"
    auto_class = AutoModelForSequenceClassification
    classifiers = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING  # class of a config to class of the model
    peft_task = "SEQ_CLS"

    processor: PreTrainedTokenizerBase  # set by `load_processor`

    def __init__(self, columns: Sequence[str], max_length: int):
        self.columns, self._max_length = tuple(columns), max_length
        self.features = dict.fromkeys(columns, Value("string"))

    def load_processor(self, path: str, **where: Any) -> None:
        """Loads the tokenizer of a model. Raises [`ConfigError`] if it does not load, or cannot pad."""
        tokenizer = load_tokenizer(path, **where)
        if tokenizer.pad_token is None:
            raise ConfigError(f"{path}: its tokenizer has no token to pad with; set pad_token and save it again")
        self.processor = tokenizer

    def take(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Returns the texts of a row. Raises [`BadRow`] if one is missing, or no text."""
        return {column: text_of(row.get(column), column) for column in self.columns}

    def hash(self, row: Mapping[str, Any]) -> str:
        """Returns the hash that decides on which side of a split a row lies."""
        return text_hash(row[self.columns[0]])

    def prepare(self, data: Dataset, number_of: Mapping[str, int]) -> tuple[Dataset, list[int]]:
        """Tokenizes rows; `number_of` gives the number of each label. Returns them, and the number of tokens that each
        row that was cut has lost."""
        texts = [list(data[column]) for column in self.columns]
        tokens = self.processor(*texts, truncation=True, max_length=self._max_length)
        full = [row for row, ids in enumerate(tokens["input_ids"]) if len(ids) >= self._max_length]
        lost = []
        if full:
            whole = self.processor(*[[each[row] for row in full] for each in texts], verbose=False)["input_ids"]
            lost = [len(ids) - self._max_length for ids in whole if len(ids) > self._max_length]
        columns = {name: ids for name, ids in tokens.items() if name in self.processor.model_input_names}
        return Dataset.from_dict({**columns, "labels": [number_of[label] for label in data["label"]]}), lost

    def shown(self, row: Mapping[str, Any]) -> str | dict[str, str]:
        """Returns a row as the pipeline of transformers takes it, short enough for a command line."""
        texts = [textwrap.shorten(row[column], 60, placeholder="") for column in self.columns]
        return texts[0] if len(texts) == 1 else dict(zip(("text", "text_pair"), texts))


class Images:
    """Reads images and prepares them for a model. Raises [`ConfigError`] if Pillow is not installed."""

    task = "image-classification"
    auto_class = AutoModelForImageClassification
    classifiers = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING  # class of a config to class of the model
    peft_task = None

    processor: Any  # set by `load_processor`

    def __init__(self, column: str, folders: tuple[Path, ...]):
        check_pillow()
        self.columns, self.features = (column,), {"pixel_values": Image(decode=False)}
        self._folders = folders

    def load_processor(self, path: str, **where: Any) -> None:
        """Loads the image processor of a model. Raises [`ConfigError`] if it does not load."""
        with one_line(path, "its image processor does not load", ConfigError):
            self.processor = AutoImageProcessor.from_pretrained(path, **where)

    def take(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the image of a row. Raises [`BadRow`] if it is missing, or no image."""
        (column,) = self.columns
        if row.get(column) is None:
            raise BadRow(f"nothing in column {column!r}")
        return {"pixel_values": find_image(row[column], self._folders, column)}

    def hash(self, row: Mapping[str, Any]) -> str:
        """Returns the hash that decides on which side of a split a row lies."""
        stored = row["pixel_values"]
        content = stored["bytes"] if stored.get("bytes") is not None else Path(stored["path"]).read_bytes()
        return hashlib.sha256(content).hexdigest()

    def prepare(self, data: Dataset, number_of: Mapping[str, int]) -> tuple[Dataset, list[int]]:
        """Returns rows that are decoded and resized when they are read; `number_of` gives the number of each label."""
        return data.with_transform(partial(self._pixels, number_of)), []

    def _pixels(self, number_of: Mapping[str, int], rows: Mapping[str, list]) -> dict[str, list]:
        images = [decoded(stored) for stored in rows["pixel_values"]]
        pixels = self.processor(images, return_tensors="pt")["pixel_values"]  # [rows, channels, height, width]
        return {"pixel_values": [*pixels], "labels": [number_of[label] for label in rows["label"]]}

    def shown(self, row: Mapping[str, Any]) -> list[str]:
        """Returns a list of one image, as the pipeline of transformers takes it."""
        path = row["pixel_values"].get("path")
        return [path if path and Path(path).is_file() else "image.png"]


@dataclass(frozen=True)
class Classes:
    """The classes of a data set."""

    names: list[str]  # by number, as the model's config has them
    number_of: dict[str, int]  # of each label, as a text

    @classmethod
    def declared(cls, rows: Rows, column: str) -> "Classes | None":
        """Returns the classes that a data set declares for its column (`datasets.ClassLabel`), if it does."""
        feature = (rows.data.features or {}).get(column)
        if not isinstance(feature, ClassLabel):
            return None
        return cls(list(feature.names), {str(number): number for number in range(feature.num_classes)})

    @classmethod
    def of(cls, labels: Iterable[str]) -> "Classes":
        """Returns the classes of the labels that occur: integers in their order, others by the alphabet."""
        found = set(labels)
        are_numbers = all(label.removeprefix("-").isdecimal() for label in found)
        names = sorted(found, key=int if are_numbers else None)
        return cls(names, {name: number for number, name in enumerate(names)})

    def __str__(self) -> str:
        more = len(self.names) - NUM_NAMED
        return ", ".join(self.names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _read(
    rows: Rows, arguments: ClassifyArguments, inputs: Texts | Images, classes: Classes | None
) -> tuple[Dataset, int]:
    """Reads rows with the columns of `inputs` and a column `label` of texts, each of one of the `classes` if they are
    known. Returns them, and the number of bad rows that were dropped."""
    features = Features({**inputs.features, "label": Value("string")})
    read = partial(_labelled, inputs, arguments.label_column, classes)
    return encode_rows(rows, read, features, skip_bad_rows=arguments.skip_bad_rows)


def _labelled(inputs: Texts | Images, column: str, classes: Classes | None, row: dict[str, Any]) -> dict[str, Any]:
    label = row.get(column)
    if label is None or label == "":
        raise BadRow(f"nothing in column {column!r}")
    if not isinstance(label, (str, int)):
        raise BadRow(f"a {type(label).__name__} in column {column!r}, expected a text or a whole number")
    if classes and str(label) not in classes.number_of:
        expected = ", ".join([*classes.number_of][:NUM_NAMED])
        raise BadRow(f"class {str(label)!r} of column {column!r}, expected one of {expected}")
    return {**inputs.take(row), "label": str(label)}


def _held_out(rows: Dataset, inputs: Texts | Images) -> tuple[Dataset, Dataset]:
    """Splits rows so that equal ones never land on both sides, about a fifth of them to test on."""
    is_test = np.array([int(inputs.hash(row)[:8], 16) % 100 < TEST_PERCENT for row in rows])
    return rows.select(np.flatnonzero(~is_test)), rows.select(np.flatnonzero(is_test))


def _inputs(rows: Rows, arguments: ClassifyArguments) -> Texts | Images:
    """Returns what is classified, by the columns that the rows have."""
    if arguments.image_column in rows.columns and arguments.text_column not in rows.columns:
        inputs: Texts | Images = Images(arguments.image_column, rows.folders)
    else:
        texts = [column for column in (arguments.text_column, arguments.text_pair_column) if column]
        inputs = Texts(texts, arguments.max_length)
    rows.require([*inputs.columns, arguments.label_column])
    return inputs


def _mean_loss(
    outputs: ModelOutput,
    labels: torch.Tensor,  # [rows of this micro-batch]
    num_items_in_batch: torch.Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the mean over all rows of an optimizer step, on all ranks and in all micro-batches.

    A classifier's own loss is the mean of one micro-batch. Trainer takes it for a sum over `num_items_in_batch`, and
    so multiplies it by the world size and by the accumulation steps.
    """
    logits = outputs.logits.float()
    if num_items_in_batch is None:  # evaluation
        return cross_entropy(logits, labels, label_smoothing=label_smoothing)
    return cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="sum") / num_items_in_batch


def _metrics(
    predictions: EvalPrediction, more: Callable[[EvalPrediction], Mapping[str, float]]
) -> Mapping[str, float]:
    """Returns the accuracy, and the metrics of the user's function."""
    accuracy = float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())
    return {"accuracy": accuracy, **more(predictions)}


class Classify(Task):
    """Fine-tunes a classifier of texts or images."""

    name = "classify"
    Arguments = ClassifyArguments
    Training = ZeroTrainingArguments
    holds_out = True
    scores = True

    def check(self, arguments: ClassifyArguments, training: Mapping[str, Any]) -> None:
        if arguments.dataset_streaming:
            raise ConfigError("dataset_streaming: all classes are to be known before training; leave it out")
        refuse_less(arguments, max_length=8)
        if arguments.compute_metrics:
            check_function("compute_metrics", arguments.compute_metrics)
        check_trained(arguments)
        check_sources(arguments)
        if is_local(arguments.train_file or arguments.dataset_name):
            base = arguments.dataset_train_split.partition("[")[0]
            first = load_rows(replace(arguments, dataset_streaming=True, dataset_train_split=base), "train")
            _inputs(first, arguments)
        check_model(arguments)
        limit = positions_of(config_of(arguments))
        if arguments.max_length != ClassifyArguments.max_length:  # the default is cut to what the model takes
            check_positions(arguments.model_name_or_path, limit, arguments.max_length)

    def load_data(self, arguments: ClassifyArguments, training: ZeroTrainingArguments) -> Data:
        limits = arguments.max_train_rows, arguments.max_test_rows  # of rows once they are split
        most = positions_of(config_of(arguments)) or sys.maxsize
        arguments = replace(
            arguments, max_length=min(arguments.max_length, most), max_train_rows=None, max_test_rows=None
        )
        with training.main_process_first():
            if arguments.dataset_name == BUILT_IN:
                texts = load_docstrings()
                rows, test_rows = Rows(Dataset.from_list(texts), BUILT_IN, example=texts[0]), None
            else:
                rows, test_rows = load_rows(arguments, "train"), load_rows(arguments, "test")
            inputs, classes = _inputs(rows, arguments), Classes.declared(rows, arguments.label_column)
            if training.train_sampling_strategy == "group_by_length" and isinstance(inputs, Images):
                raise ConfigError("train_sampling_strategy group_by_length: images have no length; leave it out")
            train, num_bad = _read(rows, arguments, inputs, classes)
            classes = classes or Classes.of(train["label"])
            if test_rows is None:
                train, test = _held_out(train, inputs)
            else:
                _inputs(test_rows, arguments)
                test, more = _read(test_rows, arguments, inputs, classes)
                num_bad += more
        train, test = (
            half.select(range(min(most or len(half), len(half)))) for half, most in zip((train, test), limits)
        )
        counts = f"{len(train)} training and {len(test)} test rows, {len(classes.names)} classes"
        if len(classes.names) < 2 or not len(train) or not len(test):
            raise DataError(f"{rows.source}: {counts}; expected 2 classes or more and some rows of both")
        inputs.load_processor(resolve_model(arguments.model_name_or_path), revision=arguments.model_revision or "main")
        (train_data, cut), (test_data, more_cut) = (inputs.prepare(half, classes.number_of) for half in (train, test))
        lost = [*cut, *more_cut]
        of_cut = f"{plural(len(lost), 'row')} cut to {arguments.max_length} tokens, {plural(sum(lost), 'token')} lost"
        left_out = [f"{plural(num_bad, 'bad row')} left out"] if num_bad else []
        return Data(
            train=train_data,
            test=test_data,
            processing_class=inputs.processor,
            source=arguments.dataset_name or arguments.train_file,
            notes=[f"{counts}: {classes}", *left_out, *([of_cut] if lost else [])],
            sample=f"{inputs.shown(train[0])!r} -> {classes.names[classes.number_of[train[0]['label']]]}",
            rows=[rows],
            extra={"inputs": inputs, "classes": classes, "test": test},
        )

    def load_model(self, arguments: ClassifyArguments, training: ZeroTrainingArguments, data: Data) -> nn.Module:
        """Loads the model with a head for these classes, a new one unless it has one of that size, in fp32, and its
        adapter. Raises [`ConfigError`] if it does not load as a classifier, and [`CheckpointError`] if weights of the
        base model are missing or have other shapes; transformers reports a new head."""
        path, inputs = resolve_model(arguments.model_name_or_path), data.extra["inputs"]
        names = data.extra["classes"].names
        where = {"revision": arguments.model_revision} if arguments.model_revision else {}
        with one_line(path, f"does not load for {inputs.task}", ConfigError):
            config = AutoConfig.from_pretrained(path, **where)
            kind = inputs.classifiers.get(type(config), None)
            if kind is None:
                raise ConfigError(
                    f"{path}: of type {config.model_type}, with which transformers does no {inputs.task}"
                )
            base = (kind[0] if isinstance(kind, tuple) else kind).base_model_prefix
            model, info = load_pretrained(
                inputs.auto_class,
                path,
                allow_missing=[f"{base}.pooler"],  # which language models come without
                dtype=torch.float32,
                num_labels=len(names),
                id2label=dict(enumerate(names)),
                label2id={name: number for number, name in enumerate(names)},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **where,
            )
        for name, found, wanted in sorted(info["mismatched_keys"]):
            if name.startswith(f"{base}."):  # only the head may have another shape
                raise CheckpointError(
                    f"{path}: tensor {name!r} has shape {list(found)}, the model's has {list(wanted)}; give the "
                    "config that was saved with it"
                )
        if isinstance(inputs, Texts):
            model.config.pad_token_id = inputs.processor.pad_token_id
        return adapt(model, arguments, inputs.peft_task, new_modules=head_of(model))

    def make_trainer(
        self, model: nn.Module, arguments: ClassifyArguments, training: ZeroTrainingArguments, data: Data
    ) -> ZeroTrainer:
        return ZeroTrainer(
            model=model,
            args=training,
            train_dataset=data.train,
            eval_dataset=data.test,
            processing_class=data.processing_class,
            compute_metrics=partial(_metrics, more=metrics_of(arguments.compute_metrics)),
            compute_loss_func=partial(_mean_loss, label_smoothing=training.label_smoothing_factor),
        )

    def before(self, trainer: ZeroTrainer, data: Data, say: Callable[..., None]) -> None:
        test = data.extra["test"]
        chance = max(Counter(test["label"]).values()) / len(test)
        data.extra["before"] = trainer.evaluate()["eval_accuracy"]
        say(f"test accuracy before training: {data.extra['before']:.3f} (always the largest class: {chance:.3f})")

    def after(self, trainer: ZeroTrainer, data: Data, arguments: ClassifyArguments, say: Callable[..., None]) -> None:
        folder, inputs = trainer.args.output_dir, data.extra["inputs"]
        accuracy = trainer.evaluate()["eval_accuracy"]
        say(f"\ntest accuracy: {data.extra['before']:.3f} before, {accuracy:.3f} after\n")
        say(f"saved to {folder}")
        if arguments.use_peft:
            say(f"merge it: {program()} merge {folder} --output_dir NEW_FOLDER")
        else:
            say(f"try it: {usage_command(folder, inputs.shown(data.extra['test'][0]), inputs.task)}")

    def auto_class(self, config: PretrainedConfig) -> Any:
        is_of_images = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        return AutoModelForImageClassification if is_of_images else AutoModelForSequenceClassification
