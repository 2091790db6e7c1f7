"""Replacements for functions by which TRL's constructors look at weights, for weights that are still in files, and for
what sends weights to vLLM, for weights that are sharded."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.adapters import read_for_adapter
from hf_zero.checkpoint.names import named_tensors
from hf_zero.engine import gathered, materialize, placeholders
from hf_zero.engine.source import source_of


def _adapt(original, model: nn.Module, peft_config, *args, **kwargs):
    """Replaces `get_peft_model`, which puts adapters on the device where the weights seem to be."""
    read_for_adapter(model, peft_config)
    with placeholders(model):
        return original(model, peft_config, *args, **kwargs)


def _clone_template(original, model: nn.Module, *args, **kwargs):
    """Replaces `clone_chat_template`, which adds rows to the embeddings and computes them from the others."""
    return original(materialize(model), *args, **kwargs)


def _hash(original, module: nn.Module, *args, **kwargs) -> str:
    """Replaces `hash_module`, and reads one tensor at a time, also of a model that an earlier trainer has sharded."""
    if args or kwargs:  # what a newer TRL can be told
        return original(materialize(module), *args, **kwargs)
    digest = hashlib.sha256()
    for name, tensor in sorted(named_tensors(module), key=lambda pair: pair[0]):
        with gathered(tensor):
            values, source = tensor.detach(), source_of(tensor)
            if source is not None:
                values = torch.empty(tensor.shape, dtype=tensor.dtype)
                source.read(0, values.view(-1), tensor.dtype)
            digest.update(f"{name} {values.dtype}".encode())
            digest.update(values.contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _serve(original, *args, **kwargs):
    """Replaces `VLLMGeneration`. It is imported by those who use it."""
    from hf_zero.trl.server_generation import ServerGeneration

    return ServerGeneration(*args, **kwargs)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "get_peft_model": _adapt,
    "clone_chat_template": _clone_template,
    "hash_module": _hash,
    "VLLMGeneration": _serve,
}


@contextmanager
def fit_for_lazy_loading(trainer_class: type) -> Iterator[None]:
    """Lets a trainer's constructor work on weights that are still in files, without reading all of them."""
    modules = {sys.modules[base.__module__] for base in trainer_class.__mro__ if base.__module__.startswith("trl.")}
    found = [
        (module, name, getattr(module, name)) for module in modules for name in _REPLACEMENTS if hasattr(module, name)
    ]
    try:
        for module, name, original in found:
            setattr(module, name, partial(_REPLACEMENTS[name], original))
        yield
    finally:
        for module, name, original in found:
            setattr(module, name, original)
