"""`trl.RLOOTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import RLOOConfig, RLOOTrainer

from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroRLOOConfig(ZeroTrlArgumentsMixin, RLOOConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


class ZeroRLOOTrainer(ZeroTrlTrainerMixin, RLOOTrainer):
    """`trl.RLOOTrainer` with ZeRO. Takes `ZeroRLOOConfig`, and everything that `RLOOTrainer` takes."""

    config_class = ZeroRLOOConfig
