"""A model with a head for the classes, loaded before the training, and again after it to see what was saved."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from hf_zero.checkpoint import load_pretrained
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.labelled import Classes, Images, Texts
from hf_zero.recipes.loading import attach, is_adapter, load_base, loaded


NUM_VERIFIED = 64  # test rows that the reloaded model has to predict alike


def load_classifier(
    path: str, inputs: Texts | Images, classes: Classes, *, revision: str | None = None
) -> PreTrainedModel:
    """Loads a model with a head for these classes, a new one unless the model has one of that size. Its weights are
    still in files, in fp32.

    That the head is new is what we are here for, so transformers' report of it is left out. Raises [`ConfigError`]
    where it does not load as a classifier, and [`CheckpointError`] where weights of the base model are missing or of
    other shapes.
    """
    where = {"revision": revision} if revision else {}
    with loaded(path, f"does not load for {inputs.task}"):
        model, info = load_pretrained(
            inputs.auto_class,
            path,
            allow_missing=[f"{_base_prefix(path, inputs, where)}.pooler"],  # which language models come without
            dtype=torch.float32,
            num_labels=len(classes.names),
            id2label=dict(enumerate(classes.names)),
            label2id={name: number for number, name in enumerate(classes.names)},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **where,
        )
    _refuse_other_base(path, model, info)
    if isinstance(inputs, Texts):
        model.config.pad_token_id = inputs.processor.pad_token_id
    return model


def head_of(model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules with parameters that a classifier has beside its base model."""
    beside = [(name, child) for name, child in model.named_children() if name != model.base_model_prefix]
    return [name for name, child in beside if any(True for _ in child.parameters())]


def _base_prefix(path: str, inputs: Texts | Images, where: dict[str, str]) -> str:
    """Returns the prefix of the base model's parameters in the classifier."""
    config = AutoConfig.from_pretrained(path, **where)
    kind = inputs.classifiers.get(type(config), None)
    if kind is None:
        raise ConfigError(f"{path}: of type {config.model_type}, with which transformers does no {inputs.task}")
    return (kind[0] if isinstance(kind, tuple) else kind).base_model_prefix


def _refuse_other_base(path: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuses a base model of another shape. Only the head may have another shape."""
    prefix = f"{model.base_model_prefix}."
    for name, found, wanted in sorted(info["mismatched_keys"]):
        if name.startswith(prefix):
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(found)}, the model's has {list(wanted)}; give the config "
                "that was saved with it"
            )


def verify(folder: str, inputs: Texts | Images, test: Dataset, predicted: np.ndarray) -> str:
    """Loads the folder, its processor too, as any user would, without hf_zero, and compares it with the logits that
    the trainer predicted, [rows, classes]."""
    num_rows = min(NUM_VERIFIED, len(test))
    inputs.load_processor(folder)
    loader = "PEFT" if is_adapter(Path(folder)) else f"{inputs.auto_class.__name__}.from_pretrained"
    with torch.no_grad():
        logits = _reloaded(folder, inputs)(**inputs.batch(test.select(range(num_rows)))).logits.numpy()
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


def _reloaded(folder: str, inputs: Texts | Images) -> nn.Module:
    if is_adapter(Path(folder)):
        base, _ = load_base(Path(folder), None)
        return attach(base.float(), Path(folder)).eval()
    return inputs.auto_class.from_pretrained(folder, dtype=torch.float32).eval()
