"""TRL's trainers with ZeRO: `hf_zero.trl.ZeroSFTTrainer`, its `ZeroSFTConfig`, and their like.

TRL is imported when one of them is first asked for.
"""

from importlib import import_module, metadata


_MODULES = {
    "ZeroDPOConfig": "dpo",
    "ZeroDPOTrainer": "dpo",
    "ZeroDistillationConfig": "distillation",
    "ZeroDistillationTrainer": "distillation",
    "ZeroGRPOConfig": "grpo",
    "ZeroGRPOTrainer": "grpo",
    "ZeroKTOConfig": "kto",
    "ZeroKTOTrainer": "kto",
    "ZeroRLOOConfig": "rloo",
    "ZeroRLOOTrainer": "rloo",
    "ZeroRewardConfig": "reward",
    "ZeroRewardTrainer": "reward",
    "ZeroSFTConfig": "sft",
    "ZeroSFTTrainer": "sft",
    "ZeroTrlArgumentsMixin": "arguments",
    "ZeroTrlTrainerMixin": "mixin",
}

__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ImportError as error:
        if (error.name or "").split(".")[0] != "trl":
            raise
        raise ImportError(
            f"hf_zero.trl.{name}: needs TRL 1.16 or newer, {_found(error)}; pip install -U 'trl>=1.16'", name="trl"
        ) from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _found(error: ImportError) -> str:
    try:
        return f"found {metadata.version('trl')} ({error})"
    except metadata.PackageNotFoundError:
        return "found none"
