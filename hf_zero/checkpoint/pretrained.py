"""`hf_zero.load_pretrained`: transformers builds the model, and its weights stay in files until it is sharded."""

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

# Arguments of `from_pretrained` that give parameters a place of their own, which sharding is to give.
_PLACING = ("device_map", "max_memory", "offload_folder", "tp_plan", "tp_size", "device_mesh", "distributed_config")
# Those that say where a checkpoint is found.
_LOCATING = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")
# Formats whose tensors are made anew when they are read: transformers loads these whole.
_WHOLE = ("quantization_config", "gguf_file", "state_dict")
# The quantizer whose weights can be sharded: they are frozen parameters, each of one dense tensor of bytes.
SHARDABLE = "bitsandbytes"


def load_pretrained(
    auto_class: Any, name_or_folder: str | os.PathLike, *, allow_missing: Sequence[str] = (), **kwargs: Any
) -> Any:
    """Loads a model by `auto_class.from_pretrained` without its weights, which are read when it is sharded.

    The model is built by transformers, on the meta device. Its parameters know in which ranges of which files their
    values are; `hf_zero.shard`, or a `ZeroTrainer`, makes every rank read its own ranges, so that no rank ever holds
    the whole model. Until then it can be changed (PEFT, `requires_grad_`, gradient checkpointing) but not run or
    moved; `hf_zero.materialize` reads it whole. A new head is initialised as by `from_pretrained`, by rank 0 for all.

    Checkpoints of bitsandbytes and GGUF, and adapters with their base, are loaded whole.

    Args:
        auto_class (`type`): such as `AutoModelForCausalLM`, or a model class.
        name_or_folder (`str` or `os.PathLike`): a folder, or a name on the Hub, which transformers resolves.
        allow_missing (`Sequence[str]`): modules or parameters of the base model that may be missing in the files and
            are then initialised, such as `["bert.pooler"]`. Those outside of it, a new head, always may.
        kwargs: for `from_pretrained`.

    Returns:
        `PreTrainedModel`, or what `from_pretrained` returns with `output_loading_info=True`.

    Raises:
        `CheckpointError`: no such folder, no config or weights in it, a truncated or damaged file, weights of the base
            model missing or of other shapes, or a Hub name that cannot be resolved.
        `ConfigError`: arguments that place parameters otherwise than by sharding.
        `UnsupportedError`: a quantizer whose weights cannot be sharded.
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
        logger.warning("%s: %s and others were not found in its files one by one; it is loaded whole", folder, lost[0])
        return _from_pretrained(auto_class, str(name_or_folder), kwargs)
    return loaded


def refuse_placing(subject: str, settings: Mapping[str, Any]) -> None:
    """Refuses arguments of `from_pretrained` that place parameters."""
    for name in _PLACING:
        if settings.get(name) is not None:
            raise ConfigError(
                f"{subject}: {name}={settings[name]!r} places the parameters, as sharding is to do; leave it out"
            )


def resolve(name_or_folder: str | os.PathLike, **kwargs: Any) -> str | Path:
    """Returns the folder of a model after a check of its files, or the name of a model on the Hub. Raises
    [`CheckpointError`] where it is a path, but not the folder of a model."""
    folder = Path(os.path.expanduser(name_or_folder))
    if folder.is_dir():
        check_pretrained(folder / kwargs.get("subfolder", ""), variant=kwargs.get("variant"))
        return folder
    if folder.is_absolute() or folder.exists() or str(name_or_folder).startswith(("~", "./", "../")):
        found = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder}: {found}; give the folder of a saved model, or a name on the Hub")
    return str(name_or_folder)


def class_of(config: Any) -> "type[PreTrainedModel] | None":
    """Returns the class that a model's config names; `None` where transformers lacks it."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    found = getattr(transformers, name, None) if name else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def pretrained_class(name_or_folder: str | os.PathLike, **kwargs: Any) -> type:
    """Returns the class that a checkpoint was saved from.

    Args:
        kwargs: for `from_pretrained`; those that say where to look (`revision`, `subfolder`, `token`, ...) are used.

    Returns:
        `type`: a class of transformers or, for a model with code of its own, the auto class that finds it.

    Raises:
        `CheckpointError`: no config, or one that names no class that this transformers has.
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
            f"{name}: the model cannot be loaded ({reason}); check the name, or give a local folder"
        ) from error


def quantizer_of(settings: Any) -> str | None:
    """Returns the quantizer that a config of transformers' quantizers names, or its dict as in `config.json`; `None`
    when the weights become ordinary tensors."""
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
    """Returns the quantizer of a checkpoint: that of the given config, else that of the checkpoint's own, for which
    the arguments of `from_pretrained` say `where` to look. Raises [`UnsupportedError`] where its weights cannot be
    sharded."""
    from transformers import PretrainedConfig

    if settings is None:
        try:
            settings = PretrainedConfig.get_config_dict(name_or_folder, **where)[0].get("quantization_config")
        except OSError as error:  # else the model's own loading says it better
            _refuse_unfound(str(name_or_folder), error, where)
    found = quantizer_of(settings)
    refuse_quantizer(str(name_or_folder), found)
    return found


def _refuse_unfound(name: str, error: Exception, where: Mapping[str, Any]) -> None:
    """Refuses a name that is on no hub, for which the hub's client has tried long enough: transformers would ask for
    further files, each for as long again. Of a gated model it says itself how to be let in."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    reasons = () if os.path.isdir(name) else tuple(causes(error))
    is_unknown = any(isinstance(each, RepositoryNotFoundError) for each in reasons)
    is_unreached = any(isinstance(each, LocalEntryNotFoundError) for each in reasons)
    is_gated = any(isinstance(each, GatedRepoError) for each in reasons)
    if is_gated or not (is_unknown or is_unreached) or _is_adapter_cached(name, where):
        return
    if is_unknown:
        found = f"no such folder, and no model of that name on {constants.ENDPOINT}, or a private one"
        remedy = "check the name, log in (`hf auth login`) or pass token="
    else:
        found = f"no such folder, the hub's cache lacks files of that name, and {constants.ENDPOINT} was not reached"
        remedy = "check the name and the network"
    raise CheckpointError(f"{name}: {found}; {remedy}, or give a local folder") from error


def _is_adapter_cached(name: str, where: Mapping[str, Any]) -> bool:
    from huggingface_hub import try_to_load_from_cache

    path = os.path.join(where.get("subfolder") or "", "adapter_config.json")
    found = try_to_load_from_cache(name, path, where.get("cache_dir"), where.get("revision"))
    return isinstance(found, str)  # else it is not cached, or known not to exist


def refuse_quantizer(subject: str, quantizer: str | None) -> None:
    """Refuses all quantizers but the one whose weights can be sharded."""
    if quantizer not in (None, SHARDABLE):
        raise UnsupportedError(
            f"{subject}: is quantized by {quantizer}, whose weights cannot be sharded; quantize it with {SHARDABLE} "
            "(BitsAndBytesConfig, 4 or 8 bits), or load it unquantized (dequantize=True, where its config has that)"
        )


def refuse_quantized_model(model: nn.Module) -> None:
    """Refuses quantizers as `refuse_quantizer` does, for a model that is loaded already, with adapters or without."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    refuse_quantizer(type(model).__name__, quantizer_of(settings))
