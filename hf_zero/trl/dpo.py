"""`trl.DPOTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer

from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroDPOConfig(ZeroTrlArgumentsMixin, DPOConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


class ZeroDPOTrainer(ZeroTrlTrainerMixin, DPOTrainer):
    """`trl.DPOTrainer` with ZeRO. Takes `ZeroDPOConfig`, and everything that `DPOTrainer` takes."""

    config_class = ZeroDPOConfig
