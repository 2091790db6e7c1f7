"""`--zero_nonfinite`: a step that would destroy the model ends the run, or is left out."""

from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_zero.errors import NonFiniteError
from tests import models
from tests.compare import weights_of
from tests.distributed import ranks
from tests.trainer.harness import Rows, make, seed_everything


BAD_STEP = 3
SETTINGS = {
    "max_steps": 5,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "dataloader_num_workers": 0,
}


class _Spoil(TrainerCallback):
    """From one step on, or in that step alone, one rank's loss is NaN."""

    def __init__(self, model, on_rank: int, num_steps: int = 1):
        self.steps = range(BAD_STEP - 1, BAD_STEP - 1 + num_steps)
        self.is_here = dist.get_rank() == on_rank
        self.spoils = False
        model.register_forward_hook(self._spoil)

    def on_step_begin(self, args, state, control, **kwargs):
        self.spoils = self.is_here and state.global_step in self.steps

    def _spoil(self, module, args, output):
        if self.spoils:
            output.loss = output.loss * float("nan")


def _trainer(folder: str, stage: int, **settings):
    seed_everything()
    model = models.build("bert")
    trainer = make(stage, folder, model, Rows("bert"), **{**SETTINGS, **settings})
    trainer.add_callback(_Spoil(model, on_rank=1))
    return trainer


@pytest.mark.quick
@ranks(2, timeout=240)
def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path):
    flags = ({}, {"max_grad_norm": 0.0}, {"max_grad_norm": 0.0, "zero_offload": "optimizer"})
    for stage in (1, 3):
        for number, settings in enumerate(flags):
            own = f"{tmp_path}/{stage}-{number}"
            trainer = _trainer(own, stage, **settings)
            with pytest.raises(NonFiniteError, match=f"after {BAD_STEP - 1} optimizer steps: .* first in unit"):
                trainer.train()
            names = sorted(path.name for path in Path(own).glob("checkpoint-*"))
            assert names == ["checkpoint-1", "checkpoint-2"], f"{own}: {names}"


@ranks(2)
def test_a_step_that_is_skipped_is_skipped_by_the_schedule(tmp_path):
    for stage in (1, 3):
        trainer = _trainer(f"{tmp_path}/{stage}", stage, zero_nonfinite="skip", lr_scheduler_type="linear")
        trainer.train()
        assert trainer.state.global_step == 5
        assert all(weight.isfinite().all() for weight in weights_of(trainer.model).values())
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        # the schedule of five steps stands still at the one that is left out, as it does with fp16
        assert rates[BAD_STEP - 2] != rates[BAD_STEP - 1] == rates[BAD_STEP], rates
