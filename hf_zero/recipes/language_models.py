"""Language models: the keys that name one, and loading it."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import ConfigError
from hf_zero.recipes import loading
from hf_zero.recipes.loading import (
    DTYPES,
    LoadedIn,
    check_model,
    load_config,
    loaded,
    reason_of,
    resolve_config,
    resolve_model,
)
from hf_zero.recipes.lora import QuantizationArguments, quantization_of
from hf_zero.recipes.parser import option
from hf_zero.recipes.tasks import SourceArguments


if TYPE_CHECKING:  # importing it takes seconds, and a plan does not need it
    from hf_zero.trainer import ZeroTrainingArguments

CAUSAL = "a causal language model"
PACKABLE = ("full_attention", "sliding_attention", "chunked_attention")  # layers that a mask keeps apart


@dataclass
class LoadArguments(QuantizationArguments, SourceArguments):
    """Keys of the language model."""

    dtype: LoadedIn = option("float32", "Dtype of the parameters that the optimizer updates; --bf16 computes in bf16.")
    attn_implementation: str | None = option(
        None, "Attention implementation: sdpa, eager, flash_attention_2, ... Default: the model's."
    )


@dataclass
class NewModelArguments(LoadArguments):
    """Keys of a task that may train a new model, under the names of transformers' `run_clm.py`."""

    config_name: str | None = option(
        None,
        "Config (file, folder or Hub id) of a new model with random weights, instead of model_name_or_path.",
    )
    config_overrides: str | None = option(None, "Changes to this config, such as num_hidden_layers=4,hidden_size=256.")
    tokenizer_name: str | None = option(None, "Tokenizer of the new model (folder or Hub id).")


def named_model(arguments: SourceArguments) -> tuple[str, str]:
    """Returns the key that names the model, or the config of a new one, and its value."""
    if isinstance(arguments, NewModelArguments) and arguments.config_name:
        return "config_name", arguments.config_name
    return "model_name_or_path", arguments.model_name_or_path or ""


def check_language_model(arguments: Any) -> None:
    """Refuses a model that does not exist, a new model that cannot be made, and keys that contradict each other."""
    check_source(arguments)
    if named_model(arguments)[0] == "config_name":
        _check_new(arguments)
    else:
        check_model(arguments)


def check_source(arguments: Any) -> None:
    """Refuses keys of a new model together with keys of a saved one."""
    if named_model(arguments)[0] != "config_name":
        for name in ("config_overrides", "tokenizer_name"):
            if getattr(arguments, name, None):
                raise ConfigError(f"{name}: is that of a new model; give config_name too, or leave it out")
        return
    for name in ("model_name_or_path", "model_revision"):
        if value := getattr(arguments, name):
            raise ConfigError(f"config_name and {name} {value!r}: a new model has random weights; give one of them")
    if arguments.use_peft:
        raise ConfigError("use_peft: an adapter is trained on a model with weights, and config_name makes a new one")


def _check_new(arguments: Any) -> None:
    if not arguments.tokenizer_name:
        raise ConfigError("tokenizer_name: not set; name the tokenizer of the new model, a folder or hub id")
    tokenizer, config = load_tokenizer(arguments), config_of(arguments)
    size, found = getattr(config.get_text_config(), "vocab_size", None), len(tokenizer)
    if size is not None and found > size:
        raise ConfigError(
            f"tokenizer_name {arguments.tokenizer_name}: has {found} tokens, the new model {size}; give "
            f"--config_overrides vocab_size={found}, or more"
        )
    options = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    with loaded(f"config_name {arguments.config_name}", f"does not load as {CAUSAL}"):
        _new_model(AutoModelForCausalLM, config, tokenizer, arguments.dtype, **options)


def load_tokenizer(arguments: SourceArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, as `loading.load_tokenizer` does. Raises [`ConfigError`] if no token of it
    ends texts."""
    if not isinstance(arguments, NewModelArguments) or not arguments.tokenizer_name:
        path = resolve_model(arguments.model_name_or_path)
        return _with_end(path, loading.load_tokenizer(path, arguments.model_revision))
    path = str(Path(arguments.tokenizer_name).expanduser())
    try:
        tokenizer = loading.load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"tokenizer_name {error}; give the folder or hub id of a tokenizer") from error
    return _with_end(f"tokenizer_name {path}", tokenizer)


def _with_end(path: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if tokenizer.eos_token is None:
        raise ConfigError(f"{path}: its tokenizer has no eos_token, with which texts are to end; set one and save it")
    return tokenizer


def config_of(arguments: SourceArguments, resolve: Callable[[str], str] = resolve_model) -> PretrainedConfig:
    """Returns the config of the model that the arguments name, or of a new one."""
    key, name = named_model(arguments)
    if key != "config_name":
        return load_config(resolve(name), arguments.model_revision)
    path = resolve_config(name, key)
    config, overrides = load_config(path), getattr(arguments, "config_overrides", None)
    if overrides:
        config = _changed(config, path, overrides)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)  # it says how weights are stored, and there are none
    config._name_or_path = ""  # or the model would pass for one that was fine-tuned
    return config


def _changed(config: PretrainedConfig, path: str, overrides: str) -> PretrainedConfig:
    """Returns the config as if its file had the overrides, so that values derived from them follow."""
    num_layers = getattr(config, "num_hidden_layers", None)

    def is_per_layer(key: str, value: Any) -> bool:  # such as `layer_types` and `no_rope_layers`
        return ("layer" in key or key.endswith("_types")) and isinstance(value, list) and len(value) == num_layers

    try:
        config.update_from_string(overrides)  # which knows the kind of each value
        keys = [pair.partition("=")[0] for pair in overrides.split(",")]
        stored, _ = PretrainedConfig.get_config_dict(path)
        if num_layers != getattr(config, "num_hidden_layers", None):
            stored = {key: value for key, value in stored.items() if not is_per_layer(key, value)}
        changed = {config.attribute_map.get(key, key): getattr(config, key) for key in keys}
        return type(config).from_dict({**stored, **changed})
    except Exception as error:  # each class of configs computes with what it is given
        is_value = isinstance(error, StrictDataclassError)
        remedy = "give what such a model can have" if is_value else "write key=value,key=value with keys of its config"
        raise ConfigError(f"config_overrides {overrides!r}: {reason_of(error).rstrip('.')}; {remedy}") from error


def takes_images(config: PretrainedConfig) -> bool:
    """Whether `AutoModelForImageTextToText` has a class for this config: the model accepts texts with images."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_processor(arguments: SourceArguments) -> ProcessorMixin:
    """Loads the processor of a model of images and texts. Raises [`ConfigError`] if the model takes no images, or its
    processor does not load."""
    path, name = resolve_model(arguments.model_name_or_path), arguments.model_name_or_path
    config = config_of(arguments)
    if not takes_images(config):
        raise ConfigError(
            f"{name}: of type {config.model_type}, which takes no images, and the rows have some; leave their column "
            "out, or give a model of images and texts"
        )
    with loaded(path, "its processor does not load"):
        processor = AutoProcessor.from_pretrained(path, revision=arguments.model_revision)
    if not isinstance(processor, ProcessorMixin):
        raise ConfigError(f"{path}: no processor for images and texts in it; save there the one that belongs to it")
    tokenizer = _with_end(path, processor.tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def load_language_model(
    arguments: LoadArguments,
    training: "ZeroTrainingArguments",
    tokenizer: PreTrainedTokenizerBase,
    auto_class: type = AutoModelForCausalLM,
    what: str = CAUSAL,
    **options: Any,
) -> PreTrainedModel:
    """Loads a language model without data: its weights stay in their files, and those of a new model are drawn when it
    is sharded. Raises [`ConfigError`] if it does not load as `what`, or does not fit the tokenizer.

    In a new model the input row of the token that ends or begins texts is learned where that token pads too: in models
    with an attention mask padding itself has no gradients, since nothing attends to it and no loss counts it. A saved
    model trains as transformers loads it.
    """
    key, path = named_model(arguments)
    options |= {"dtype": arguments.dtype}
    if arguments.model_revision:
        options["revision"] = arguments.model_revision
    if arguments.attn_implementation:
        options["attn_implementation"] = arguments.attn_implementation
    compute = "bfloat16" if training.bf16 else "float16" if training.fp16 else arguments.dtype
    if (quantization := quantization_of(arguments, compute)) is not None:
        options["quantization_config"] = quantization
    config = config_of(arguments)
    if auto_class is AutoModelForCausalLM and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and takes_images(config):
        auto_class = AutoModelForImageTextToText  # which learns texts, too
    with loaded(path, f"does not load as {what}"):
        if key == "config_name":
            model = _new_model(auto_class, config, tokenizer, **options)
        else:
            model = load_pretrained(auto_class, resolve_model(path), **options)
    check_vocabulary(model, path, tokenizer)
    embeddings = model.get_input_embeddings()
    pads = getattr(embeddings, "padding_idx", None)
    if key == "config_name" and pads in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        embeddings.padding_idx = None  # with which the row would begin at zero, and stay as it is
    return model


def _new_model(
    auto_class: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, dtype: str, **options: Any
) -> PreTrainedModel:
    """Makes a model without data, which gets its random weights when it is sharded."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.get_text_config(), name, getattr(tokenizer, name))
    kind = (config.dtype or torch.float32) if dtype == "auto" else DTYPES[dtype]
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=kind, **options)


def check_vocabulary(model: PreTrainedModel, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with more tokens than the model has embeddings."""
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_embeddings:
        raise ConfigError(
            f"{name}: its tokenizer has {len(tokenizer)} tokens, the model {num_embeddings}; "
            "give the tokenizer that belongs to it"
        )


def check_packing(model: PreTrainedModel) -> None:
    """Refuses a model in whose layers packed rows would attend to each other."""
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
