"""The tasks that TRL's `SFTTrainer` trains: `sft`, on prompts, chats or texts, and `pretrain`, on texts in blocks."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    EvalPrediction,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from trl import SFTTrainer

from hf_zero.compat import check_overrides
from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import (
    DEFAULT,
    FORMAT_NAMES,
    LABELS,
    MASKS,
    UNTRAINED,
    Format,
    FormatName,
    check_text_column,
    recognise,
)
from hf_zero.recipes.data.images import (
    ImageFormat,
    check_pillow,
    has_images,
    image_column,
    with_images,
    with_pixels,
)
from hf_zero.recipes.data.mixture import Mixture
from hf_zero.recipes.data.rows import IGNORED, Data, Rows, cut_notes, plural
from hf_zero.recipes.language_models import (
    NewModelArguments,
    check_packing,
    config_of,
    load_language_model,
    load_processor,
    load_tokenizer,
    takes_images,
)
from hf_zero.recipes.parser import option
from hf_zero.recipes.trl_task import DataSource, ProcessingClass, TrlArguments, TrlTask, counted_runs
from hf_zero.recipes.user_code import check_function, metrics_of
from hf_zero.trl import ZeroSFTTrainer


REPEATED = re.compile(r"(<[^<>]+>)\1{3,}")  # the tokens of an image
PLAIN = ("text", "tokenized")  # formats of `pretrain`
Metrics = Callable[[EvalPrediction], Mapping[str, float]]


@dataclass
class TokenArguments(TrlArguments):
    """What `sft` and `pretrain` take beside the configuration of their trainer."""

    compute_metrics: str | None = option(
        None,
        "file.py:function. Receives an EvalPrediction with sums per test row or packed sequence (loss, entropy, "
        "correct tokens; labels: counted tokens) and returns a dict of additional metrics.",
    )


@dataclass
class SftArguments(TokenArguments):
    """What `sft` takes beside the configuration of its trainer."""

    dataset_format: FormatName | None = option(
        None, f"One of {', '.join(FORMAT_NAMES)}. Default: detected from the columns."
    )


@dataclass
class PretrainArguments(NewModelArguments, TokenArguments):
    """What `pretrain` takes beside the configuration of its trainer."""


class TokenMeanSFTTrainer(ZeroSFTTrainer):
    """A `ZeroSFTTrainer` whose losses are means over tokens, whatever the model, and which counts what it cuts.

    That of a step is the mean over all tokens that count in all its micro-batches on all ranks. `eval_loss` is the
    mean over all those of the test rows: TRL's is a mean of means over batches, and depends on how large they are.

    Attributes:
        notes (`list[str]`): what became of the rows, a line each.
        sample (`dict`): the first row as it was tokenized.
    """

    data_collator: Callable
    chat_template: str | None

    def __init__(
        self,
        *args: Any,
        sources: Sequence[DataSource],
        test_source: DataSource | None,
        mixture: Mixture,
        more_metrics: Metrics,
        **kwargs: Any,
    ):
        self._sources, self._test_source, self._mixture = sources, test_source, mixture
        self.notes: list[str] = []
        self.sample: dict[str, Any] | None = None
        super().__init__(*args, compute_metrics=partial(token_means, more=more_metrics), **kwargs)
        self.model_accepts_loss_kwargs = True  # the loss is TRL's, which divides by the tokens of the whole step
        if self._is_vision_dataset:  # whose rows TRL tokenizes when it makes a batch
            self.data_collator = partial(with_pixels, self.data_collator)
            batch = self.data_collator([next(iter(self.train_dataset))])
            self.sample = {name: batch[name][0].tolist() for name in ("input_ids", "labels")}

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: PreTrainedTokenizerBase,
        args: Any,
        packing: bool,
        formatting_func: Callable | None,
        dataset_name: str,
        **kwargs: Any,
    ) -> Dataset | IterableDataset:
        """Tokenizes the rows of each source as TRL does, accounts for them, and then lets TRL cut or pack them."""
        split = "test" if dataset_name == "eval" else dataset_name
        prepare = partial(
            super()._prepare_dataset,
            processing_class=processing_class,
            formatting_func=formatting_func,
            dataset_name=dataset_name,
            **kwargs,
        )
        sources = self._sources if split == "train" else [self._test_source]
        dataset = self._mixture.mix([_alike(self._tokenized(each, prepare)) for each in sources])
        cuts = not packing or args.packing_strategy == "bfd"
        keeps_end = not packing and args.truncation_mode == "keep_end"
        if isinstance(dataset, Dataset):
            dataset = self._accounted(dataset, split, args.max_length if cuts else None, keeps_end)
        else:
            self.notes.append(
                f"{split}: read while training goes on, so rows that are cut or left out are not counted"
            )
        if self.sample is None:
            first = next(iter(dataset))
            kept = slice(-args.max_length, None) if keeps_end and args.max_length else slice(args.max_length)
            self.sample = {name: first[name][kept] for name in ("input_ids", "labels")}
        num_rows = None if isinstance(dataset, IterableDataset) else len(dataset)
        prepared = prepare(dataset, args=args, packing=packing)
        if packing and num_rows is not None:
            self.notes.append(
                f"{split}: {plural(num_rows, 'row')} packed into {plural(len(prepared), 'sequence')} of up to "
                f"{args.max_length} tokens"
            )
        return prepared

    def _tokenized(self, source: DataSource, prepare: Callable) -> Dataset | IterableDataset:
        """Whole rows as TRL tokenizes them, with labels; by the template with marks where those are needed."""
        whole, template = copy(source.training), self.chat_template
        whole.max_length, whole.shuffle_dataset = None, False
        self.chat_template = template if whole.assistant_only_loss else None
        try:
            rows = prepare(source.data, args=whole, packing=False)
        finally:
            self.chat_template = template
        return rows.map(_without_untrained) if _has_untrained(rows) else rows

    def _accounted(self, rows: Dataset, split: str, max_length: int | None, keeps_end: bool) -> Dataset:
        """The rows of which the loss counts some token, where they are cut to their first `max_length` tokens, or to
        the last ones."""
        lengths, counted = _token_counts(rows, max_length, keeps_end)
        tokens = f"{'last' if keeps_end else 'first'} {max_length}"
        kept = counted > 0 if max_length else np.full(len(rows), counted.any())
        if not kept.any():
            raise DataError(
                f"{split}: no row has a token that the loss counts within its {tokens}; set a larger "
                "--max_length, or another loss"
            )
        if not kept.all():
            lost = plural(int((~kept).sum()), "row")
            self.notes.append(f"{split}: {lost} left out, none of whose {tokens} tokens counts")
        cut = np.maximum(lengths - (max_length or np.inf), 0)[kept].astype(int)
        self.notes += [f"{split}: {note}" for note in cut_notes(cut, max_length)]
        num_tokens = int(lengths[kept].sum() - cut.sum())
        self.notes.append(f"{split}: {plural(num_tokens, 'token')}, of which the loss counts {counted.sum():,}")
        return rows if kept.all() else rows.select(np.flatnonzero(kept))

    def get_eval_dataloader(self, eval_dataset: Any = None, **kwargs: Any) -> Any:
        collate = self.data_collator
        self.data_collator = partial(with_rows, collate)
        try:
            return super().get_eval_dataloader(eval_dataset, **kwargs)
        finally:
            self.data_collator = collate

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple:
        """Gives, in place of logits, sums over the tokens of each row: loss, entropy, right guesses, and how many."""
        inputs = self._prepare_inputs(inputs)
        row_of = inputs.pop("row_of")
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs, fused_lm_head=True)
        found = (-outputs.log_probs, outputs.entropy, outputs.is_top1, outputs.label_mask)
        values = torch.stack([each.float().flatten() for each in found], dim=1)
        sums = values.new_zeros(int(row_of[-1, -1]) + 1, len(found))
        sums.index_add_(0, row_of[:, 1:].flatten(), values)  # a token is guessed from the one before it
        return None, sums, sums[:, -1]


check_overrides(TokenMeanSFTTrainer, SFTTrainer, ("_prepare_dataset", "get_eval_dataloader", "prediction_step"))


def with_rows(collate: Callable[[list], dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch, and which of its rows each token is of: without padding, all rows are one behind the other."""
    batch = collate(rows)
    shape = batch["input_ids"].shape
    row_of = torch.arange(len(rows))[:, None].expand(len(rows), shape[1])
    if shape[0] < len(rows):
        lengths = [len(row["input_ids"]) for row in rows]
        lengths[-1] += shape[1] - sum(lengths)
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))[None]
    return {**batch, "row_of": row_of}


def token_means(predictions: EvalPrediction, more: Metrics) -> dict[str, float]:
    """The means over tokens of what `prediction_step` gives, and what the user's function gives."""
    *sums, count = predictions.predictions.sum(axis=0, dtype="float64")
    means = zip(("loss", "entropy", "mean_token_accuracy"), (float(each / max(count, 1)) for each in sums))
    of_rows = EvalPrediction(predictions.predictions[:, :-1], predictions.label_ids)
    return {**dict(means), **more(of_rows)}


def _has_untrained(rows: Dataset | IterableDataset) -> bool:
    """Whether some message has weight 0; for a stream, whether it may have."""
    if not isinstance(rows, Dataset):
        return UNTRAINED in (rows.column_names or ())
    return UNTRAINED in rows.column_names and bool(pc.max(pc.list_value_length(rows.data.column(UNTRAINED))).as_py())


def _without_untrained(row: dict[str, Any]) -> dict[str, Any]:
    """Removes messages of weight 0 from the labels: the assistant's messages are the runs of labels, in order."""
    labels, untrained = list(row["labels"]), row[UNTRAINED] or ()
    runs = counted_runs(label != IGNORED for label in labels) if untrained else []
    for number in untrained:
        labels[runs[number].start : runs[number].stop] = [IGNORED] * len(runs[number])
    return {"labels": labels}


def _alike(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Rows that were tokenized, with the columns that those of other data sets have too."""
    features = Features({"input_ids": List(Value("int32")), "labels": List(Value("int64"))})
    rows = rows.select_columns([*features])
    return rows if rows.features == features else rows.cast(features)


def _token_counts(rows: Dataset, max_length: int | None, keeps_end: bool) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens rows have, and how many the loss counts of their first `max_length`, or of the last ones."""
    lengths, counted = [], []
    for table in rows.select_columns("labels").with_format("arrow").iter(batch_size=10_000):
        labels = table["labels"].combine_chunks()
        own = pc.list_value_length(labels).to_numpy()
        lost = np.maximum(own - max_length, 0) if keeps_end and max_length else 0
        starts: np.ndarray = np.repeat(own.cumsum() - own + lost, own)
        positions = np.arange(len(starts)) - starts
        counts = labels.flatten().to_numpy(zero_copy_only=False) != IGNORED
        counts &= (positions > 0) & (positions < (max_length or np.inf))  # the first is predicted from nothing
        counted.append(np.bincount(np.repeat(np.arange(len(own)), own), weights=counts, minlength=len(own)))
        lengths.append(own)
    return np.concatenate(lengths), np.concatenate(counted).astype(int)


def _shown(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """A row as it was tokenized, with what the loss counts between ⟦ and ⟧."""
    pieces = []
    for label_counts, tokens in groupby(zip(row["input_ids"], row["labels"]), key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in tokens])
        pieces.append(f"⟦{text}⟧" if label_counts else text)
    return REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])}", "".join(pieces))


class Sft(TrlTask):
    """Trains a language model on rows in more formats than others, of which the loss counts what is to be learned."""

    name = "sft"
    trainer = TokenMeanSFTTrainer
    test_line = "loss {eval_loss:.4f} a token"
    Arguments: type[TrlArguments] = SftArguments
    defaults: ClassVar[Mapping[str, Any]] = {"assistant_only_loss": None}
    sums_tokens = True
    fused_head = True
    format_names: ClassVar[tuple[str, ...]] = FORMAT_NAMES

    def check(self, arguments: TrlArguments, training: Mapping[str, Any]) -> None:
        if name := getattr(arguments, "compute_metrics", None):
            check_function("compute_metrics", name)
        super().check(arguments, training)

    def _check_training(self, training: Mapping[str, Any]) -> None:
        super()._check_training({**training, "label_smoothing_factor": 0.0})  # which this trainer knows
        if training["max_length"] is not None and training["max_length"] < 2:
            raise ConfigError(f"max_length {training['max_length']}: expected 2 or more")
        given = training["dataset_kwargs"] or {}
        if (json.loads(given) if isinstance(given, str) else given).get("skip_prepare_dataset"):
            raise ConfigError("dataset_kwargs: rows with input_ids are known to be tokenized; leave it out")
        if training["eval_packing"] and not training["packing"]:  # TRL would then let the test rows see each other
            raise ConfigError("eval_packing: test rows are packed as training rows are; add --packing")

    def load_processing_class(self, rows: Rows, arguments: TrlArguments) -> ProcessingClass:
        may_follow = image_column(rows) is not None and takes_images(config_of(arguments))
        if not has_images(rows) and not may_follow:
            return super().load_processing_class(rows, arguments)
        check_pillow()
        return load_processor(arguments)

    def format_of(self, rows: Rows, arguments: TrlArguments, training: Any, tokenizer: ProcessingClass) -> Format:
        name = getattr(arguments, "dataset_format", None)
        names = (name,) if name else self.format_names
        form = recognise(rows, names, training.dataset_text_field, getattr(tokenizer, "tokenizer", tokenizer))
        if not isinstance(tokenizer, ProcessorMixin):
            return form
        return with_images(form, rows, getattr(tokenizer, "image_token", None), tokenizer.tokenizer.eos_token or "")

    def settle(
        self, sources: list[DataSource], test: DataSource | None, tokenizer: ProcessingClass, training: Any
    ) -> list[str]:
        """Settles what the loss counts: what is set, or by default what the format of each data set tells apart."""
        check_text_column(training.dataset_text_field, [(each.rows, each.form) for each in sources])
        counted = [_settled(each, tokenizer, training) for each in (*sources, *filter(None, [test]))]
        lines = [f"train: {each.rows.source}, {count}" for each, count in zip(sources, counted)]
        if test and counted[-1] != counted[0]:
            lines.append(f"test: {test.rows.source}, {counted[-1]}")
        for key in ("assistant_only_loss", "completion_only_loss"):
            setattr(training, key, any(getattr(each.training, key) for each in sources))
            # of images, TRL's collator counts all rows alike
            if test and isinstance(tokenizer, ProcessorMixin) and vars(test.training)[key] != vars(training)[key]:
                raise ConfigError(
                    f"{key}: with images, test rows have to be of the format of the training rows; set it"
                )
        return lines

    def joined(self, sources: list[DataSource], mixture: Mixture) -> Dataset | IterableDataset:
        """Data sets are mixed when they are tokenized, each by its format. TRL looks at the rows of one."""
        if isinstance(sources[0].form, ImageFormat):  # of which TRL tokenizes each batch
            return super().joined(sources, mixture)
        return next((each for each in sources if each.training.assistant_only_loss), sources[0]).data

    def load_model(self, arguments: TrlArguments, training: Any, data: Data) -> PreTrainedModel:
        if data.has_images:
            kind = (AutoModelForImageTextToText, "a model of images and texts")
            return load_language_model(arguments, training, data.processing_class.tokenizer, *kind)
        model = super().load_model(arguments, training, data)
        if training.padding_free or training.packing and training.packing_strategy != "wrapped":
            check_packing(model)
        return model

    def make_trainer(self, model: nn.Module, arguments: TrlArguments, training: Any, data: Data) -> Any:
        trainer = super().make_trainer(model, arguments, training, data)
        data.notes += trainer.notes
        data.sample = _shown(trainer.sample, data.processing_class)
        return trainer

    def parts(self, arguments: TokenArguments, training: Any, data: Data) -> dict[str, Any]:
        of_rows = {name: data.extra[name] for name in ("sources", "test_source", "mixture")}
        return {**of_rows, "more_metrics": metrics_of(arguments.compute_metrics)}

    def auto_class(self, config: PretrainedConfig) -> Any:
        # whether rows have images is not known, and the model of a run with images holds more
        return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


class Pretrain(Sft):
    """Trains a language model, which may be new, on texts in blocks."""

    name = "pretrain"
    Arguments = PretrainArguments
    defaults: ClassVar[Mapping[str, Any]] = {"packing": True, "packing_strategy": "wrapped"}
    format_names = PLAIN

    def load_processing_class(self, rows: Rows, arguments: TrlArguments) -> ProcessingClass:
        return load_tokenizer(arguments)

    def format_of(self, rows: Rows, arguments: TrlArguments, training: Any, tokenizer: ProcessingClass) -> Format:
        return replace(super().format_of(rows, arguments, training, tokenizer), refuses=())

    def auto_class(self, config: PretrainedConfig) -> Any:
        return AutoModelForCausalLM


def _settled(source: DataSource, tokenizer: ProcessingClass, given: Any) -> str:
    """Settles what the loss counts of the rows of one data set, and says it; refuses a setting that does not fit."""
    form: Any = source.form
    training = source.training = copy(given)
    columns = ", ".join(form.columns)
    for key in ("packing", "padding_free"):
        if getattr(training, key) and isinstance(tokenizer, ProcessorMixin):
            raise ConfigError(f"{key}: rows with images stay rows of their own; leave it out")
    completion, assistant = MASKS
    if training.completion_only_loss and not {"completion", completion}.intersection(form.gives):
        raise ConfigError(f"completion_only_loss: rows of {columns} have no prompt; leave it out")
    if training.assistant_only_loss and not form.is_chat:
        raise ConfigError(f"assistant_only_loss: rows of {columns} have no messages; leave it out")
    if training.assistant_only_loss is None:
        training.assistant_only_loss = form.counts == "assistant"
    if training.assistant_only_loss:
        _check_marks(tokenizer)
    if training.completion_only_loss is None:  # TRL would count all of rows that are tokenized
        training.completion_only_loss = form.counts == "completion"
    counted = ["what the labels say"] * (LABELS in form.gives)
    counted += ["what the assistant says"] * (training.assistant_only_loss or assistant in form.gives)
    counted += ["the completion"] * (form.counts == "completion" and training.completion_only_loss)
    return f"format {form.name}; the loss counts {' in '.join(counted) or 'all tokens'}"


def _check_marks(tokenizer: ProcessingClass) -> None:
    """Refuses a chat template in which TRL cannot tell what the assistant says."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        remedy = "" if isinstance(tokenizer, ProcessorMixin) else f"{DEFAULT}, or "
        raise ConfigError(
            "assistant_only_loss: the chat template does not mark what the assistant says with {% generation %}, and "
            f"TRL has no copy of it that does; give --chat_template_path {remedy}a file that marks it, or "
            "--assistant_only_loss false"
        ) from error
