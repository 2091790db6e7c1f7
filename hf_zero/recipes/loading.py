"""Folders loaded as any user would load them: with transformers and PEFT alone, quietly, errors in one line."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_peft_available

from hf_zero.checkpoint import WeightFiles, check_pretrained, class_of
from hf_zero.checkpoint.tensor_names import shortened
from hf_zero.checkpoint.weight_files import ADAPTER_WEIGHTS_NAME
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.models import resolve_model


if TYPE_CHECKING:
    from peft import PeftModel

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


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter, and not a model."""
    return (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / "config.json").is_file()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers and PEFT from reporting what we report ourselves."""
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
def one_line(folder: str | Path, what: str) -> Iterator[None]:
    """Turns whatever a library raises into one line of ours.

    Raises:
        CheckpointError: naming the folder and what was tried.
    """
    try:
        yield
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # transformers, PEFT and safetensors raise a dozen kinds
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{folder}: {what} failed ({type(error).__name__}: {reason})") from error


def ties_of(folder: Path) -> dict[str, str]:
    """The tied parameters of a folder's model, target to source, without reading a weight."""
    with one_line(folder, "building the model of its config"), quiet():
        config = AutoConfig.from_pretrained(folder)
        kind = class_of(config) or AutoModel
        with torch.device("meta"):
            model = AutoModel.from_config(config) if kind is AutoModel else kind(config)
        return dict(getattr(model, "all_tied_weights_keys", None) or {})


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A model's tokenizer; where it has no token to pad with, it pads with the one that ends texts, if any.

    Args:
        path (`str`): a folder or hub id.
        revision (`str`, *optional*): of the hub id.

    Raises:
        ConfigError: it does not load.
    """
    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{path}: its tokenizer does not load ({str(error).splitlines()[0]})") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """Loads a folder with the class of its config, and refuses what `from_pretrained` only reports.

    Args:
        folder (`Path`): the model.
        kwargs: for `from_pretrained`.

    Raises:
        CheckpointError: tensors that are missing, unexpected or of another shape, or it does not load.
    """
    with one_line(folder, "from_pretrained"), quiet():
        kind = class_of(AutoConfig.from_pretrained(folder)) or AutoModel
        model, info = kind.from_pretrained(
            folder, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    found = [
        f"{len(names)} {word} ({shortened([str(name) for name in names])})" for word, names in _reported(info) if names
    ]
    if found:
        raise CheckpointError(
            f"{folder}: tensors for {type(model).__name__}: {', '.join(found)}; "
            "save the model again, or give the config that belongs to it"
        )
    return model


def _reported(info: dict[str, Any]) -> list[tuple[str, list]]:
    mismatched = [f"{name} {list(saved)} for {list(wanted)}" for name, saved, wanted in info["mismatched_keys"]]
    return [
        ("missing", sorted(info["missing_keys"])),
        ("unexpected", sorted(info["unexpected_keys"])),
        ("of another shape", mismatched),
    ]


def adapter_config(folder: Path) -> dict[str, Any]:
    """Reads `adapter_config.json`.

    Raises:
        CheckpointError: there is none, or it is not JSON.
        ConfigError: PEFT is not installed.
    """
    if not is_peft_available():
        raise ConfigError(f"{folder}: a PEFT adapter, and PEFT is not installed; pip install 'hf-zero[peft]'")
    path = folder / ADAPTER_CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no {ADAPTER_CONFIG_NAME} in it; give the folder of a PEFT adapter")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy the folder again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a {type(content).__name__}, expected an object; copy the folder again")
    return content


def load_base(folder: Path, name: str | None) -> tuple[PreTrainedModel, str]:
    """Loads the model that an adapter belongs to.

    Args:
        folder (`Path`): the adapter.
        name (`str`, *optional*): the base model, instead of the one that the adapter names.

    Returns:
        The model, and the folder or hub id that it came from.

    Raises:
        ConfigError: no base model is named, or it is not there.
        CheckpointError: it does not load, or lacks parameters that the adapter does not bring either.
    """
    settings = adapter_config(folder)
    check_pretrained(folder)
    name = name or settings.get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"{folder}: {ADAPTER_CONFIG_NAME} names no base model; give --base_model_name_or_path")
    source = resolve_model(name, "base_model_name_or_path")
    saved = WeightFiles.read(folder, ADAPTER_WEIGHTS_NAME)
    with one_line(source, "loading the base model"), quiet():
        kind, kwargs = _base_class(settings, source, saved)
        model, info = kind.from_pretrained(source, dtype="auto", output_loading_info=True, **kwargs)
    random = [key for key in info["missing_keys"] if not any(name.endswith(f".{key}") for name in saved.file_of)]
    if random:
        raise CheckpointError(
            f"{source}: {len(random)} tensors of {type(model).__name__} are neither in it nor in the adapter "
            f"({shortened(sorted(random))}); give the base model that the adapter was trained on"
        )
    return model, source


def attach(model: nn.Module, folder: Path) -> "PeftModel":
    """Puts an adapter on its base model.

    Raises:
        CheckpointError: tensors of the adapter are missing, unexpected or of another shape.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with one_line(folder, "PeftModel.from_pretrained"), quiet():
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


def _base_class(settings: dict[str, Any], source: str, saved: WeightFiles) -> tuple[Any, dict[str, Any]]:
    mapping = settings.get("auto_mapping") or {}
    named = getattr(transformers, mapping.get("base_model_class") or "", None)
    by_task = AUTO_CLASS_OF_TASK.get(settings.get("task_type") or "")
    if named is not None:
        kind = named
    elif by_task is not None:
        kind = getattr(transformers, by_task)
    else:
        kind = class_of(AutoConfig.from_pretrained(source)) or AutoModel
    heads = [name for name in saved.file_of if name.endswith(HEADS)]
    # The number of classes is the adapter's: the base may have been no classifier at all.
    return kind, {"num_labels": saved.entry(heads[0]).shape[0]} if heads else {}
