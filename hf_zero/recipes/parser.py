"""Parsers for tasks and tools, which raise where argparse would exit, and messages about unknown names."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from hf_zero.errors import ConfigError, nearest


SCRIPT = "hf-zero"
MODULE = "python -m hf_zero.recipes"
_IN_A_SCRIPT = "is not a recipe; train it in a script, with hf_zero.trl.{}"
_QUANTIZED = "recipes load no quantized models; load it in a script with quantization_config, for hf_zero.ZeroTrainer"

COMMANDS: dict[str, str] = {
    "distill": _IN_A_SCRIPT.format("ZeroDistillationTrainer"),
    "distillation": _IN_A_SCRIPT.format("ZeroDistillationTrainer"),
    "grpo": _IN_A_SCRIPT.format("ZeroGRPOTrainer"),
    "kto": _IN_A_SCRIPT.format("ZeroKTOTrainer"),
    "reward": _IN_A_SCRIPT.format("ZeroRewardTrainer"),
    "rloo": _IN_A_SCRIPT.format("ZeroRLOOTrainer"),
    "ppo": "is not supported; the nearest are hf_zero.trl.ZeroGRPOTrainer and ZeroRLOOTrainer, in a script",
    "orpo": "is not supported; the nearest is dpo",
    "train": "name what is trained: sft, pretrain, dpo or classify",
    "finetune": "it is called sft here",
    "lora": "it is called sft here, with --use_peft",
    "qlora": _QUANTIZED,
    "clm": "it is called pretrain here",
    "launch": "name a task; --num_processes starts its processes",
    "estimate": "it is called plan here",
    "estimate_memory": "it is called plan here",
    "export": "a run leaves a folder that from_pretrained loads; merge makes one of an adapter and its base model",
    "convert": "it is called migrate here, for configurations; checkpoints need none: from_pretrained loads them",
    "upload": "it is called push here",
    "info": "it is called env here",
    "version": "it is called env here",
}

# Of other programs (TRL, DeepSpeed, torchrun, LLaMA-Factory, Axolotl) and of older versions of transformers.
KEYS: dict[str, str] = {
    "trust_remote_code": "recipes run no code of a model's own; train it in a script, with hf_zero.ZeroTrainer",
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "model": "it is called model_name_or_path here",
    "model_name": "it is called model_name_or_path here",
    "base_model": "it is called model_name_or_path here",
    "dataset": "it is called dataset_name here",
    "datasets": "it is called dataset_name here",
    "dataset_path": "it is called dataset_name here",
    "dataset_text_column": "it is called dataset_text_field here",
    "validation_file": "it is called test_file here",
    "eval_file": "it is called test_file here",
    "max_seq_length": "it is called max_length here",
    "max_seq_len": "it is called max_length here",
    "cutoff_len": "it is called max_length here",
    "sequence_len": "it is called max_length here",
    "block_size": "it is called max_length here",
    "torch_dtype": "it is called dtype here",
    "max_train_samples": "it is called max_train_rows here",
    "max_eval_samples": "it is called max_test_rows here",
    "streaming": "it is called dataset_streaming here",
    "batch_size": "it is called per_device_train_batch_size here",
    "micro_batch_size": "it is called per_device_train_batch_size here",
    "train_micro_batch_size_per_gpu": "it is called per_device_train_batch_size here",
    "lr": "it is called learning_rate here",
    "lr_scheduler": "it is called lr_scheduler_type here",
    "epochs": "it is called num_train_epochs here",
    "num_epochs": "it is called num_train_epochs here",
    "evaluation_strategy": "it is called eval_strategy here",
    "warmup_ratio": "it is called warmup_steps here, which takes a share below 1 too",
    "group_by_length": "it is called train_sampling_strategy here, with the value group_by_length",
    "gradient_clipping": "it is called max_grad_norm here",
    "no_cuda": "it is called use_cpu here",
    "nproc_per_node": "it is called num_processes here",
    "nproc": "it is called num_processes here",
    "num_gpus": "it is called num_processes here",
    "stage": "it is called zero_stage here",
    "zero": "it is called zero_stage here",
    "offload": "it is called zero_offload here",
    "lora_rank": "it is called lora_r here",
    "lora_target": "it is called lora_target_modules here",
    "use_flash_attn": "it is called attn_implementation here, with the value flash_attention_2",
    "use_flash_attention_2": "it is called attn_implementation here, with the value flash_attention_2",
    "flash_attn": "it is called attn_implementation here, with the value flash_attention_2",
    "logging_dir": "training_log.jsonl is in output_dir; TensorBoard's folder is set by TENSORBOARD_LOGGING_DIR",
}


def program() -> str:
    """The name of the program as it was called, for the usage and for commands in messages."""
    return SCRIPT if Path(sys.argv[0]).stem == SCRIPT else MODULE


class Parser(ArgumentParser):
    """An `ArgumentParser` that raises [`ConfigError`] where argparse would exit."""

    kinds: tuple[type, ...]  # the dataclasses whose fields are its keys

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser_for(name: str, summary: str, kinds: Iterable[type]) -> Parser:
    """Makes the parser of a task or a tool, which takes the fields of dataclasses as keys.

    Args:
        name (`str`): The task or tool, as it is called on the command line.
        summary (`str`): What it does, for `--help`.
        kinds (`Iterable[type]`): The dataclasses. If none has a field, transformers is not imported, which takes
            seconds.

    Returns:
        [`Parser`]: It is an `HfArgumentParser` too if there is a field.
    """
    kinds = tuple(kinds)
    settings: dict[str, Any] = {"prog": f"{program()} {name}", "description": summary, "allow_abbrev": False}
    parser = _dataclass_parser()(kinds, **settings) if any(fields(kind) for kind in kinds) else Parser(**settings)
    parser.kinds = kinds
    return parser


def _dataclass_parser() -> Callable[..., Parser]:
    from transformers import HfArgumentParser

    class DataclassParser(Parser, HfArgumentParser):
        """Takes `error` from `Parser` and the rest from `HfArgumentParser`."""

    return DataclassParser


def unknown_message(where: str, key: str, known: Iterable[str]) -> str:
    """Returns the message about an unknown key.

    Args:
        where (`str`): the file it was found in, or "command line".
        key (`str`): as it was written.
        known (`Iterable[str]`): the keys that there are; what does the same here, or the nearest, is named.
    """
    if not key.startswith("-") and where == "command line":
        remedy = f"--config {key}" if Path(key).suffix in (".yaml", ".yml") else "--key value"
        return f"{where}: {key!r} belongs to no key; write {remedy}"
    name = key.lstrip("-").replace("-", "_")
    found = nearest(name, known)
    hint = elsewhere(name, KEYS) or _guess(f"--{found}" if found and key.startswith("--") else found)
    return f"{where}: unknown key {key!r}; {hint}"


def unknown_task_message(name: str, known: Iterable[str]) -> str:
    """Returns the message about an unknown task or tool.

    Args:
        name (`str`): as it was written.
        known (`Iterable[str]`): those that there are.
    """
    hint = f"{elsewhere(name, COMMANDS) or _guess(nearest(name, known))};".replace("?;", "?")
    return f"task {name!r}: {hint} expected one of {', '.join(known)}"


def _guess(found: str | None) -> str:
    return f"did you mean {found}?" if found else "nothing here is called like it; see --help"


def elsewhere(name: str, table: Mapping[str, str]) -> str | None:
    """Returns what to use here for a name from another program, or `None` if the name is in no table.

    Args:
        name (`str`): as it was written, without dashes before it.
        table (`Mapping[str, str]`): `COMMANDS` or `KEYS`.
    """
    return table.get(name.lower().replace("-", "_"))
