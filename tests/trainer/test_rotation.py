"""Which checkpoints go: those with the fewest steps, never the newest, a finite one, or what is the user's own."""

import os
from pathlib import Path

import pytest
from transformers import Trainer

from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest, SavedRun
from hf_zero.trainer import resumable
from tests.trainer.harness import Rows, train


def make(folder: Path, steps: str) -> None:
    """Checkpoints by their steps, the latest first by their dates. "!": the last step was not finite."""
    for step in steps.split():
        number = None if "!" in step else 1.0
        run = SavedRun(3, 1, weight_dtypes=[], groups=[], scalars={}, loss=number, grad_norm=number)
        checkpoint = folder / f"checkpoint-{step.rstrip('!')}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text("{}")
        Manifest.of_folder(checkpoint, run=run).write(checkpoint)
        os.utime(checkpoint, (4e9 - int(step.rstrip("!")),) * 2)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rotate(folder: Path, limit: int | None, newest: int, best: int | None = None) -> list[str]:
    best_path = None if best is None else str(folder / f"checkpoint-{best}")
    resumable.rotate(str(folder), limit, best_path, str(folder / f"checkpoint-{newest}"))
    return names(folder)


# The checkpoints that there are, the limit, the one just saved, the best one, and those that stay.
ROTATIONS = [
    *(("8 9 10", limit, 10, None, "8 9 10") for limit in (None, 0, 3)),
    ("9 10 100", 1, 100, None, "100"),
    ("60 80 100", 1, 60, None, "60"),
    ("60 80 100", 2, 60, None, "60 100"),
    ("1 2 3 4", 2, 4, 1, "1 4"),
    ("1 2 3 4", 1, 4, 1, "1 4"),
    # the newest that is finite stays as long as no newer one is
    ("1 2 3! 4!", 1, 4, None, "2 4"),
    ("2 4! 5!", 1, 5, None, "2 5"),
    ("2 5! 6", 1, 6, None, "6"),
    # at the end, with a limit of 1, the best alone stays if it is finite
    ("1 2 3!", 1, 3, None, "2 3"),
    ("2 3!", 1, 2, None, "2"),
]


@pytest.mark.quick
@pytest.mark.parametrize("steps, limit, newest, best, kept", ROTATIONS)
def test_those_with_the_fewest_steps_go(tmp_path, steps, limit, newest, best, kept):
    make(tmp_path, steps)
    assert rotate(tmp_path, limit, newest, best) == sorted(f"checkpoint-{step}" for step in kept.split())


def test_what_has_another_name_or_is_a_link_is_the_users(tmp_path):
    own = ["checkpoint-best", "checkpoint-7-mine", "my-checkpoint-7", "checkpoint-"]
    for name in own:
        (tmp_path / name).mkdir()
    make(tmp_path / "elsewhere", "1")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere" / "checkpoint-1")
    (tmp_path / "checkpoint-2").touch()
    make(tmp_path, "8 9")
    found = rotate(tmp_path, 1, newest=9)
    assert found == sorted([*own, "elsewhere", "checkpoint-1", "checkpoint-2", "checkpoint-9"])
    assert rotate(tmp_path, 1, newest=9) == found


@pytest.mark.parametrize("name", [MANIFEST_NAME, "trainer_state.json"])
def test_a_damaged_checkpoint_does_not_count_as_finite(tmp_path, name):
    make(tmp_path, "1 2 3")
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}" / name).write_text("{")
    assert rotate(tmp_path, 1, newest=3) == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("keeps_best", [False, True])
def test_a_run_keeps_what_it_saved_last_and_what_is_not_its_own(tmp_path, keeps_best):
    for name in ("checkpoint-1", "checkpoint-best", "checkpoint-3-mine"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (4e9, 4e9))
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_total_limit": 1}
    if keeps_best:
        evaluating = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        settings |= {**evaluating, "metric_for_best_model": "loss", "greater_is_better": True}  # so the first is best
        settings["parts"] = {"eval_dataset": Rows("bert", 6)}
    train(3, tmp_path, **settings)
    last = "checkpoint-2" if keeps_best else "checkpoint-4"
    assert names(tmp_path) == sorted([last, "checkpoint-3-mine", "checkpoint-best"])


class SpoilsGradients(Trainer):
    """The third step's gradients are NaN, though its loss is not, and so are the weights from then on."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 2:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_the_last_checkpoint_that_is_of_use_stays_whether_gradients_are_clipped_or_not(tmp_path, max_grad_norm):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "save_total_limit": 1}
    nonfinite = {"zero_nonfinite": "ignore", "max_grad_norm": max_grad_norm}
    train(3, tmp_path, mixin_on=SpoilsGradients, **settings, **nonfinite)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
