"""TRL's trainers with ZeRO, each with the config that it takes. `hf_zero.trl` imports them when one is asked for."""

from dataclasses import dataclass

from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from hf_zero.compat import check_overrides
from hf_zero.engine import gathered
from hf_zero.trl.mixin import ZeroTrlArgumentsMixin, ZeroTrlTrainerMixin


@dataclass
class ZeroDPOConfig(ZeroTrlArgumentsMixin, DPOConfig):
    """`trl.DPOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroDPOTrainer(ZeroTrlTrainerMixin, DPOTrainer):
    """`trl.DPOTrainer` with ZeRO. Takes `ZeroDPOConfig`, and everything that `DPOTrainer` takes."""

    config_class = ZeroDPOConfig


@dataclass
class ZeroDistillationConfig(ZeroTrlArgumentsMixin, DistillationConfig):
    """`trl.DistillationConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroDistillationTrainer(ZeroTrlTrainerMixin, DistillationTrainer):
    """`trl.DistillationTrainer` with ZeRO. Takes `ZeroDistillationConfig`, and what `DistillationTrainer` takes."""

    config_class = ZeroDistillationConfig

    # TRL reads the teacher's head beside the teacher's forward, and again in backward.

    def compute_loss(self, *args, **kwargs):
        with gathered(self.teacher_model.get_output_embeddings()):
            return super().compute_loss(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        with gathered(self.teacher_model.get_output_embeddings()):
            return super().training_step(*args, **kwargs)


check_overrides(ZeroDistillationTrainer, DistillationTrainer, ("compute_loss", "training_step"))


@dataclass
class ZeroGRPOConfig(ZeroTrlArgumentsMixin, GRPOConfig):
    """`trl.GRPOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroGRPOTrainer(ZeroTrlTrainerMixin, GRPOTrainer):
    """`trl.GRPOTrainer` with ZeRO. Takes `ZeroGRPOConfig`, and everything that `GRPOTrainer` takes."""

    config_class = ZeroGRPOConfig


@dataclass
class ZeroKTOConfig(ZeroTrlArgumentsMixin, KTOConfig):
    """`trl.KTOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroKTOTrainer(ZeroTrlTrainerMixin, KTOTrainer):
    """`trl.KTOTrainer` with ZeRO. Takes `ZeroKTOConfig`, and everything that `KTOTrainer` takes."""

    config_class = ZeroKTOConfig


@dataclass
class ZeroRLOOConfig(ZeroTrlArgumentsMixin, RLOOConfig):
    """`trl.RLOOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroRLOOTrainer(ZeroTrlTrainerMixin, RLOOTrainer):
    """`trl.RLOOTrainer` with ZeRO. Takes `ZeroRLOOConfig`, and everything that `RLOOTrainer` takes."""

    config_class = ZeroRLOOConfig


@dataclass
class ZeroRewardConfig(ZeroTrlArgumentsMixin, RewardConfig):
    """`trl.RewardConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroRewardTrainer(ZeroTrlTrainerMixin, RewardTrainer):
    """`trl.RewardTrainer` with ZeRO. Takes `ZeroRewardConfig`, and everything that `RewardTrainer` takes."""

    config_class = ZeroRewardConfig


@dataclass
class ZeroSFTConfig(ZeroTrlArgumentsMixin, SFTConfig):
    """`trl.SFTConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroSFTTrainer(ZeroTrlTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` with ZeRO. Takes `ZeroSFTConfig`, and everything that `SFTTrainer` takes."""

    config_class = ZeroSFTConfig
