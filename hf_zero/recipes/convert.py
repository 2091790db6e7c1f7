"""The tool `convert`: converts a checkpoint of another program into one from which hf_zero resumes."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from hf_zero.checkpoint import WeightFiles, class_of
from hf_zero.checkpoint.convert import program_of
from hf_zero.checkpoint.convert.state import SavedState
from hf_zero.checkpoint.load import ignored_pattern
from hf_zero.checkpoint.manifest import OPTIMIZER_NAME, SavedRun
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.safetensors import FileLayout, TensorEntry
from hf_zero.checkpoint.staging import Checkpoint, StagedFiles
from hf_zero.comm import connect
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.models import (
    ADAPTER_CONFIG_NAME,
    adapter_config,
    load_config,
    one_line,
    resolve_config,
    saved_folder,
)
from hf_zero.recipes.parser import option


POSITIONAL = (
    ("old", "the checkpoint of DeepSpeed, FSDP or torch.distributed.checkpoint"),
    ("new", "the folder to write, which does not exist or is empty"),
)
# Parts of names that module wrappers add in state dicts.
WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
SMALL_FILES = re.compile(rf"rng_state(_\d+)?\.pth|{SCHEDULER_NAME}|{TRAINING_ARGS_NAME}|.+\.(json|jinja|txt|model)")


@dataclass
class Arguments:
    """Keys of `convert`."""

    model: str | None = option(
        None,
        "A folder, config.json or hub id with the model's config, for a checkpoint without one; of an adapter, "
        "its base model.",
    )


def run(old: str, new: str, arguments: Arguments) -> None:
    """Converts a checkpoint. The new folder appears when it is complete. Raises [`CheckpointError`] if the old one is
    of no such program, damaged, or of another model."""
    source, target = saved_folder(old), Path(new).expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"new {new!r}: exists and is not empty; give another folder")
    program = program_of(source)
    if program is None:
        raise CheckpointError(
            f"{old}: is no checkpoint of DeepSpeed ZeRO, FSDP or torch.distributed.checkpoint; give the folder that "
            "holds such files, e.g. checkpoint-500 (training resumes from those of Trainer and hf_zero as they are)"
        )
    with one_line(old, "converting failed"):
        model = _model(source, arguments.model)
        own = _own_names(model)
        found, state = program.read(source)
        weights, state = {own(name): tensor for name, tensor in found.items()}, state.renamed(own)
        _check(source, model, weights, state, own)
        _write(model, weights, state, source, target)
    num_states = sum(map(len, state.tensors.values()))
    print(
        f"{new}: {len(weights)} tensors of {program.name} and {num_states} of its optimizer; training resumes from it"
    )


def _model(source: Path, name: str | None) -> nn.Module:
    """Builds the model of a checkpoint on the meta device."""
    is_adapter = (source / ADAPTER_CONFIG_NAME).is_file()
    if name is None:
        name = adapter_config(source).get("base_model_name_or_path") if is_adapter else str(source)
    if name is None or name == str(source) and not (source / "config.json").is_file():
        raise ConfigError(f"{source}: has no config of its model; name a folder or hub id that has it with --model")
    config = load_config(resolve_config(name, "model"))
    kind = class_of(config)
    if kind is None:
        raise ConfigError(f"model {name!r}: its config names no class of transformers under architectures; add it")
    with torch.device("meta"):
        model = kind(config)
        if not is_adapter:
            return model
        from peft import PeftConfig, get_peft_model

        adapter = PeftConfig.from_pretrained(source)
        adapter.inference_mode = False  # it would freeze the adapter
        return get_peft_model(model, adapter)


def _own_names(model: nn.Module) -> Callable[[str], str]:
    """Returns a function that removes wrappers from names, and maps tied parameters to their first name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    own = {name: first.setdefault(id(parameter), name) for name, parameter in named}

    def rename(name: str) -> str:
        name = WRAPPERS.sub("", name)
        return own.get(name, name)

    return rename


def _check(
    source: Path, model: nn.Module, found: dict[str, Tensor], state: SavedState, own: Callable[[str], str]
) -> None:
    """Checks that a checkpoint is of this model, with its optimizer."""
    wanted, parameters = {own(name): each for name, each in model.state_dict().items()}, dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    needed = trained if hasattr(model, "peft_config") else wanted  # the base of an adapter is not written
    known, ignored = {*wanted, *(name for name, _ in model.named_buffers())}, ignored_pattern(model)
    missing = [name for name in needed if name not in found]
    left = [name for name in found if name not in known and not (ignored is not None and ignored.search(name))]
    left += [name for name in state.settings | state.numbers if name not in parameters and name not in left]
    parts = [f"{len(missing)} tensors are missing ({shortened(missing)})"] if missing else []
    parts += [f"{len(left)} are not the model's ({shortened(left)})"] if left else []
    if parts:
        raise CheckpointError(f"{source}: {', '.join(parts)}; name the config of its model with --model")
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(found[name].shape)}, {list(wanted[name].shape)} in this model; "
                "use the config that it was saved with"
            )
    if not state.settings:
        raise CheckpointError(f"{source}: has no optimizer state; load its weights with transformers")


def _write(model: Any, weights: dict[str, Tensor], state: SavedState, source: Path, target: Path) -> None:
    tensors = {f"{name}.{key}": value for name, of in state.tensors.items() for key, value in of.items()}
    layout = FileLayout.build(TensorEntry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    run = SavedRun(0, 1, weight_dtypes=dtypes, groups=state.groups(), scalars=state.numbers)
    run.check()

    def beside(folder: Path) -> None:
        model.to(next(each.dtype for each in weights.values() if each.is_floating_point()))  # which the config names
        model.save_pretrained(folder, state_dict=dict(weights))  # which it empties
        for path in source.iterdir():
            if path.is_file() and SMALL_FILES.fullmatch(path.name) and not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)

    def pieces() -> Iterator[tuple[str, int, Tensor]]:
        yield from ((name, 0, tensor.reshape(-1)) for name, tensor in tensors.items())

    alone = connect(torch.device("cpu"), timeout_seconds=60, bucket_nbytes=2**20)
    files = StagedFiles(WeightFiles.of({OPTIMIZER_NAME: layout}), pieces, beside, run=run)
    Checkpoint(alone, target, [files]).finish()
