"""The tool `merge`: merges a PEFT adapter into its base model."""

import secrets
import shutil
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME

from hf_zero.checkpoint.folders import commit
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.models import (
    DTYPES,
    Dtype,
    adapter_config,
    attach,
    load_base,
    load_model,
    one_line,
    quiet,
    saved_folder,
)
from hf_zero.recipes.parser import option
from hf_zero.trainer.checks import check_output_dir


POSITIONAL = (("folder", "the adapter folder"),)


@dataclass
class Arguments:
    """Keys of `merge`."""

    output_dir: str | None = option(None, "Folder for the merged model.")
    base_model_name_or_path: str | None = option(
        None, "Base model, instead of the one that the adapter's config names."
    )
    dtype: Dtype | None = option(None, "Dtype of the merged model. Default: that of the base model.")
    overwrite: bool = option(False, "Replace the content of output_dir.")


def run(folder: str, arguments: Arguments) -> None:
    """Merges, saves beside `output_dir`, loads the result, and renames it to `output_dir`. Raises [`CheckpointError`]
    if the adapter or its base do not load, or the adapter changes nothing."""
    adapter = saved_folder(folder)
    check_output_dir(arguments.output_dir)
    output = Path(arguments.output_dir).expanduser()
    if output.is_dir() and any(output.iterdir()) and not arguments.overwrite:
        raise ConfigError(f"output_dir {arguments.output_dir!r}: is not empty; give another, or --overwrite")
    if adapter_config(adapter).get("peft_type") in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"):
        raise CheckpointError(f"{folder}: learned prompts cannot be merged into weights; load them with PEFT")
    dtype = None if arguments.dtype is None else DTYPES[arguments.dtype]
    model, source = load_base(adapter, arguments.base_model_name_or_path)
    if dtype is not None:
        model = model.to(torch.promote_types(model.dtype, dtype))  # merged in the wider one, rounded once
    before = _fingerprints(model)
    adapted = attach(model, adapter)
    with one_line(folder, "merging failed"):
        merged = adapted.merge_and_unload(safe_merge=True)
    after = _fingerprints(merged)
    changed = [name for name, mark in after.items() if before.get(name) != mark]
    if not changed:
        raise CheckpointError(
            f"{folder}: the adapter changes none of the {len(after)} tensors of {source}; it was not trained, "
            "or is for another base model"
        )
    merged = merged.to(dtype or merged.dtype)
    processor = _processor(adapter, source, merged.main_input_name)
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = output.parent / f".merging-{secrets.token_hex(4)}"
    try:
        with one_line(output, "saving failed"):
            staged.mkdir()
            merged.save_pretrained(staged)
            if processor is not None:
                processor.save_pretrained(staged)
        load_model(staged)
        with one_line(output, "saving failed"):
            Manifest.of_folder(staged).write(staged)
            commit(staged, output)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    print(f"{output}: {type(merged).__name__}, {len(changed)} of {len(after)} tensors differ from {source}; it loads")


def _fingerprints(model: nn.Module) -> dict[str, int]:
    """Returns a checksum of the bytes of every parameter and buffer, by name."""
    flat = ((name, tensor.detach().contiguous().reshape(-1)) for name, tensor in model.state_dict().items())
    return {name: zlib.crc32(tensor.view(torch.uint8).numpy().data) for name, tensor in flat}


def _processor(adapter: Path, source: str, main_input: str) -> Any:
    """Loads the tokenizer or processor of the adapter, else of the base model. Returns `None` if neither has one."""
    kinds = {
        PROCESSOR_NAME: AutoProcessor,
        "tokenizer_config.json": AutoTokenizer,
        IMAGE_PROCESSOR_NAME: AutoImageProcessor,
    }
    with quiet():
        for name, kind in kinds.items():
            if (adapter / name).is_file():
                with one_line(adapter, f"loading the {kind.__name__.removeprefix('Auto')} failed"):
                    return kind.from_pretrained(adapter)
        of_base = (AutoTokenizer, AutoImageProcessor)
        for kind in reversed(of_base) if main_input == "pixel_values" else of_base:  # a base may have both
            with suppress(OSError, ValueError, KeyError):
                return kind.from_pretrained(source)
    return None
