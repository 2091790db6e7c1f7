"""Parsers of tasks and tools, which raise instead of exiting, and messages about unknown names."""

import json
import sys
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hf_zero.errors import ConfigError, nearest
from hf_zero.removed import removed_hint


AUTO = "auto"  # a value of `resume` and of `max_length`
SCRIPT = "hf-zero"
MODULE = "python -m hf_zero.recipes"
# The ready-made files: an installed package has them beside this one (`setup.py`), a checkout in its folder recipes/.
FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[2] / "recipes")


# Other names of tasks and tools, and of keys in TRL, DeepSpeed, torchrun, LLaMA-Factory and Axolotl, where the most
# similar name is another one.
COMMANDS = {
    "sft": "finetune train",
    "sft --use_peft": "lora",
    "sft --use_peft --load_in_4bit": "qlora",
    "pretrain": "clm",
    "grpo": "ppo",
    "plan": "estimate estimate_memory",
    "push": "upload",
    "merge": "export",
    "generate": "predict infer inference",
    "env": "info version",
    "check": "doctor selftest self_test",
}
KEYS = {
    "model_name_or_path": "model model_name base_model",
    "dataset_name": "dataset datasets dataset_path",
    "dataset_text_field": "dataset_text_column",
    "dataset_mixing": "mix_strategy interleave_probs",
    "test_file": "validation_file",
    "max_test_rows": "max_eval_samples",
    "max_length": "max_seq_length max_seq_len cutoff_len sequence_len block_size",
    "max_completion_length": "max_length",
    "dtype": "torch_dtype",
    "attn_implementation": "use_flash_attn use_flash_attention_2 flash_attn",
    "per_device_train_batch_size": "batch_size micro_batch_size train_micro_batch_size_per_gpu",
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "train_sampling_strategy": "group_by_length",
    "max_grad_norm": "gradient_clipping",
    "use_cpu": "no_cuda",
    "num_processes": "nproc_per_node nproc num_gpus",
    "zero_stage": "zero",
    "zero_sequence_parallel": "context_parallel_size sp_size",
    "lora_r": "lora_rank",
}
# Names of other programs that stand for more than one key.
HINTS = {"stage": "use the task, as in hf-zero sft, or zero_stage for a stage of ZeRO"}


def option(default: Any, text: str) -> Any:
    """Declares a key as a field of a dataclass, with its default and its text for `--help`."""
    return field(default=default, metadata={"help": text})


def refuse_less(arguments: Any, **least: int) -> None:
    """Refuses values below a minimum. `None` passes."""
    for name, number in least.items():
        if (value := getattr(arguments, name)) is not None and value < number:
            raise ConfigError(f"{name} {value}: expected {number} or more")


def program() -> str:
    """Returns the name of the program as it was called."""
    return SCRIPT if Path(sys.argv[0]).stem == SCRIPT else MODULE


class Parser(ArgumentParser):
    """An `ArgumentParser` that raises [`ConfigError`] where argparse would exit."""

    kinds: tuple[type, ...]  # the dataclasses whose fields are its keys
    nullable: frozenset[str] = frozenset()  # of which null in a file is a value; others keep their default

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def values(self, argv: list[str]) -> dict[str, Any]:
        """Returns the values of all keys, from the command line and the YAML file that `--config` names. Raises
        [`ConfigError`] if a key is unknown, with a suggestion, or a value does not parse."""
        known = {field.name for kind in self.kinds for field in fields(kind) if field.init}
        given, unknown = self.parse_known_args(argv)
        path = getattr(given, "config", None)
        content, words = _load_yaml(path, yaml.SafeLoader, _Words) if path else ({}, {})
        faults = [_unknown_message(path, str(key), known) for key in content if key not in known]
        keys = [word.split("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
        faults += [_unknown_message("command line", key, known) for key in keys]
        if faults:
            raise ConfigError("; ".join(faults))
        return vars(self.parse_args(argv, Namespace(**self._parsed(path, content, words))))

    def _parsed(self, path: str, content: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a YAML file, parsed as flags are. `words` are the values as they are written."""
        values: dict[str, Any] = {}
        for key, value in content.items():
            if value in (None, []):  # leaves the default
                values |= {key: None} if key in self.nullable else {}
                continue
            action = self._option_string_actions[f"--{key}"]
            is_list = isinstance(value, list) and action.nargs in ("+", "*")
            pairs = zip(value, words[key], strict=True) if is_list else [(value, words[key])]
            texts = [_as_flag(action, item, word) for item, word in pairs]
            try:
                values[key] = self._get_values(action, texts)
            except (ArgumentError, ConfigError) as error:
                raise ConfigError(f"--config {path}: {error}") from error
        return values


def ready_made(folders: Iterable[Path] = FOLDERS) -> dict[str, Path]:
    """Returns the ready-made YAML files by name, from the first folder that has any."""
    found = (sorted(folder.glob("*.yaml")) for folder in folders)
    return {path.name: path for path in next(filter(None, found), [])}


def parser_for(name: str, summary: str, kinds: Iterable[type]) -> Parser:
    """Returns the parser of a task or a tool, whose keys are the fields of dataclasses. If there are any, it is an
    `HfArgumentParser` too; otherwise transformers is not imported, which takes seconds."""
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


def _as_flag(action: Action, value: Any, word: Any) -> str:
    """Returns a value of a YAML file as the command line has it: a mapping as JSON, true or false of a switch, and any
    other value as it is written."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, default=str)
    is_switch = getattr(action.type, "__name__", None) == "string_to_bool"
    return str(value) if is_switch else word


class _Words(yaml.SafeLoader):
    """Reads scalars as they are written: YAML 1.1 takes `no` for false, and 2024-11-27 for a date."""


for kind in ("bool", "int", "float", "timestamp"):
    _Words.add_constructor(f"tag:yaml.org,2002:{kind}", yaml.SafeLoader.construct_scalar)


def read_yaml(path: str) -> dict[Any, Any]:
    """Reads a YAML file, or the ready-made one of this name."""
    return _load_yaml(path, yaml.SafeLoader)[0]


def _load_yaml(path: str, *loaders: type[yaml.SafeLoader]) -> list[dict[Any, Any]]:
    """Reads a YAML file once, and returns what each loader makes of it."""
    there_is, name = ready_made(), path if path.endswith((".yaml", ".yml")) else f"{path}.yaml"
    file = there_is[name] if name in there_is and not Path(path).is_file() else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        contents = [yaml.load(text, Loader=loader) or {} for loader in loaders]  # noqa: S506 (all loaders are safe)
    except FileNotFoundError as error:
        found = nearest(file.name, there_is)
        hint = f"; did you mean {found}?" if found else ""
        raise ConfigError(f"--config {path}: no such file, nor a ready-made recipe{hint}") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(contents[0], dict):
        raise ConfigError(
            f"--config {path}: a {type(contents[0]).__name__} at the top, expected lines of `key: value`"
        )
    return contents


def _unknown_message(where: str, key: str, known: Iterable[str]) -> str:
    """Returns the message about an unknown key of a file, or of the "command line", with a suggestion."""
    if not key.startswith("-") and where == "command line":
        return f"{where}: {key!r} belongs to no key; write --key value"
    name = key.lstrip("-").replace("-", "_")
    found = nearest(name, known)
    hint = (
        removed_hint(name)
        or HINTS.get(name)
        or _elsewhere(name, KEYS)
        or _guess(f"--{found}" if found and key.startswith("--") else found)
    )
    return f"{where}: unknown key {key!r}; {hint}"


def unknown_task_message(name: str, known: Iterable[str]) -> str:
    """Returns the message about an unknown task or tool."""
    hint = f"{removed_hint(name) or _elsewhere(name, COMMANDS) or _guess(nearest(name, known))};".replace("?;", "?")
    return f"task {name!r}: {hint} expected one of {', '.join(known)}"


def _guess(found: str | None) -> str:
    return f"did you mean {found}?" if found else "nothing here is called like it; see --help"


def _elsewhere(name: str, table: Mapping[str, str]) -> str | None:
    """Returns the hint for a name from another program, if the table has one."""
    name = name.lower().replace("-", "_")
    return next((f"use {own}" for own, others in table.items() if name in others.split()), None)
