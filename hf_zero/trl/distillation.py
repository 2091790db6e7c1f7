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
    """`trl.DistillationTrainer` with ZeRO. Takes `ZeroDistillationConfig`, and all that `DistillationTrainer` takes."""

    config_class = ZeroDistillationConfig

    def _compute_loss(self, *args, **kwargs):
        """As in TRL, which reads the teacher's head after the teacher's forward."""
        with gathered(self.teacher_model.get_output_embeddings()):
            return super()._compute_loss(*args, **kwargs)
