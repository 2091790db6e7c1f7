"""`trl.GRPOTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import GRPOConfig, GRPOTrainer

from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroGRPOConfig(ZeroTrlArgumentsMixin, GRPOConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


class ZeroGRPOTrainer(ZeroTrlTrainerMixin, GRPOTrainer):
    """`trl.GRPOTrainer` with ZeRO. Takes `ZeroGRPOConfig`, and everything that `GRPOTrainer` takes."""

    config_class = ZeroGRPOConfig
