"""`trl.KTOTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import KTOConfig, KTOTrainer

from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroKTOConfig(ZeroTrlArgumentsMixin, KTOConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


class ZeroKTOTrainer(ZeroTrlTrainerMixin, KTOTrainer):
    """`trl.KTOTrainer` with ZeRO. Takes `ZeroKTOConfig`, and everything that `KTOTrainer` takes."""

    config_class = ZeroKTOConfig
