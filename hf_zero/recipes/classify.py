"""Fine-tunes a model to tell classes of texts or images apart, and leaves a folder that plain transformers loads."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.trainer_utils import EvalPrediction, PredictionOutput
from transformers.utils import ModelOutput

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import CheckpointError, ConfigError, DataError
from hf_zero.recipes.data.rows import Data, Rows, plural
from hf_zero.recipes.data.sources import check_sources, is_local, load_rows
from hf_zero.recipes.docstrings import load_docstrings
from hf_zero.recipes.labelled import Classes, Images, Texts, held_out, read_labelled
from hf_zero.recipes.language_models import config_of
from hf_zero.recipes.loading import (
    attach,
    check_model,
    check_positions,
    is_adapter,
    load_base,
    loaded,
    positions_of,
    resolve_model,
)
from hf_zero.recipes.lora import AdapterArguments, FreezingArguments, adapt, check_adapter, check_freezing, head_of
from hf_zero.recipes.parser import option, refuse_less
from hf_zero.recipes.report import usage_command
from hf_zero.recipes.task import Task
from hf_zero.recipes.tasks import SourceArguments
from hf_zero.recipes.user_code import check_function, metrics_of
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


BUILT_IN = "python_docstrings"
NUM_NAMED = 20  # classes that the first line of a run names
NUM_VERIFIED = 64  # test rows that the reloaded model has to predict alike


@dataclass
class ClassifyArguments(AdapterArguments, FreezingArguments, SourceArguments):
    """What `classify` takes beside the training arguments."""

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
    num_classes: int = option(10, f"Number of packages in {BUILT_IN}.")
    max_length: int = option(128, "Maximum number of tokens; longer texts are truncated.")
    compute_metrics: str | None = option(
        None,
        "file.py:function. Receives an EvalPrediction (logits and labels of the test rows) and returns a dict of "
        "additional metrics.",
    )


def _base_prefix(path: str, inputs: Texts | Images, where: dict[str, str]) -> str:
    """Returns the prefix of the base model's parameters in the classifier."""
    config = AutoConfig.from_pretrained(path, **where)
    kind = inputs.classifiers.get(type(config), None)
    if kind is None:
        raise ConfigError(f"{path}: of type {config.model_type}, with which transformers does no {inputs.task}")
    return (kind[0] if isinstance(kind, tuple) else kind).base_model_prefix


def _load_rows(arguments: ClassifyArguments) -> tuple[Rows, Rows | None]:
    """All rows to train on, and those to test on; how many of them are wanted is counted once they are split."""
    if arguments.dataset_name != BUILT_IN:
        everything = replace(arguments, max_train_rows=None, max_test_rows=None)
        return load_rows(everything, "train"), load_rows(everything, "test")
    rows = [asdict(example) for example in load_docstrings(arguments.num_classes)]
    return Rows(Dataset.from_list(rows), BUILT_IN, example=rows[0]), None


def _inputs(rows: Rows, arguments: ClassifyArguments) -> Texts | Images:
    """What is classified, by the columns there are."""
    if arguments.image_column in rows.columns and arguments.text_column not in rows.columns:
        inputs: Texts | Images = Images(arguments.image_column)
    else:
        texts = [column for column in (arguments.text_column, arguments.text_pair_column) if column]
        inputs = Texts(texts, arguments.max_length)
    rows.require([*inputs.columns, arguments.label_column])
    return inputs


def _first(rows: Dataset, num_rows: int | None) -> Dataset:
    return rows.select(range(min(num_rows or len(rows), len(rows))))


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


def _metrics(
    predictions: EvalPrediction, more: Callable[[EvalPrediction], Mapping[str, float]]
) -> Mapping[str, float]:
    """The accuracy, and what the user's function gives."""
    accuracy = float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())
    return {"accuracy": accuracy, **more(predictions)}


def _predict_in_order(trainer: ZeroTrainer) -> PredictionOutput:
    """Under group_by_length Trainer shuffles test rows as well; to compare predictions row i has to stay row i."""
    strategy, trainer.args.train_sampling_strategy = trainer.args.train_sampling_strategy, "random"
    try:
        return trainer.predict(trainer.eval_dataset, metric_key_prefix="eval")
    finally:
        trainer.args.train_sampling_strategy = strategy


def verify(folder: str, inputs: Texts | Images, test: Dataset, predicted: np.ndarray) -> str:
    """Loads the folder, its processor too, as any user would, without hf_zero, and compares it with the logits that
    the trainer predicted, [rows, classes]."""
    num_rows = min(NUM_VERIFIED, len(test))
    inputs.load_processor(folder)
    if is_adapter(Path(folder)):
        loader, model = "PEFT", attach(load_base(Path(folder), None)[0].float(), Path(folder))
    else:
        loader = f"{inputs.auto_class.__name__}.from_pretrained"
        model = inputs.auto_class.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(**inputs.batch(test.select(range(num_rows)))).logits.numpy()
    expected = predicted[:num_rows]
    # fp32 differs by rounding only, as batches are padded to other lengths; a low-precision run by its own epsilon.
    tolerance = 1e-4 if expected.dtype == np.float32 else 5e-2
    equal = int((logits.argmax(-1) == expected.argmax(-1)).sum())
    error = float(np.abs(logits - expected).max())
    if error > tolerance * max(1.0, float(np.abs(expected).max())):
        raise CheckpointError(
            f"{folder}: its logits differ by {error:.2e} from the trained model's on {num_rows} test rows, "
            f"expected {tolerance:.0e} at most ({equal} equal predictions); do not use this folder"
        )
    return (
        f"saved to {folder}: {loader} loads it and predicts the same "
        f"({equal} of {num_rows} test rows, logits within {error:.1e})"
    )


class Classify(Task):
    """Fine-tunes a classifier, and compares the saved model with the trained one."""

    name = "classify"
    Arguments = ClassifyArguments
    Training = ZeroTrainingArguments
    holds_out = True
    scores = True

    def check(self, arguments: ClassifyArguments, training: Mapping[str, Any]) -> None:
        if arguments.dataset_streaming:
            raise ConfigError("dataset_streaming: all classes are to be known before training; leave it out")
        refuse_less(arguments, num_classes=2, max_length=8)
        if arguments.num_classes != ClassifyArguments.num_classes and arguments.dataset_name != BUILT_IN:
            raise ConfigError(f"num_classes: of {BUILT_IN} alone; the classes of other data are those of its labels")
        if arguments.compute_metrics:
            check_function("compute_metrics", arguments.compute_metrics)
        check_adapter(arguments)
        check_freezing(arguments, use_peft=arguments.use_peft)
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
        most = positions_of(config_of(arguments)) or sys.maxsize
        arguments = replace(arguments, max_length=min(arguments.max_length, most))
        with training.main_process_first():
            rows, test_rows = _load_rows(arguments)
            inputs, column = _inputs(rows, arguments), arguments.label_column
            if training.train_sampling_strategy == "group_by_length" and isinstance(inputs, Images):
                raise ConfigError("train_sampling_strategy group_by_length: images have no length; leave it out")
            read, skips = partial(read_labelled, column=column, skip_bad_rows=arguments.skip_bad_rows), 0
            train, num_bad = read(rows, inputs, classes=Classes.declared(rows, column))
            classes = Classes.declared(rows, column) or Classes.of(train["label"])
            if test_rows is None:
                train, test = held_out(train, inputs)
            else:
                _inputs(test_rows, arguments)
                test, skips = read(test_rows, inputs, classes=classes)
        train, test = _first(train, arguments.max_train_rows), _first(test, arguments.max_test_rows)
        counts = f"{len(classes.names)} classes"
        if len(classes.names) < 2 or not len(train) or not len(test):
            raise DataError(
                f"{rows.source}: {counts}, {len(train)} training and {len(test)} test rows; expected 2 classes or "
                "more and some rows of both"
            )
        inputs.load_processor(resolve_model(arguments.model_name_or_path), revision=arguments.model_revision or "main")
        numbers = [[classes.number_of[label] for label in half["label"]] for half in (train, test)]
        more = len(classes.names) - NUM_NAMED
        names = ", ".join(classes.names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
        notes = [f"{len(train)} training and {len(test)} test rows, {counts}: {names}"]
        notes += [f"{plural(num_bad + skips, 'bad row')} left out"] if num_bad + skips else []
        return Data(
            train=inputs.prepare(train, numbers[0]),
            test=inputs.prepare(test, numbers[1]),
            processing_class=inputs.processor,
            source=arguments.dataset_name or arguments.train_file,
            notes=[*notes, *inputs.notes()],
            sample=f"{inputs.shown(train[0])!r} -> {classes.names[numbers[0][0]]}",
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
        with loaded(path, f"does not load for {inputs.task}"):
            base = _base_prefix(path, inputs, where)
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
        """The trainer; nothing has been evaluated yet."""
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
        predictions, training = _predict_in_order(trainer), trainer.args
        trainer.log(predictions.metrics)  # as `evaluate` does: the report and the card show it
        say(f"\ntest accuracy: {data.extra['before']:.3f} before, {predictions.metrics['eval_accuracy']:.3f} after\n")
        if trainer.is_world_process_zero():
            inputs, test = data.extra["inputs"], data.extra["test"]
            print(verify(training.output_dir, inputs, test, predictions.predictions))
            if arguments.use_peft:
                print(f"merge it: python -m hf_zero.recipes merge {training.output_dir} --output_dir NEW_FOLDER")
            else:
                print(f"try it: {usage_command(training.output_dir, inputs.shown(test[0]), inputs.task)}")

    def auto_class(self, config: PretrainedConfig) -> Any:
        is_of_images = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        return AutoModelForImageClassification if is_of_images else AutoModelForSequenceClassification
