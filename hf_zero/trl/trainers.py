"""TRL's trainers and configs with ZeRO."""

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
    """`trl.DPOTrainer` with ZeRO. Takes `ZeroDPOConfig` and all arguments of `DPOTrainer`."""

    config_class = ZeroDPOConfig


@dataclass
class ZeroDistillationConfig(ZeroTrlArgumentsMixin, DistillationConfig):
    """`trl.DistillationConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroDistillationTrainer(ZeroTrlTrainerMixin, DistillationTrainer):
    """`trl.DistillationTrainer` with ZeRO. Takes `ZeroDistillationConfig` and all arguments of
    `DistillationTrainer`."""

    config_class = ZeroDistillationConfig

    # TRL reads the teacher's head outside of the teacher's forward, and again in backward.

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
    """`trl.GRPOTrainer` with ZeRO. Takes `ZeroGRPOConfig` and all arguments of `GRPOTrainer`."""

    config_class = ZeroGRPOConfig


@dataclass
class ZeroKTOConfig(ZeroTrlArgumentsMixin, KTOConfig):
    """`trl.KTOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroKTOTrainer(ZeroTrlTrainerMixin, KTOTrainer):
    """`trl.KTOTrainer` with ZeRO. Takes `ZeroKTOConfig` and all arguments of `KTOTrainer`."""

    config_class = ZeroKTOConfig


@dataclass
class ZeroRLOOConfig(ZeroTrlArgumentsMixin, RLOOConfig):
    """`trl.RLOOConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroRLOOTrainer(ZeroTrlTrainerMixin, RLOOTrainer):
    """`trl.RLOOTrainer` with ZeRO. Takes `ZeroRLOOConfig` and all arguments of `RLOOTrainer`."""

    config_class = ZeroRLOOConfig


@dataclass
class ZeroRewardConfig(ZeroTrlArgumentsMixin, RewardConfig):
    """`trl.RewardConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroRewardTrainer(ZeroTrlTrainerMixin, RewardTrainer):
    """`trl.RewardTrainer` with ZeRO. Takes `ZeroRewardConfig` and all arguments of `RewardTrainer`."""

    config_class = ZeroRewardConfig


@dataclass
class ZeroSFTConfig(ZeroTrlArgumentsMixin, SFTConfig):
    """`trl.SFTConfig` with the settings of `hf_zero.ZeroArgumentsMixin`."""


class ZeroSFTTrainer(ZeroTrlTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` with ZeRO. Takes `ZeroSFTConfig` and all arguments of `SFTTrainer`."""

    config_class = ZeroSFTConfig
