"""What the tasks that train a language model to predict the next token have in common."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import CheckpointError, ConfigError, DataError
from hf_zero.recipes import loading
from hf_zero.recipes.artifacts import usage_command
from hf_zero.recipes.data import Data, Rows, check_sources
from hf_zero.recipes.data.chat import read_template
from hf_zero.recipes.data.formats import TEXT_COLUMN
from hf_zero.recipes.data.packing import Collate, pack
from hf_zero.recipes.data.sources import Stream, shuffled
from hf_zero.recipes.data.tokens import IGNORED, sample_of
from hf_zero.recipes.loading import check_model, check_positions, quiet, resolve_model
from hf_zero.recipes.lora import (
    AdapterArguments,
    QuantizationArguments,
    adapt,
    check_adapter,
    check_quantization,
    quantization_of,
)
from hf_zero.recipes.measured import Watch
from hf_zero.recipes.tasks import CommonArguments, SampleArguments, SourceArguments
from hf_zero.trainer import ZeroTrainer, ZeroTrainingArguments


DTYPES = ("float32", "bfloat16", "float16", "auto")
PACKABLE = ("full_attention", "sliding_attention", "chunked_attention")  # layers that a mask keeps apart


@dataclass
class LoadArguments(QuantizationArguments, SourceArguments):
    """Which language model is loaded, and how."""

    dtype: str = field(
        default="float32",
        metadata={"help": "Of the parameters that the optimizer updates; --bf16 computes in bf16 all the same."},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Such as sdpa, eager or flash_attention_2; by default the model's own."}
    )


@dataclass
class TemplateArguments:
    """How chats are rendered."""

    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "A Jinja file, or default for ours, in place of the tokenizer's own chat template."},
    )


@dataclass
class CausalArguments(SampleArguments, AdapterArguments, LoadArguments, CommonArguments):
    """Keys of `sft` and `pretrain`, beside those of all tasks."""

    dataset_text_field: str = field(default=TEXT_COLUMN, metadata={"help": "The column that holds texts."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "How many processes tokenize."})
    packing: bool = field(
        default=False, metadata={"help": "Several rows share a sequence of max_length tokens, none sees another."}
    )


def check(arguments: CausalArguments, training: Mapping[str, Any]) -> None:
    """Refuses what cannot work, before a process is started.

    Raises:
        ConfigError: If the model is missing, or settings contradict each other.
        DataError: If a file is missing.
        CheckpointError: If the weights are truncated.
    """
    check_sources(arguments)
    check_adapter(arguments)
    check_quantization(arguments, use_peft=arguments.use_peft)
    if arguments.max_length < 2:
        raise ConfigError(f"max_length {arguments.max_length}: expected 2 or more")
    check_dtype(arguments)
    if arguments.packing and arguments.dataset_streaming:
        raise ConfigError("packing: takes all rows to be known, so it cannot be had with dataset_streaming")
    check_stream(arguments, training)
    check_model(arguments)
    check_positions(arguments, arguments.max_length)


def check_dtype(arguments: LoadArguments) -> None:
    """Refuses a dtype that there is not.

    Raises:
        ConfigError: naming those that there are.
    """
    if arguments.dtype not in DTYPES:
        raise ConfigError(f"dtype {arguments.dtype!r}: expected one of {', '.join(DTYPES)}")


def check_template(arguments: TemplateArguments) -> None:
    """Refuses a file that cannot be read.

    Raises:
        ConfigError: naming it.
    """
    if arguments.chat_template_path is not None:
        read_template(arguments.chat_template_path)


def check_stream(arguments: SourceArguments, training: Mapping[str, Any]) -> None:
    """Refuses a stream without a number of steps, for nobody knows how long it is, or with several to read it, or in
    an order for which all rows have to be known.

    `datasets` shares out the files of a stream among the workers: with fewer files some would have no rows.

    Raises:
        ConfigError: saying so.
    """
    if not arguments.dataset_streaming:
        return
    if training["max_steps"] <= 0:
        raise ConfigError("dataset_streaming: the number of rows is not known; set --max_steps")
    strategy = training["train_sampling_strategy"]
    if strategy not in ("random", "sequential"):
        raise ConfigError(
            f"train_sampling_strategy {strategy}: the lengths of a stream (dataset_streaming) are not known; give "
            "random or sequential"
        )
    if (workers := training["dataloader_num_workers"]) > 1:
        raise ConfigError(
            f"dataloader_num_workers {workers}: one worker reads a stream (dataset_streaming); set 0 or 1"
        )


def load_tokenizer(arguments: SourceArguments) -> PreTrainedTokenizerBase:
    """The model's tokenizer, as `loading.load_tokenizer` gives it.

    Raises:
        ConfigError: it does not load, or has no such token.
    """
    path = resolve_model(arguments.model_name_or_path)
    tokenizer = loading.load_tokenizer(path, arguments.model_revision)
    if tokenizer.eos_token is None:
        raise ConfigError(f"{path}: its tokenizer has no eos_token, with which texts are to end; set one and save it")
    return tokenizer


def make_data(
    arguments: CausalArguments,
    training: ZeroTrainingArguments,
    data: dict[str, Any],
    *,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    notes: list[str],
) -> Data:
    """What has been tokenized, for the trainer; packed where that is asked for.

    Args:
        arguments ([`CausalArguments`]): The parsed arguments.
        training ([`ZeroTrainingArguments`]): Of this process.
        data (`dict`): "train" and "test", with `input_ids`, `num_tokens` and perhaps `labels`; "test" may be `None`.
        rows ([`Rows`]): what "train" was made of.
        tokenizer (`PreTrainedTokenizerBase`): what made it.
        notes (`list[str]`): about all that, for the user.

    Raises:
        DataError: a stream without a row to train on.
    """
    train, test = data["train"], data["test"]
    first = next(iter(train), None)
    if first is None:
        raise DataError(f"{rows.source}: no row has a token that the loss counts; set a larger --max_length")
    sample, prompt = sample_of(first, tokenizer)
    if arguments.packing:
        train = pack(train, arguments.max_length, notes)
    else:
        train = train.remove_columns("num_tokens")
        train = Stream(shuffled(train, arguments, training)) if rows.is_stream else train
    return Data(
        train=train,
        test=None if test is None else test.remove_columns("num_tokens"),
        processing_class=tokenizer,
        collate=Collate(tokenizer.pad_token_id),
        source=rows.source,
        notes=notes,
        sample=sample,
        extra={"prompt": prompt},
    )


def load_model(arguments: CausalArguments, training: ZeroTrainingArguments, data: Data) -> nn.Module:
    """The model, its weights still in their files, and its adapter if there is to be one.

    Raises:
        ConfigError: it does not load as a language model, or does not fit the settings.
    """
    model = load_language_model(arguments, training, data.processing_class)
    if arguments.packing:
        check_packing(model)
    return adapt(model, arguments)


def load_language_model(
    arguments: LoadArguments,
    training: ZeroTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    auto_class: type = AutoModelForCausalLM,
    what: str = "a causal language model",
    **options: Any,
) -> PreTrainedModel:
    """A language model as it was saved, its weights still in their files.

    Args:
        arguments ([`LoadArguments`]): with the name of the model.
        training ([`ZeroTrainingArguments`], or those of TRL): say in which dtype is computed.
        tokenizer (`PreTrainedTokenizerBase`): whose tokens it is to know.
        auto_class (`type`): of transformers: says which head it has.
        what (`str`): what it is then, in words.
        options: for `from_pretrained`, beside those that the arguments say.

    Raises:
        ConfigError: it does not load as such a model, or does not fit the tokenizer.
    """
    path = resolve_model(arguments.model_name_or_path)
    with quiet():
        try:
            model = load_pretrained(auto_class, path, **load_options(arguments, training), **options)
        except (CheckpointError, ConfigError):
            raise
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"{path}: does not load as {what} ({reason})") from error
    check_vocabulary(model, arguments.model_name_or_path, tokenizer)
    return model


def load_options(arguments: LoadArguments, training: ZeroTrainingArguments) -> dict[str, Any]:
    """What the arguments say to `from_pretrained`, beside the name of the model."""
    options: dict[str, Any] = {"dtype": arguments.dtype}
    if arguments.model_revision:
        options["revision"] = arguments.model_revision
    if arguments.attn_implementation:
        options["attn_implementation"] = arguments.attn_implementation
    compute = "bfloat16" if training.bf16 else "float16" if training.fp16 else arguments.dtype
    if (quantization := quantization_of(arguments, compute)) is not None:
        options["quantization_config"] = quantization
    return options


def check_packing(model: PreTrainedModel) -> None:
    """Refuses a model whose layers would let the rows of one sequence see each other.

    Raises:
        ConfigError: naming the model, and what about it.
    """
    text_config = model.config.get_text_config()
    odd = set(getattr(text_config, "layer_types", None) or ()) - set(PACKABLE)
    source = inspect.getsource(sys.modules[type(model).__module__])
    if odd:
        reason = f"its layers of {min(odd)} carry a state from row to row"
    elif "position_ids" not in inspect.signature(model.forward).parameters or "create_causal_mask" not in source:
        reason = "it makes its attention mask without looking at the positions"
    else:
        return
    raise ConfigError(
        f"packing: {type(model).__name__} cannot keep the rows of a sequence apart: {reason}; leave it out"
    )


class TokenTrainer(ZeroTrainer):
    """A `ZeroTrainer` whose losses are means over tokens.

    That of a step is, with `average_tokens_across_devices`, the mean over all tokens that count in all its
    micro-batches on all ranks. `eval_loss` is the mean over all those of the test rows: `Trainer`'s own is a mean of
    means over batches, and depends on how large they are.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.model_accepts_loss_kwargs:  # its own loss would be the mean of one micro-batch
            self.compute_loss_func = partial(_summed_loss, label_smoothing=self.args.label_smoothing_factor)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "position_ids" in inputs:  # transformers looks for packed rows only where there is no cache
            inputs = {**inputs, "use_cache": False}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple:
        """Gives, in place of logits, the sum of the losses of each row and the number of its tokens that count."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
            sums = [
                cross_entropy(row[:-1].float(), label[1:], ignore_index=IGNORED, reduction="sum")
                for row, label in zip(logits, labels, strict=True)
            ]
        counts = (labels[:, 1:] != IGNORED).sum(dim=1)
        return None, torch.stack([torch.stack(sums), counts.float()], dim=1), counts


def _summed_loss(
    outputs: ModelOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    total = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    return total / num_items_in_batch


def mean_token_loss(predictions: EvalPrediction) -> dict[str, float]:
    """The mean over tokens of what `TokenTrainer.prediction_step` gives, as the metric "loss"."""
    total, count = predictions.predictions.sum(axis=0, dtype="float64")
    return {"loss": float(total / max(count, 1))}


def make_trainer(
    model: nn.Module, arguments: CausalArguments, training: ZeroTrainingArguments, data: Data
) -> TokenTrainer:
    """The trainer; nothing has been evaluated yet."""
    if arguments.dataset_streaming:  # batches differ in length, so rank 0 cannot read for all at once
        training.accelerator_config.dispatch_batches = False
    implementation = getattr(model.config, "_attn_implementation", None) or ""
    collate = replace(cast(Collate, data.collate), flatten="flash" in implementation)
    return TokenTrainer(
        model=model,
        args=training,
        data_collator=collate,
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=data.processing_class,
        compute_metrics=mean_token_loss,
    )


def before(trainer: TokenTrainer, data: Data, say: Callable[..., None]) -> None:
    """Nothing: `--eval_on_start` evaluates before training."""


def after(
    trainer: TokenTrainer, data: Data, watch: Watch, arguments: CausalArguments, say: Callable[..., None]
) -> None:
    """Says how good the model is now, and how to use it."""
    if data.test is not None:
        say(f"test loss: {trainer.evaluate()['eval_loss']:.4f} a token")
    say(f"saved to {trainer.args.output_dir}")
    say(f"try it: {usage_command(trainer.args.output_dir, data.extra['prompt'], 'text-generation')}")


def check_vocabulary(model: PreTrainedModel, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with more tokens than the model has embeddings.

    Raises:
        ConfigError: naming both numbers.
    """
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_embeddings:
        raise ConfigError(
            f"{name}: its tokenizer has {len(tokenizer)} tokens, the model {num_embeddings}; "
            "give the tokenizer that belongs to it"
        )
