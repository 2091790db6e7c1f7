"""A sharded model beside a plain or another sharded one, in one trainer and one process."""

import copy

import pytest
import torch
from torch import nn
from transformers import Trainer

import hf_zero
from tests import models
from tests.distributed import ranks
from tests.trainer.harness import PLAIN, Rows, assert_close, make, record, seed_everything


class Distiller(Trainer):
    """Trains the model to agree with a teacher of more layers, which gets gradients too, and which nobody updates."""

    teacher: nn.Module

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            target = self.teacher(**inputs).logits
        loss = nn.functional.mse_loss(outputs.logits, target) + 0.1 * nn.functional.mse_loss(
            self.teacher(**inputs).logits, outputs.logits.detach()
        )
        return (loss, outputs) if return_outputs else loss


@pytest.mark.support("A plain or sharded teacher beside a sharded student", area="Models in one process")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.full("more cases", after=1)
@ranks(2, timeout=240)
def test_a_student_learns_from_a_teacher_that_is_sharded_or_not(tmp_path, stage):
    teacher = models.llama(layers=5)
    teacher.model.embed_tokens.requires_grad_(False)

    def run(kind, teacher_stage=None):
        seed_everything()
        trainer = make(kind, tmp_path, models.build("llama"), Rows("llama"), mixin_on=Distiller)
        trainer.teacher = copy.deepcopy(teacher)
        if teacher_stage is not None:
            hf_zero.shard(trainer.teacher, stage=teacher_stage)
        trainer.train()
        return record(trainer)

    plain = run(PLAIN)
    assert_close(run(stage), plain, f"stage {stage} beside a plain teacher, and Trainer")
    assert_close(run(stage, teacher_stage=3), plain, f"stage {stage} beside a sharded teacher, and Trainer")
