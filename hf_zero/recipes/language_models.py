"""Language models: the keys that say which one is loaded and how, and loading it."""

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes import loading
from hf_zero.recipes.loading import quiet, resolve_model
from hf_zero.recipes.lora import QuantizationArguments, quantization_of
from hf_zero.recipes.tasks import SourceArguments
from hf_zero.trainer import ZeroTrainingArguments


DTYPES = ("float32", "bfloat16", "float16", "auto")


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


def check_dtype(arguments: LoadArguments) -> None:
    """Refuses a dtype that there is not.

    Raises:
        ConfigError: naming those that there are.
    """
    if arguments.dtype not in DTYPES:
        raise ConfigError(f"dtype {arguments.dtype!r}: expected one of {', '.join(DTYPES)}")


def load_tokenizer(arguments: SourceArguments) -> PreTrainedTokenizerBase:
    """The model's tokenizer, as `loading.load_tokenizer` gives it.

    Raises:
        ConfigError: it does not load, or has no such token.
    """
    path = resolve_model(arguments.model_name_or_path)
    return _with_end(path, loading.load_tokenizer(path, arguments.model_revision))


def _with_end(path: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token is None:
        raise ConfigError(f"{path}: its tokenizer has no eos_token, with which texts are to end; set one and save it")
    return tokenizer


def config_of(arguments: SourceArguments) -> PretrainedConfig:
    """The config of the model that the arguments name.

    Raises:
        ConfigError: it does not load.
    """
    return loading.load_config(resolve_model(arguments.model_name_or_path), arguments.model_revision)


def takes_images(config: PretrainedConfig) -> bool:
    """Whether `AutoModelForImageTextToText` has a class for this config: the model reads images among its texts."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_processor(arguments: SourceArguments) -> ProcessorMixin:
    """The processor of a model that reads images among its texts. Its tokenizer pads as `load_tokenizer`'s does.

    Raises:
        ConfigError: the model takes no images, or its processor does not load.
    """
    path, name = resolve_model(arguments.model_name_or_path), arguments.model_name_or_path
    config = config_of(arguments)
    if not takes_images(config):
        raise ConfigError(
            f"{name}: of type {config.model_type}, which takes no images, and the rows have some; leave their column "
            "out, or give a model of images and texts"
        )
    with quiet():
        try:
            processor = AutoProcessor.from_pretrained(path, revision=arguments.model_revision)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"{path}: its processor does not load ({reason})") from error
    if not isinstance(processor, ProcessorMixin):
        raise ConfigError(f"{path}: no processor for images and texts in it; save there the one that belongs to it")
    tokenizer = _with_end(path, processor.tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


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
