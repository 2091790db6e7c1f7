"""TRL's trainers and configs with ZeRO, such as `hf_zero.trl.ZeroSFTTrainer` and `ZeroSFTConfig`.

TRL is imported on first access.
"""

from importlib import metadata
from typing import TYPE_CHECKING

from hf_zero.lazy_names import lazy_package


if TYPE_CHECKING:  # for editors and type checkers, as in `hf_zero`
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


_NAMES = {
    "trainers": [
        f"Zero{kind}{part}"
        for kind in ("DPO", "Distillation", "GRPO", "KTO", "RLOO", "Reward", "SFT")
        for part in ("Config", "Trainer")
    ],
    "mixin": ["ZeroTrlArgumentsMixin", "ZeroTrlTrainerMixin"],
}

__all__ = [name for names in _NAMES.values() for name in names]

if not TYPE_CHECKING:  # as in `hf_zero`
    _get, __dir__ = lazy_package(__name__, _NAMES)

    def __getattr__(name: str):
        try:
            return _get(name)
        except ImportError as error:
            if (error.name or "").split(".")[0] != "trl":
                raise
            raise ImportError(
                f"hf_zero.trl.{name}: requires TRL 1.16 or newer, {_found(error)}; pip install -U 'trl>=1.16'",
                name=error.name,
            ) from error


def _found(error: ImportError) -> str:
    try:
        return f"found {metadata.version('trl')} ({error})"
    except metadata.PackageNotFoundError:
        return "found none"
