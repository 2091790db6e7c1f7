"""TRL's trainers with ZeRO: `hf_zero.trl.ZeroSFTTrainer`, its `ZeroSFTConfig`, and their like.

TRL is imported when one of them is first asked for.
"""

from importlib import metadata
from typing import TYPE_CHECKING

from hf_zero.lazy_names import lazy_attribute


if TYPE_CHECKING:  # for editors and type checkers, as in `hf_zero`
    from hf_zero.trl.experimental import ZeroCPOConfig as ZeroCPOConfig
    from hf_zero.trl.experimental import ZeroCPOTrainer as ZeroCPOTrainer
    from hf_zero.trl.experimental import ZeroORPOConfig as ZeroORPOConfig
    from hf_zero.trl.experimental import ZeroORPOTrainer as ZeroORPOTrainer
    from hf_zero.trl.mixin import ZeroTrlArgumentsMixin as ZeroTrlArgumentsMixin
    from hf_zero.trl.mixin import ZeroTrlTrainerMixin as ZeroTrlTrainerMixin
    from hf_zero.trl.trainers import ZeroDistillationConfig as ZeroDistillationConfig
    from hf_zero.trl.trainers import ZeroDistillationTrainer as ZeroDistillationTrainer
    from hf_zero.trl.trainers import ZeroDPOConfig as ZeroDPOConfig
    from hf_zero.trl.trainers import ZeroDPOTrainer as ZeroDPOTrainer
    from hf_zero.trl.trainers import ZeroGRPOConfig as ZeroGRPOConfig
    from hf_zero.trl.trainers import ZeroGRPOTrainer as ZeroGRPOTrainer
    from hf_zero.trl.trainers import ZeroKTOConfig as ZeroKTOConfig
    from hf_zero.trl.trainers import ZeroKTOTrainer as ZeroKTOTrainer
    from hf_zero.trl.trainers import ZeroRewardConfig as ZeroRewardConfig
    from hf_zero.trl.trainers import ZeroRewardTrainer as ZeroRewardTrainer
    from hf_zero.trl.trainers import ZeroRLOOConfig as ZeroRLOOConfig
    from hf_zero.trl.trainers import ZeroRLOOTrainer as ZeroRLOOTrainer
    from hf_zero.trl.trainers import ZeroSFTConfig as ZeroSFTConfig
    from hf_zero.trl.trainers import ZeroSFTTrainer as ZeroSFTTrainer


_KINDS = {
    "trainers": ("DPO", "Distillation", "GRPO", "KTO", "RLOO", "Reward", "SFT"),
    "experimental": ("CPO", "ORPO"),
}
_MODULES = {
    f"Zero{kind}{part}": module for module, kinds in _KINDS.items() for kind in kinds for part in ("Config", "Trainer")
}
# What a module needs, and how to install it. TRL may take away what is experimental in any release.
_NEEDED = {
    "experimental": ("TRL 1.16, in which it is experimental", "'trl~=1.16.0'"),
    "trainers": ("TRL 1.16 or newer", "-U 'trl>=1.16'"),
    "mixin": ("TRL 1.16 or newer", "-U 'trl>=1.16'"),
}
_MODULES |= {"ZeroTrlArgumentsMixin": "mixin", "ZeroTrlTrainerMixin": "mixin"}

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # as in `hf_zero`

    def __getattr__(name: str):
        try:
            return lazy_attribute(__name__, _MODULES, name)
        except ImportError as error:
            if (error.name or "").split(".")[0] != "trl":
                raise
            needed, wanted = _NEEDED[_MODULES[name]]
            raise ImportError(
                f"hf_zero.trl.{name}: needs {needed}, {_found(error)}; pip install {wanted}", name=error.name
            ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _found(error: ImportError) -> str:
    try:
        return f"found {metadata.version('trl')} ({error})"
    except metadata.PackageNotFoundError:
        return "found none"
