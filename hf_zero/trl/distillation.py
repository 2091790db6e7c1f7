"""`trl.DistillationTrainer` with ZeRO."""

from dataclasses import dataclass

from trl import DistillationConfig, DistillationTrainer

from hf_zero.engine import gathered
from hf_zero.trl.arguments import ZeroTrlArgumentsMixin
from hf_zero.trl.mixin import ZeroTrlTrainerMixin


@dataclass
class ZeroDistillationConfig(ZeroTrlArgumentsMixin, DistillationConfig):
    __doc__ = ZeroTrlArgumentsMixin.__doc__


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
