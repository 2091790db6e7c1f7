"""`hf_zero.load_pretrained`: transformers builds the model, and the weights stay in files until it is sharded.

`from_pretrained` calls two static methods of `PreTrainedModel` that are replaced while it runs, in this thread only:
instead of reading the files, parameters get the sources of their values, see `hf_zero.engine.source`.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint.conversion import Origin, origins_in
from hf_zero.checkpoint.manifest import check_pretrained
from hf_zero.checkpoint.names import shortened
from hf_zero.checkpoint.safetensors import PIECE_NBYTES, FileLayout, OpenFiles, WeightFiles
from hf_zero.compat import check_override, replaced
from hf_zero.engine.source import set_source, source_of
from hf_zero.errors import CheckpointError, ConfigError, UnsupportedError


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Arguments of `from_pretrained` that place parameters on devices, which conflicts with sharding.
_PLACING = ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config")
# Arguments that locate a checkpoint.
_LOCATING = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")
# Arguments for formats that change the tensors when they are read: transformers loads these completely.
_WHOLE = ("quantization_config", "gguf_file", "state_dict")
# The quantizer whose weights can be sharded: each is a frozen parameter with a dense tensor of bytes.
SHARDABLE = "bitsandbytes"
_lock = threading.RLock()


def load_pretrained(
    auto_class: Any, name_or_folder: str | os.PathLike, *, allow_missing: Sequence[str] = (), **kwargs: Any
) -> Any:
    """Loads a model with `auto_class.from_pretrained`, but leaves the weights in their files until it is sharded.

    transformers builds the model on the meta device. `hf_zero.shard` or a `ZeroTrainer` then makes every rank read its
    own ranges of the files, so that no rank ever holds the full model. Until then the model can be changed (PEFT,
    `requires_grad_`, gradient checkpointing), but not run or moved; `hf_zero.materialize` reads all weights. A new
    head is initialized like in `from_pretrained`, by rank 0 for all ranks.

    Checkpoints of bitsandbytes and GGUF, pickled files, and adapters with their base model are loaded completely on
    every rank.

    Args:
        auto_class (`type`): An auto class such as `AutoModelForCausalLM`, or a model class.
        name_or_folder (`str` or `os.PathLike`): A folder, or a name on the Hub.
        allow_missing (`Sequence[str]`): Modules or parameters of the base model that are initialized if they are
            missing in the files, such as `["bert.pooler"]`. Parameters outside of the base model (a new head) may
            always be missing.
        kwargs: Arguments of `from_pretrained`.

    Returns:
        `PreTrainedModel`, or the tuple of `from_pretrained` with `output_loading_info=True`.

    Raises:
        `CheckpointError`: If the folder does not exist or has no config or weights, a file is damaged, weights of the
            base model are missing or of other shapes, or a Hub name cannot be resolved.
        `ConfigError`: If an argument places parameters on devices.
        `UnsupportedError`: If the weights of a quantizer cannot be sharded.
    """
    from transformers import PretrainedConfig

    refuse_placing("load_pretrained", kwargs)
    name_or_folder = resolve(name_or_folder, **kwargs)
    folder = Path(name_or_folder)
    is_adapter = (folder / kwargs.get("subfolder", "") / "adapter_config.json").exists()
    where = {name: kwargs[name] for name in _LOCATING if name in kwargs}
    settings = kwargs.get("quantization_config")
    if settings is None:
        with suppress(OSError):  # reported when the model is loaded
            settings = PretrainedConfig.get_config_dict(name_or_folder, **where)[0].get("quantization_config")
    quantizer = refuse_quantizer(str(name_or_folder), settings)
    if is_adapter or quantizer is not None or any(kwargs.get(name) is not None for name in _WHOLE):
        return _from_pretrained(auto_class, str(name_or_folder), kwargs)
    with lazy_loading(allow_missing):
        return _from_pretrained(auto_class, str(name_or_folder), kwargs)


@dataclass(frozen=True)
class FileSource:
    """The source of a parameter's values in safetensors files, see `hf_zero.engine.source.Source`."""

    files: WeightFiles  # by path
    states: dict[str, tuple[int, int] | None]  # of the files when their headers were read, see `_state_of`
    origin: Origin
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which the model was loaded

    def read(self, start: int, out: Tensor, dtype: torch.dtype) -> None:
        changed = next((path for path, state in self.states.items() if _state_of(path) != state), None)
        if changed is not None:
            raise CheckpointError(
                f"{changed}: was changed or removed after the model was loaded and before it was sharded; load the "
                "model again"
            )
        with OpenFiles("", self.files) as opened:
            if dtype is self.dtype is out.dtype:
                self.origin.read(opened.read_range, start, out)
                return
            piece_numel = PIECE_NBYTES // self.dtype.itemsize
            if self.origin.start is None:  # otherwise it would be converted again for each piece
                piece_numel = max(1, out.numel())
            for first in range(0, out.numel(), piece_numel):
                piece = out[first : first + piece_numel]
                values = torch.empty(piece.numel(), dtype=self.dtype)
                self.origin.read(opened.read_range, start + first, values)
                piece.copy_(values.to(dtype))  # differs if the model was cast after loading


def _state_of(path: str) -> tuple[int, int] | None:
    """Returns size and time of the last change of a file, or `None` if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


@contextmanager
def lazy_loading(allow_missing: Sequence[str]) -> Iterator[None]:
    """Makes `from_pretrained` leave weights in their files, in this thread and inside the context. For `allow_missing`
    see `load_pretrained`. Raises [`ConfigError`] if the installed transformers lacks a replaced method or a parameter
    of it."""
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    thread = threading.get_ident()
    models: list[nn.Module] = []  # models whose weights are in files

    def load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None, **kwargs):
        placed = load_config.device_map is not None or load_config.is_quantized or expected_keys is not None
        are_safetensors = all(str(path).endswith(".safetensors") for path in checkpoint_files or [""])
        if threading.get_ident() != thread or state_dict is not None or placed or not are_safetensors:
            return load(model, state_dict, checkpoint_files, load_config, expected_keys=expected_keys, **kwargs)
        models.append(model)
        return _attach_sources(model, checkpoint_files, load_config), None

    def finalize_model_loading(model, load_config, loading_info, **kwargs):
        loading_info = finalize(model, load_config, loading_info, **kwargs)
        if any(model is known for known in models):
            _refuse_incomplete(model, load_config, loading_info, allow_missing)
        return loading_info

    ours: dict[str, Any] = {
        "_load_pretrained_model": load_pretrained_model,
        "_finalize_model_loading": finalize_model_loading,
    }
    with _lock:
        load, finalize = (getattr(base, name, None) for name in ours)
        for name, own in ours.items():
            check_override(own, base, name)
        with replaced(base, **{name: staticmethod(own) for name, own in ours.items()}):
            yield


def _attach_sources(model: Any, paths: Sequence[str], load_config: Any) -> Any:
    """Attaches a source to each parameter that the files have, and reads buffers. Returns transformers' record of
    missing, unexpected and mismatched tensors."""
    from transformers.core_model_loading import build_glob_alternation
    from transformers.utils.loading_report import LoadStateDictInfo

    states = {str(path): _state_of(str(path)) for path in paths}
    files = WeightFiles.of({path: FileLayout.read(path) for path in states})
    conversions = load_config.weight_mapping or ()
    found = origins_in(model, files.entries, conversions)
    if found.mismatched and not load_config.ignore_mismatched_sizes:
        (key, shape, wanted), *others = found.mismatched
        raise CheckpointError(
            f"{load_config.pretrained_model_name_or_path}: tensor {key!r} has shape {list(shape)}, the model's has "
            f"{list(wanted)}{f' and {len(others)} more' if others else ''}; load with the config saved beside it, or "
            "pass ignore_mismatched_sizes=True to initialize mismatched tensors"
        )
    plan = load_config.dtype_plan or {}  # dtypes of modules that transformers keeps in fp32
    alternation, pattern_of, _ = build_glob_alternation(list(plan))
    for name, origin in found.of.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        empty = getattr(module, own)
        planned = alternation.search(name) if plan else None
        dtype = plan[pattern_of[planned.lastgroup]] if planned else empty.dtype
        source = FileSource(files, states, origin, tuple(empty.shape), dtype)
        if own in module._parameters:
            tensor = nn.Parameter(torch.empty_like(empty, dtype=dtype), requires_grad=dtype.is_floating_point)
            set_source(tensor, source)
            module._parameters[own] = tensor
        else:  # small, and replicated on every rank
            tensor = module._buffers[own] = torch.empty(empty.shape, dtype=dtype)
            source.read(0, tensor.view(-1), dtype)
        tensor._is_hf_initialized = True  # prevents initialization by transformers
    _tie_equal(model, set(found.missing))
    model._weight_conversions = [each for each in conversions if each.was_used()]  # for saving
    return LoadStateDictInfo(
        missing_keys=set(found.missing),
        unexpected_keys=set(found.unexpected),
        mismatched_keys=set(found.mismatched),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def _tie_equal(model: Any, missing: set[str]) -> None:
    """Ties parameters that are stored twice with equal values. transformers cannot compare them, since the values are
    still in files."""
    for target, source in list(model.all_tied_weights_keys.items()):
        first, second = model.get_parameter(source), model.get_parameter(target)
        if target in missing or source in missing or first is second:
            continue
        if _are_equal(first, second):
            path, _, own = target.rpartition(".")
            model.get_submodule(path)._parameters[own] = first
        else:
            model.all_tied_weights_keys.pop(target)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    sources = source_of(first), source_of(second)
    if first.shape != second.shape or first.dtype is not second.dtype or None in sources:
        return False
    piece_numel = 2**20
    for start in range(0, first.numel(), piece_numel):
        values = torch.empty(2, min(piece_numel, first.numel() - start), dtype=first.dtype)
        for row, source in zip(values, filter(None, sources)):
            source.read(start, row, first.dtype)
        if not torch.equal(*values):
            return False
    return True


def _refuse_incomplete(model: nn.Module, load_config, loading_info, allowed: Sequence[str]) -> None:
    """Raises if tensors of the base model are missing. A missing head is initialized."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    lost = sorted(
        key
        for key in loading_info.missing_keys
        if key.startswith(prefix) and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    )
    if lost:
        raise CheckpointError(
            f"{load_config.pretrained_model_name_or_path}: {len(lost)} tensors of the base model are missing "
            f"({shortened(lost)}); pass a checkpoint of this model, or allow their initialization with "
            f"allow_missing=[{lost[0].rpartition('.')[0]!r}]"
        )


def refuse_placing(subject: str, settings: Mapping[str, Any]) -> None:
    """Raises for arguments of `from_pretrained` that place parameters on devices."""
    for name in _PLACING:
        if settings.get(name) is not None:
            raise ConfigError(
                f"{subject}: {name}={settings[name]!r} places parameters, which conflicts with sharding; remove it"
            )


def resolve(name_or_folder: str | os.PathLike, **kwargs: Any) -> str | Path:
    """Checks the files of a model folder and returns it, or returns the name of a model on the Hub. Raises
    [`CheckpointError`] for a path that is not a model folder."""
    folder = Path(os.path.expanduser(name_or_folder))
    if folder.is_dir():
        check_pretrained(folder / kwargs.get("subfolder", ""), variant=kwargs.get("variant"))
        return folder
    if folder.is_absolute() or folder.exists() or str(name_or_folder).startswith(("~", "./", "../")):
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {found}; pass the folder of a saved model, or a name on the Hub")
    return str(name_or_folder)


def class_of(config: Any) -> "type[PreTrainedModel] | None":
    """Returns the class in a model's config, or `None` if transformers does not have it."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    found = getattr(transformers, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def pretrained_class(name_or_folder: str | os.PathLike, **kwargs: Any) -> type:
    """Returns the model class of a checkpoint.

    Args:
        name_or_folder (`str` or `os.PathLike`): A folder, or a name on the Hub.
        kwargs: Arguments of `from_pretrained`. Only those that locate the checkpoint (`revision`, `subfolder`,
            `token`, ...) are used.

    Returns:
        `type`: A class of transformers or, for a model with custom code, the auto class for it.

    Raises:
        `CheckpointError`: If there is no config, or transformers does not have its class.
    """
    import transformers

    where = {name: kwargs[name] for name in _LOCATING if name in kwargs}
    config = _from_pretrained(transformers.AutoConfig, os.path.expanduser(name_or_folder), where)
    autos = [name for name in getattr(config, "auto_map", None) or () if name.startswith("AutoModel")]
    found = class_of(config) or next((getattr(transformers, name, None) for name in autos), None)
    if found is not None:
        return found
    names = ", ".join(getattr(config, "architectures", None) or ("no architecture",))
    raise CheckpointError(
        f"{name_or_folder}: its config names {names}, which transformers "
        f"{transformers.__version__} does not have; load the model with its class and pass the model"
    )


def _from_pretrained(auto_class: Any, name: str, kwargs: dict[str, Any]) -> Any:
    from safetensors import SafetensorError

    try:
        return auto_class.from_pretrained(name, **kwargs)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{name}: the model cannot be loaded ({reason}); check the name, or pass a local folder"
        ) from error


def refuse_quantizer(subject: str, settings: Any) -> str | None:
    """Returns the quantizer of a transformers quantization config or its dict in `config.json`, or `None` if the
    weights become ordinary tensors. Raises [`UnsupportedError`] if its weights cannot be sharded."""
    if settings is None:
        return None
    known = settings if isinstance(settings, Mapping) else vars(settings)
    if known.get("dequantize"):
        return None
    if known.get("load_in_4bit") or known.get("load_in_8bit"):
        return SHARDABLE
    method = known.get("quant_method")
    quantizer = str(getattr(method, "value", method))
    if quantizer != SHARDABLE:
        raise UnsupportedError(
            f"{subject}: is quantized with {quantizer}, whose weights cannot be sharded; quantize it with {SHARDABLE} "
            "(BitsAndBytesConfig, 4 or 8 bits), or load it unquantized (dequantize=True, if its config supports it)"
        )
    return quantizer
