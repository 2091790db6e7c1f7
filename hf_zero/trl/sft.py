"""`trl.SFTTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroSFTConfig(ZeroTrlArgumentsMixin, SFTConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


class ZeroSFTTrainer(ZeroTrlTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` with ZeRO. Takes `ZeroSFTConfig`, and everything that `SFTTrainer` takes."""

    config_class = ZeroSFTConfig
