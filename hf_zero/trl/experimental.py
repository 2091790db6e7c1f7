"""Trainers of `trl.experimental` with ZeRO, each with the config that it takes.

They have a module of their own, for TRL may move what is experimental in any release, and warns when it is imported.
"""

from dataclasses import dataclass

from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from hf_zero.trl.mixin import ZeroTrlArgumentsMixin, ZeroTrlTrainerMixin


@dataclass
class ZeroCPOConfig(ZeroTrlArgumentsMixin, CPOConfig):
    """`trl.experimental.cpo.CPOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroCPOTrainer(ZeroTrlTrainerMixin, CPOTrainer):
    """`trl.experimental.cpo.CPOTrainer` with ZeRO. Takes `ZeroCPOConfig`, and what `CPOTrainer` takes."""

    config_class = ZeroCPOConfig


@dataclass
class ZeroORPOConfig(ZeroTrlArgumentsMixin, ORPOConfig):
    """`trl.experimental.orpo.ORPOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroORPOTrainer(ZeroTrlTrainerMixin, ORPOTrainer):
    """`trl.experimental.orpo.ORPOTrainer` with ZeRO. Takes `ZeroORPOConfig`, and what `ORPOTrainer` takes."""

    config_class = ZeroORPOConfig
