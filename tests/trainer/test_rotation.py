"""Which checkpoints go: those with the fewest steps, never the newest, a finite one, or what is the user's own."""

import os
from pathlib import Path

import pytest
from transformers import Trainer

from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest, SavedRun
from hf_zero.trainer import resumable
from tests.trainer.harness import Rows, train


def make(folder: Path, steps: dict[int, bool]) -> None:
    """Checkpoints by their steps, and whether the last step of each was finite."""
    for step, is_finite in steps.items():
        number = 1.0 if is_finite else None
        run = SavedRun(3, 1, weight_dtypes=[], groups=[], scalars={}, loss=number, grad_norm=number)
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text("{}")
        Manifest.of_folder(checkpoint, run=run).write(checkpoint)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rotate(folder: Path, limit: int | None, newest: int, best: int | None = None) -> list[str]:
    best_path = None if best is None else str(folder / f"checkpoint-{best}")
    resumable.rotate(str(folder), limit, best_path, str(folder / f"checkpoint-{newest}"))
    return names(folder)


@pytest.mark.parametrize("limit", [None, 0, 3])
def test_nothing_goes_within_the_limit(tmp_path, limit):
    make(tmp_path, {8: True, 9: True, 10: True})
    assert len(rotate(tmp_path, limit, newest=10)) == 3


@pytest.mark.quick
def test_steps_count_and_not_dates(tmp_path):
    make(tmp_path, {9: True, 10: True, 100: True})
    os.utime(tmp_path / "checkpoint-9", (4e9, 4e9))
    assert rotate(tmp_path, 1, newest=100) == ["checkpoint-100"]


def test_the_one_just_saved_stays_although_others_have_more_steps(tmp_path):
    make(tmp_path, {60: True, 80: True, 100: True})
    assert rotate(tmp_path, 1, newest=60) == ["checkpoint-60"]
    make(tmp_path, {80: True, 100: True})
    assert rotate(tmp_path, 2, newest=60) == ["checkpoint-100", "checkpoint-60"]


def test_what_has_another_name_or_is_a_link_is_the_users(tmp_path):
    own = ["checkpoint-best", "checkpoint-7-mine", "my-checkpoint-7", "checkpoint-"]
    for name in own:
        (tmp_path / name).mkdir()
    make(tmp_path / "elsewhere", {1: True})
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "elsewhere" / "checkpoint-1")
    (tmp_path / "checkpoint-2").touch()
    make(tmp_path, {8: True, 9: True})
    found = rotate(tmp_path, 1, newest=9)
    assert found == sorted([*own, "elsewhere", "checkpoint-1", "checkpoint-2", "checkpoint-9"])
    assert rotate(tmp_path, 1, newest=9) == found


def test_the_best_stays(tmp_path):
    make(tmp_path, {1: True, 2: True, 3: True, 4: True})
    assert rotate(tmp_path, 2, newest=4, best=1) == ["checkpoint-1", "checkpoint-4"]
    assert rotate(tmp_path, 1, newest=4, best=1) == ["checkpoint-1", "checkpoint-4"]


def test_the_newest_finite_one_stays_as_long_as_no_newer_one_is(tmp_path):
    make(tmp_path, {1: True, 2: True, 3: False, 4: False})
    assert rotate(tmp_path, 1, newest=4) == ["checkpoint-2", "checkpoint-4"]
    make(tmp_path, {5: False})
    assert rotate(tmp_path, 1, newest=5) == ["checkpoint-2", "checkpoint-5"]
    make(tmp_path, {6: True})
    assert rotate(tmp_path, 1, newest=6) == ["checkpoint-6"]


@pytest.mark.parametrize("name", [MANIFEST_NAME, "trainer_state.json"])
def test_a_damaged_checkpoint_does_not_count_as_finite(tmp_path, name):
    make(tmp_path, {1: True, 2: True, 3: True})
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}" / name).write_text("{")
    assert rotate(tmp_path, 1, newest=3) == ["checkpoint-1", "checkpoint-3"]


def test_at_the_end_the_best_alone_stays_if_it_is_finite(tmp_path):
    make(tmp_path, {1: True, 2: True, 3: False})
    assert rotate(tmp_path, 1, newest=3) == ["checkpoint-2", "checkpoint-3"]
    assert rotate(tmp_path, 1, newest=2) == ["checkpoint-2"]


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
