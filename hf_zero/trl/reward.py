"""`trl.RewardTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import RewardConfig, RewardTrainer

from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroRewardConfig(ZeroTrlArgumentsMixin, RewardConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


class ZeroRewardTrainer(ZeroTrlTrainerMixin, RewardTrainer):
    """`trl.RewardTrainer` with ZeRO. Takes `ZeroRewardConfig`, and everything that `RewardTrainer` takes."""

    config_class = ZeroRewardConfig
