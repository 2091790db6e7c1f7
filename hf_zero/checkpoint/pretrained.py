"""`hf_zero.load_pretrained`: transformers builds the model, and the weights stay in files until it is sharded."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_zero.checkpoint.checks import check_pretrained
from hf_zero.checkpoint.lazy_loading import lazy_loading
from hf_zero.engine.source import source_of
from hf_zero.errors import CheckpointError, ConfigError, UnsupportedError, causes


if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

# Arguments of `from_pretrained` that place parameters on devices, which conflicts with sharding.
_PLACING = ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config")
# Arguments that locate a checkpoint.
_LOCATING = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")
# Arguments for formats that change the tensors when they are read: transformers loads these completely.
_WHOLE = ("quantization_config", "gguf_file", "state_dict")
# The quantizer whose weights can be sharded: each is a frozen parameter with a dense tensor of bytes.
SHARDABLE = "bitsandbytes"


def load_pretrained(
    auto_class: Any, name_or_folder: str | os.PathLike, *, allow_missing: Sequence[str] = (), **kwargs: Any
) -> Any:
    """Loads a model with `auto_class.from_pretrained`, but leaves the weights in their files until it is sharded.

    transformers builds the model on the meta device. `hf_zero.shard` or a `ZeroTrainer` then makes every rank read its
    own ranges of the files, so that no rank ever holds the full model. Until then the model can be changed (PEFT,
    `requires_grad_`, gradient checkpointing), but not run or moved; `hf_zero.materialize` reads all weights. A new
    head is initialized like in `from_pretrained`, by rank 0 for all ranks.

    Checkpoints of bitsandbytes and GGUF, and adapters with their base model, are loaded completely on every rank.

    Args:
        auto_class (`type`): An auto class such as `AutoModelForCausalLM`, or a model class.
        name_or_folder (`str` or `os.PathLike`): A folder, or a name on the Hub.
        allow_missing (`Sequence[str]`): Modules or parameters of the base model that are initialized if they are
            missing in the files, such as `["bert.pooler"]`. Parameters outside of the base model (a new head) may
            always be missing. kwargs: Arguments of `from_pretrained`.

    Returns:
        `PreTrainedModel`, or the tuple of `from_pretrained` with `output_loading_info=True`.

    Raises:
        `CheckpointError`: If the folder does not exist or has no config or weights, a file is damaged, weights of the
            base model are missing or of other shapes, or a Hub name cannot be resolved. `ConfigError`: If an argument
            places parameters on devices. `UnsupportedError`: If the weights of a quantizer cannot be sharded.
    """
    refuse_placing("load_pretrained", kwargs)
    name_or_folder = resolve(name_or_folder, **kwargs)
    folder = Path(name_or_folder)
    is_adapter = (folder / kwargs.get("subfolder", "") / "adapter_config.json").exists()
    where = {name: kwargs[name] for name in _LOCATING if name in kwargs}
    quantizer = checkpoint_quantizer(name_or_folder, where, kwargs.get("quantization_config"))
    if is_adapter or quantizer is not None or any(kwargs.get(name) is not None for name in _WHOLE):
        return _from_pretrained(auto_class, str(name_or_folder), kwargs)
    with lazy_loading(allow_missing):
        loaded = _from_pretrained(auto_class, str(name_or_folder), kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    lost = [name for name, p in model.named_parameters() if p.device.type == "meta" and source_of(p) is None]
    lost += [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if lost:
        logger.warning("%s: found no source of %s in the files; every rank loads the full model", folder, lost[0])
        return _from_pretrained(auto_class, str(name_or_folder), kwargs)
    return loaded


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
        _refuse_unfound(name, error, kwargs)
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{name}: the model cannot be loaded ({reason}); check the name, or pass a local folder"
        ) from error


def quantizer_of(settings: Any) -> str | None:
    """Returns the quantizer of a transformers quantization config or its dict in `config.json`. Returns `None` if the
    weights become ordinary tensors."""
    if settings is None:
        return None
    known = settings if isinstance(settings, Mapping) else vars(settings)
    if known.get("dequantize"):
        return None
    if known.get("load_in_4bit") or known.get("load_in_8bit"):
        return SHARDABLE
    method = known.get("quant_method")
    return str(getattr(method, "value", method))


def checkpoint_quantizer(name_or_folder: str | os.PathLike, where: Mapping[str, Any], settings: Any) -> str | None:
    """Returns the quantizer of the given `settings` or, if they are `None`, of the checkpoint's config. `where` has
    the arguments of `from_pretrained` that locate it. Raises [`UnsupportedError`] if its weights cannot be sharded."""
    from transformers import PretrainedConfig

    if settings is None:
        try:
            settings = PretrainedConfig.get_config_dict(name_or_folder, **where)[0].get("quantization_config")
        except OSError as error:  # other errors are reported by the loading of the model
            _refuse_unfound(str(name_or_folder), error, where)
    found = quantizer_of(settings)
    refuse_quantizer(str(name_or_folder), found)
    return found


def _refuse_unfound(name: str, error: Exception, where: Mapping[str, Any]) -> None:
    """Raises for a name that is not on the Hub, or if the Hub cannot be reached: transformers would request further
    files, with long retries for each. For gated models, transformers' own error explains how to get access."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    reasons = () if os.path.isdir(name) else tuple(causes(error))
    is_unknown = any(isinstance(each, RepositoryNotFoundError) for each in reasons)
    is_unreached = any(isinstance(each, LocalEntryNotFoundError) for each in reasons)
    is_gated = any(isinstance(each, GatedRepoError) for each in reasons)
    if is_gated or not (is_unknown or is_unreached) or _is_adapter_cached(name, where):
        return
    if is_unknown:
        found = f"no such folder, and no model of that name on {constants.ENDPOINT}, or it is private"
        remedy = "check the name, log in (`hf auth login`) or pass token="
    else:
        found = f"no such folder, not in the Hub's cache, and {constants.ENDPOINT} cannot be reached"
        remedy = "check the name and the network"
    raise CheckpointError(f"{name}: {found}; {remedy}, or pass a local folder") from error


def _is_adapter_cached(name: str, where: Mapping[str, Any]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    path = os.path.join(where.get("subfolder") or "", "adapter_config.json")
    found = try_to_load_from_cache(name, path, where.get("cache_dir"), where.get("revision"))
    return isinstance(found, str)  # otherwise it is not cached, or is cached as nonexistent


def refuse_quantizer(subject: str, quantizer: str | None) -> None:
    """Raises for quantizers whose weights cannot be sharded."""
    if quantizer not in (None, SHARDABLE):
        raise UnsupportedError(
            f"{subject}: is quantized with {quantizer}, whose weights cannot be sharded; quantize it with {SHARDABLE} "
            "(BitsAndBytesConfig, 4 or 8 bits), or load it unquantized (dequantize=True, if its config supports it)"
        )


def refuse_quantized_model(model: nn.Module) -> None:
    """Calls `refuse_quantizer` for a loaded model, with or without adapters."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    refuse_quantizer(type(model).__name__, quantizer_of(settings))
