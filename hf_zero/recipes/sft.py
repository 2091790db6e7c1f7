"""The tasks that TRL's `SFTTrainer` trains: `sft`, on prompts, chats or texts, and `pretrain`, on texts in blocks."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value
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
from trl.chat_template_utils import get_training_chat_template, is_chat_template_stop_token_trained
from trl.data_utils import common_prefix_length

from hf_zero.compat import check_overrides
from hf_zero.errors import ConfigError
from hf_zero.recipes.data.formats import (
    FORMAT_NAMES,
    LABELS,
    MASKS,
    TEMPLATE_KWARGS,
    TOKENIZED,
    TOKENS,
    UNTRAINED,
    Format,
    FormatName,
    recognise,
)
from hf_zero.recipes.data.images import check_pillow, has_images, image_column, with_images, with_pixels
from hf_zero.recipes.data.rows import IGNORED, BadRow, Data, Rows, plural
from hf_zero.recipes.data.templates import DEFAULT, apply_template, check_rendered
from hf_zero.recipes.models import (
    NewModelArguments,
    check_packing,
    config_of,
    load_language_model,
    load_processor,
    takes_images,
    tokenizer_of,
)
from hf_zero.recipes.parser import option
from hf_zero.recipes.trl_task import ProcessingClass, TrlArguments, TrlTask
from hf_zero.recipes.user_code import check_function, metrics_of
from hf_zero.trl import ZeroSFTTrainer


REPEATED = re.compile(r"(<[^<>]+>)\1{3,}")  # the tokens of an image
PLAIN = ("text", TOKENIZED)  # formats of `pretrain`
FEATURES = Features({TOKENS: List(Value("int32")), LABELS: List(Value("int64"))})  # as TRL keeps them
Metrics = Callable[[EvalPrediction], Mapping[str, float]]


@dataclass
class TokenArguments(TrlArguments):
    """Keys of `sft` and `pretrain` beside the configuration of their trainer."""

    compute_metrics: str | None = option(
        None,
        "file.py:function. Receives an EvalPrediction with sums per test row or packed sequence (loss, entropy, "
        "correct tokens; labels: counted tokens) and returns a dict of additional metrics.",
    )


@dataclass
class SftArguments(TokenArguments):
    """Keys of `sft` beside the configuration of its trainer."""

    dataset_format: FormatName | None = option(
        None, f"One of {', '.join(FORMAT_NAMES)}. Default: detected from the columns."
    )


@dataclass
class PretrainArguments(NewModelArguments, TokenArguments):
    """Keys of `pretrain` beside the configuration of its trainer."""


@dataclass(frozen=True)
class Encoder:
    """Makes the token ids and labels of a row, as `SFTTrainer` makes them: a chat is rendered once."""

    form: Format
    tokenizer: PreTrainedTokenizerBase
    assistant_only: bool  # whether the loss counts the messages of the assistant alone
    completion_only: bool
    template: str | None  # a chat template in place of the tokenizer's: TRL's copy of it that marks the assistant

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Encodes a row. Raises [`BadRow`] if it is malformed, or the loss would count none of its tokens."""
        values = self.form.read(row)
        if self.form.name == TOKENIZED:
            tokens = values
        elif self.form.is_chat:
            tokens = self._of_chat(values)
        elif "prompt" in values:
            prompt = self.tokenizer(values["prompt"])[TOKENS]
            tokens = _completed(prompt, self.tokenizer(values["prompt"] + self._ended(values["completion"])))
        else:
            tokens = self.tokenizer(self._ended(values["text"]))
        if LABELS in tokens:
            return {TOKENS: tokens[TOKENS], LABELS: tokens[LABELS]}
        completion, assistant = MASKS
        names = [completion] * self.completion_only + [assistant]
        masks = [tokens[name] for name in names if name in tokens]
        labels = [token if all(bits) else IGNORED for token, *bits in zip(tokens[TOKENS], *masks)]
        return {TOKENS: tokens[TOKENS], LABELS: labels}

    def _ended(self, text: str) -> str:
        """Returns a text with the token that ends it."""
        return text if text.endswith(self.tokenizer.eos_token) else text + self.tokenizer.eos_token

    def _of_chat(self, values: dict[str, Any]) -> dict[str, Any]:
        """Renders and tokenizes a chat, and marks the completion or the messages of the assistant."""
        (chat,), tools, settings = self.form.chats_of(values), values["tools"], values[TEMPLATE_KWARGS]
        options = {"chat_template": self.template, "tools": tools, "return_dict": True, **settings}
        marks = {"return_assistant_tokens_mask": True} if self.assistant_only else {}
        found = dict(apply_template(self.tokenizer, chat, **options, **marks))
        text = self.tokenizer.decode(found[TOKENS])
        check_rendered(self.tokenizer, chat, tools, text, {"chat_template": self.template, **settings})
        if "prompt" in values:
            options["add_generation_prompt"] = True
            prompt = apply_template(self.tokenizer, values["prompt"], **options)[TOKENS]
            found = {**found, **_completed(prompt, found)}
        untrained = values.get(UNTRAINED)
        if self.assistant_only:
            found[MASKS[1]] = _without(found[MASKS[1]], chat, untrained or ())
        elif untrained:
            raise BadRow("a message of the assistant has weight 0, which needs assistant_only_loss")
        return found


def _completed(prompt: list[int], whole: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Marks the completion: it begins where the tokens differ from those of the prompt alone."""
    start, length = common_prefix_length(prompt, whole[TOKENS]), len(whole[TOKENS])
    return {TOKENS: whole[TOKENS], MASKS[0]: [0] * start + [1] * (length - start)}


def _without(mask: list[int], chat: list[dict[str, Any]], untrained: Iterable[int]) -> list[int]:
    """Returns the mask of the assistant's messages without some of them. They are the runs of ones, in order."""
    if 1 not in mask:
        raise BadRow("the chat template marks no message of the assistant, and assistant_only_loss counts those alone")
    runs, num_messages = counted_runs(mask), sum(turn["role"] == "assistant" for turn in chat)
    if untrained and len(runs) != num_messages:
        raise BadRow(
            f"a message of the assistant has weight 0, and the chat template marks {len(runs)} parts as the "
            f"assistant's, of {num_messages} messages; give a template that marks each"
        )
    kept = [*mask]
    for number in untrained:
        kept[runs[number].start : runs[number].stop] = [0] * len(runs[number])
    return kept


def counted_runs(counts: Iterable[bool | int]) -> list[range]:
    """Returns the runs of tokens that count, in order."""
    runs, start = [], 0
    for counts_here, group in groupby(map(bool, counts)):
        stop = start + sum(1 for _ in group)
        runs += [range(start, stop)] if counts_here else []
        start = stop
    return runs


class TokenMeanSFTTrainer(ZeroSFTTrainer):
    """A `ZeroSFTTrainer` whose losses are means over tokens, whatever the model.

    That of a step is the mean over all tokens that count in all its micro-batches on all ranks. `eval_loss` is the
    mean over all those of the test rows: TRL's is a mean of means over batches, and depends on how large they are.
    """

    data_collator: Callable

    def __init__(self, *args: Any, more_metrics: Metrics, **kwargs: Any):
        super().__init__(*args, compute_metrics=partial(token_means, more=more_metrics), **kwargs)
        self.model_accepts_loss_kwargs = True  # the loss is TRL's, which divides by the tokens of the whole step
        if self._is_vision_dataset:  # whose rows TRL tokenizes when it makes a batch
            self.data_collator = partial(with_pixels, self.data_collator)

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


check_overrides(TokenMeanSFTTrainer, SFTTrainer, ("get_eval_dataloader", "prediction_step"))


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


def _shown(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a row as it was tokenized, with the tokens that the loss counts between ⟦ and ⟧."""
    pieces = []
    for label_counts, tokens in groupby(zip(row[TOKENS], row[LABELS]), key=lambda pair: pair[1] != IGNORED):
        text = tokenizer.decode([token for token, _ in tokens])
        pieces.append(f"⟦{text}⟧" if label_counts else text)
    return REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1])}", "".join(pieces))


class Sft(TrlTask):
    """Fine-tunes a language model on rows in several formats, which decide what the loss counts."""

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
        if (training["dataset_kwargs"] or {}).get("skip_prepare_dataset"):
            raise ConfigError("dataset_kwargs: rows with input_ids are known to be tokenized; leave it out")
        if training["eval_packing"] and not training["packing"]:  # TRL would then let the test rows see each other
            raise ConfigError("eval_packing: test rows are packed as training rows are; add --packing")

    def load_processing_class(self, rows: list[Rows], arguments: TrlArguments) -> ProcessingClass:
        may_follow = any(map(image_column, rows)) and takes_images(config_of(arguments))
        if not any(map(has_images, rows)) and not may_follow:
            return super().load_processing_class(rows, arguments)
        check_pillow()
        return load_processor(arguments)

    def format_of(self, rows: Rows, arguments: TrlArguments, training: Any, tokenizer: ProcessingClass) -> Format:
        name = getattr(arguments, "dataset_format", None)
        vocab_size = len(getattr(tokenizer, "tokenizer", tokenizer))
        form = recognise(rows, (name,) if name else self.format_names, training.dataset_text_field, vocab_size)
        return with_images(form, rows) if isinstance(tokenizer, ProcessorMixin) else form

    def encoder(self, form: Format, tokenizer: ProcessingClass, training: Any) -> tuple[Callable, Features, str]:
        """Decides what the loss counts: as set, or as the format distinguishes it. Refuses settings that do not
        fit."""
        assistant, completion = training.assistant_only_loss, training.completion_only_loss
        columns = ", ".join(form.columns)
        if completion and not {"completion", MASKS[0]}.intersection(form.gives):
            raise ConfigError(f"completion_only_loss: rows of {columns} have no prompt; leave it out")
        if assistant and not form.is_chat:
            raise ConfigError(f"assistant_only_loss: rows of {columns} have no messages; leave it out")
        assistant = form.counts == "assistant" if assistant is None else assistant
        completion = form.counts == "completion" if completion is None else completion
        counted = ["what the labels say"] * (LABELS in form.gives)
        counted += ["what the assistant says"] * (assistant or MASKS[1] in form.gives)
        counted += ["the completion"] * (form.counts == "completion" and completion)
        note = f"format {form.name}; the loss counts {' in '.join(counted) or 'all tokens'}"
        template = _marking_template(tokenizer) if assistant else None
        if assistant and not is_chat_template_stop_token_trained(tokenizer, chat_template=template):
            note += ", without the end of a turn, which the chat template does not mark"
        if not isinstance(tokenizer, ProcessorMixin):
            return Encoder(form, tokenizer, assistant, completion, template), FEATURES, note
        for key in ("packing", "padding_free"):
            if getattr(training, key):
                raise ConfigError(f"{key}: rows with images stay rows of their own; leave it out")
        # of images, TRL's collator counts all rows alike
        training.assistant_only_loss, training.completion_only_loss = assistant, completion
        function, features, _ = super().encoder(form, tokenizer, training)
        return function, features, note

    def load_model(self, arguments: TrlArguments, training: Any, data: Data) -> PreTrainedModel:
        if data.has_images:
            kind = (AutoModelForImageTextToText, "a model of images and texts")
            return load_language_model(arguments, training, data.processing_class.tokenizer, *kind)
        model = super().load_model(arguments, training, data)
        if training.padding_free or training.packing and training.packing_strategy != "wrapped":
            check_packing(model)
        return model

    def make_trainer(self, model: nn.Module, arguments: TrlArguments, training: Any, data: Data) -> Any:
        if not data.has_images:
            training.assistant_only_loss = False  # labels say it, and TRL would look for messages
        trainer = super().make_trainer(model, arguments, training, data)
        first = next(iter(data.train if training.packing else trainer.train_dataset), None)
        if first is None:
            raise self.no_row_fits(training, data)
        if data.has_images:
            first = {name: ids[0].tolist() for name, ids in trainer.data_collator([first]).items() if name in FEATURES}
        shown = {name: first[name][: training.max_length] for name in FEATURES}
        data.sample = _shown(shown, data.processing_class)
        packs_test = training.packing if training.eval_packing is None else training.eval_packing
        for split, rows, prepared, packs in (
            ("train", data.train, trainer.train_dataset, training.packing),
            ("test", data.test, trainer.eval_dataset, packs_test),
        ):
            if isinstance(rows, Dataset) and not data.has_images:
                notes = _token_notes(rows, prepared, training.max_length, is_packed=packs)
                data.notes += [f"{split}: {note}" for note in notes]
        return trainer

    def parts(self, arguments: TokenArguments, training: Any, data: Data) -> dict[str, Any]:
        return {"more_metrics": metrics_of(arguments.compute_metrics)}

    def auto_class(self, config: PretrainedConfig) -> Any:
        # whether rows have images is not known, and the model of a run with images holds more
        return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


class Pretrain(Sft):
    """Pretrains a language model, from scratch or from existing weights, on texts that are split into blocks."""

    name = "pretrain"
    Arguments = PretrainArguments
    defaults: ClassVar[Mapping[str, Any]] = {"packing": True, "packing_strategy": "wrapped"}
    format_names = PLAIN

    def load_processing_class(self, rows: list[Rows], arguments: TrlArguments) -> ProcessingClass:
        return tokenizer_of(arguments)

    def auto_class(self, config: PretrainedConfig) -> Any:
        return AutoModelForCausalLM


def _marking_template(tokenizer: ProcessingClass) -> str | None:
    """Returns TRL's copy of a chat template that marks the messages of the assistant; `None` if the template itself
    does. Raises [`ConfigError`] if there is none."""
    try:
        return get_training_chat_template(tokenizer)
    except ValueError as error:
        remedy = "" if isinstance(tokenizer, ProcessorMixin) else f"{DEFAULT}, or "
        raise ConfigError(
            "assistant_only_loss: the chat template does not mark what the assistant says with {% generation %}, and "
            f"TRL has no copy of it that does; give --chat_template_path {remedy}a file that marks it, or "
            "--assistant_only_loss false"
        ) from error


def _token_notes(rows: Dataset, prepared: Dataset, max_length: int | None, *, is_packed: bool) -> list[str]:
    """Returns lines about what TRL made of rows of tokens: how many it packed or dropped, and how many tokens."""
    (before, _), (after, counted) = _num_tokens(rows), _num_tokens(prepared)
    notes = [f"{plural(after, 'token')}, of which the loss counts {counted:,}"]
    if after < before:
        notes.insert(0, f"{plural(before - after, 'token')} lost, of rows longer than {max_length} tokens")
    if is_packed:
        sequences = plural(len(prepared), "sequence")
        notes.append(f"{plural(len(rows), 'row')} packed into {sequences} of up to {max_length} tokens")
    elif lost := len(rows) - len(prepared):
        notes.insert(0, f"{plural(lost, 'row')} left out, of which the loss counts none of the {max_length} tokens")
    return notes


def _num_tokens(rows: Dataset) -> tuple[int, int]:
    """Returns the number of tokens, and of those with labels."""
    total = counted = 0
    for table in rows.select_columns(LABELS).with_format("arrow").iter(batch_size=10_000):
        labels = table[LABELS].combine_chunks().flatten()
        total += len(labels)
        counted += pc.sum(pc.not_equal(labels, IGNORED)).as_py() or 0
    return total, counted
