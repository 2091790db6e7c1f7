"""PEFT adapters: rank 0 gathers and saves their parameters, and every rank reads its own ranges."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_zero.checkpoint.load import load_weights
from hf_zero.checkpoint.names import named_tensors
from hf_zero.checkpoint.safetensors import ADAPTER_WEIGHTS_NAME, WeightFiles
from hf_zero.checkpoint.save import plan_weights
from hf_zero.checkpoint.staging import StagedFiles
from hf_zero.comm.agreement import collect_from_all_ranks
from hf_zero.engine import ZeroEngine, gathered, materialize
from hf_zero.errors import CheckpointError, UnsupportedError


# Parameters of prompt learning, for resuming: PEFT's own file only has the prompts that are computed from them.
PROMPTS_NAME = "prompt_parameters.safetensors"
PROMPTS_KEY = "prompt_embeddings"  # PEFT's key


def is_adapter_model(model: nn.Module) -> bool:
    """Returns whether a model is a PEFT model, or has adapters of transformers' `add_adapter`. Does not import
    PEFT."""
    return _is_adapted(model) or any(cls.__module__.startswith("peft.") for cls in type(model).__mro__)


def _is_adapted(model: nn.Module) -> bool:
    """Returns whether a transformers model has adapters of `add_adapter`. It saves only the active one."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _places(model: nn.Module) -> dict[str, str]:
    """Returns the adapters to save, and the subfolder of each in the model folder."""
    if _is_adapted(model):
        return {model.active_adapters()[0]: ""}
    return {adapter: "" if adapter == "default" else adapter for adapter in model.peft_config}


def refuse_adapters(model: nn.Module, tell: Callable[[str], object] | None = None) -> None:
    """Checks before training that all trained parameters are saved with the adapters. All ranks must call it.

    `tell` is called with a sentence about parameters that would not be saved; without it, they are an error. Raises
    [`UnsupportedError`], too, if several adapters of `add_adapter` are active, or if the adapter's file has values
    other than parameters, buffers and prompts."""
    active = model.active_adapters() if _is_adapted(model) else []
    if len(active) > 1:
        raise UnsupportedError(
            f"adapters {', '.join(map(repr, active))}: are all active, but transformers saves only one; call "
            f"model.set_adapter({active[0]!r}), or add them with PEFT's get_peft_model and add_adapter"
        )
    lost = lost_beside_adapters(model)
    if lost is not None and tell is None:
        raise UnsupportedError(lost)
    if lost is not None and tell is not None:
        tell(lost)


def lost_beside_adapters(model: nn.Module) -> str | None:
    """Returns a sentence about a trained parameter that no adapter file contains, or `None`. All ranks must call
    it."""
    lost: list[str] = []
    for embeddings in (False, "auto"):  # "auto" may access the Hub, so it is tried only if needed
        kept = [{*_prompt_names(model, embeddings), *_saved_names(model, embeddings)}]
        if embeddings and dist.is_initialized():
            dist.broadcast_object_list(kept)  # rank 0 writes the files, and other ranks may not reach the Hub
        saved = {id(tensor) for name, tensor in named_tensors(model) if name in kept[0]}
        lost = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in saved]
        if not lost:
            return None
    return (
        f"{lost[0]}: is trained but not saved with the adapters, so it would be lost; add its module to "
        "modules_to_save of the adapter's config, or call requires_grad_(False) on it"
    )


def write_adapters(engine: ZeroEngine, folder: str | os.PathLike) -> None:
    """Gathers the adapters of a model, one unit at a time, and writes them into a folder in PEFT's format on rank 0.
    All ranks must call it."""
    model = engine.model
    # Whether PEFT saves the embedding layers may depend on whether a rank reaches the Hub. So all ranks gather them,
    # and rank 0 decides.
    gathers, keeps = _saved_names(model, True), _saved_names(model, "auto")
    names: dict[int, list[str]] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).extend([name] if name in gathers else [])
        if name in keeps and not isinstance(tensor, nn.Parameter):
            state[name] = tensor
    for unit in engine.units:
        held = [p for flat in unit.flats for p in flat.params if names[id(p)]]
        with gathered(held):
            for p in held if engine.comm.rank == 0 else ():
                state.update({name: p.detach().cpu().clone() for name in names[id(p)] if name in keeps})
    with gathered(_read_by_peft(model)), torch.no_grad():
        if engine.comm.rank == 0:
            model.save_pretrained(folder, state_dict=state)


def plan_model(engine: ZeroEngine, *, max_shard_size: int | str = "50GB", resumes: bool = True) -> StagedFiles:
    """Plans the files of a model. For a PEFT model, these are the adapters and, if a run `resumes` from them, the
    parameters of prompt learning, which PEFT's own files do not contain. All ranks must call it."""
    if not is_adapter_model(engine.model):
        return plan_weights(engine, max_shard_size=max_shard_size)
    write = partial(write_adapters, engine)
    if not resumes or not any(config.is_prompt_learning for config in engine.model.peft_config.values()):
        return StagedFiles(write_beside=write)
    names = engine.comm.broadcast_object(_prompt_names(engine.model, "auto"))
    keys = dict(zip(names, names, strict=True))
    return replace(plan_weights(engine, weights_name=PROMPTS_NAME, keys=keys), write_beside=write)


def load_model(engine: ZeroEngine, folder: str) -> None:
    """Loads the weights of a model; every rank reads its own ranges. For a PEFT model, loads the adapters that
    `write_adapters` or PEFT has written; all except "default" are in subfolders. All ranks must call it."""
    model = engine.model
    if not is_adapter_model(model):
        load_weights(engine, folder)
        return
    path = os.path.join(folder, PROMPTS_NAME)
    has_prompts = any(config.is_prompt_learning for config in model.peft_config.values())
    if has_prompts and any(collect_from_all_ranks(engine.comm, f"loading {folder}", lambda: os.path.isfile(path))):
        _load(engine, folder, PROMPTS_NAME, lambda embeddings: {n: [n] for n in _prompt_names(model, embeddings)})
        return
    for adapter, place in _places(model).items():
        own = os.path.join(place, ADAPTER_WEIGHTS_NAME)
        prompts: dict[str, list[str]] = {}
        if model.peft_config[adapter].is_prompt_learning:
            (name, _), *others = _prompt_parameters(model, adapter)
            if others:
                raise CheckpointError(
                    f"{os.path.join(folder, own)}: has prompts of adapter {adapter!r}, but not the parameters that "
                    f"compute them, such as {name} ({PROMPTS_NAME}); resume from a checkpoint of this trainer"
                )
            prompts[name] = [PROMPTS_KEY]
        _load(engine, folder, own, partial(_keys_in_file, model, adapter, prompts))


def _load(
    engine: ZeroEngine, folder: str, weights_name: str, keys_with: Callable[[bool], Mapping[str, Sequence[str]]]
) -> None:
    """Loads the tensors of a file. All ranks must call it. `keys_with(embeddings)` returns the file's keys for each
    parameter or buffer, including those of embedding layers if `embeddings` is true. PEFT saves the embedding layers
    of a resized model only if it finds the base model's config, so the contents of the file decide."""
    required, possible = keys_with(False), keys_with(True)
    held = collect_from_all_ranks(
        engine.comm, f"loading {folder}", lambda: set(WeightFiles.read(folder, weights_name).entries)
    )[0]
    keys = {name: found for name, found in possible.items() if name in required or not held.isdisjoint(found)}
    load_weights(engine, folder, weights_name=weights_name, keys=keys)


def _keys_in_file(
    model: nn.Module, adapter: str, prompts: Mapping[str, Sequence[str]], embeddings: bool
) -> dict[str, Sequence[str]]:
    prefix = "base_model.model." if _is_adapted(model) else ""  # transformers saves with PEFT's prefix
    keys = adapter_keys(model, adapter, embeddings)
    return {**{name: [prefix + key for key in found] for name, found in keys.items()}, **prompts}


def adapter_keys(model: nn.Module, adapter: str, embeddings: bool | str) -> dict[str, list[str]]:
    """Returns the parameters and buffers of one adapter, and the keys of each in its file: the trained copy of a
    resized embedding layer has two. All ranks must call it.

    Calls PEFT with empty tensors instead of the parameters, and sees which it selects. A tied parameter may have
    several of its names. Prompts, which are computed, are not included. `embeddings` says whether embedding layers are
    saved too; `"auto"` compares the vocabulary size with the config of the base model, which may be on the Hub.
    """
    from peft import get_peft_model_state_dict

    if embeddings is True:
        embeddings = _has_embeddings(model)
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in named_tensors(model)}
    name_of = {id(tensor): name for name, tensor in empty.items()}
    with gathered(_read_by_peft(model)), torch.no_grad():
        kept = get_peft_model_state_dict(
            model, state_dict=empty, adapter_name=adapter, save_embedding_layers=embeddings
        )
    strange = [key for key, tensor in kept.items() if id(tensor) not in name_of]
    if strange and not model.peft_config[adapter].is_prompt_learning:
        raise UnsupportedError(
            f"adapter {adapter!r} ({model.peft_config[adapter].peft_type.value}): {strange[0]} in its file is not a "
            "parameter or buffer of the model, so it could not be resumed; use another type, such as LoRA"
        )
    keys: dict[str, list[str]] = {}
    for key, tensor in kept.items():
        if key not in strange:
            keys.setdefault(name_of[id(tensor)], []).append(key)
    return keys


def _has_embeddings(model: nn.Module) -> bool:
    """Whether a model has embedding layers that PEFT finds; for other models it warns or raises."""
    try:
        return model.get_input_embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def _saved_names(model: nn.Module, embeddings: bool | str) -> set[str]:
    """Returns the parameters and buffers in the files of all saved adapters. All ranks must call it."""
    return {name for adapter in _places(model) for name in adapter_keys(model, adapter, embeddings)}


def _prompt_names(model: nn.Module, embeddings: bool | str) -> list[str]:
    """Returns the parameters of all adapters with prompt learning. All ranks must call it."""
    names: list[str] = []
    for adapter, config in model.peft_config.items():
        if config.is_prompt_learning:
            names += [name for name, _ in _prompt_parameters(model, adapter)]
            names += adapter_keys(model, adapter, embeddings)
    return list(dict.fromkeys(names))


def _prompt_parameters(model: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    prefix = f"prompt_encoder.{adapter}"
    return model.prompt_encoder[adapter].named_parameters(prefix=prefix)


def _read_by_peft(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that PEFT reads directly: those of module copies (`modules_to_save`) and of modules that
    compute prompts."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    read = [module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    read += [model.prompt_encoder] if hasattr(model, "prompt_encoder") else []
    return [p for module in read for p in module.parameters()]


def read_for_adapter(model: nn.Module, config: Any) -> None:
    """Reads the weights from which PEFT initializes the adapter, if they are still in files: those of
    `modules_to_save`, and all weights for DoRA, PiSSA and similar types."""
    kind = getattr(config, "init_lora_weights", True)
    if getattr(config, "use_dora", False) or kind not in (True, False, "gaussian", "orthogonal"):
        materialize(model)
        return
    copied = tuple(getattr(config, "modules_to_save", None) or ())
    for name, module in model.named_modules():
        if name in copied or name.endswith(tuple(f".{each}" for each in copied)):
            materialize(module)
