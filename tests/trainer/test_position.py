"""A run goes on at its place in the data, or at the last complete step where its batches are of another size."""

import math
from pathlib import Path
from unittest import mock

import pytest
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import Dataset
from transformers import trainer as trainer_module

from hf_zero.trainer import place
from tests import models
from tests.distributed import run_ranks
from tests.tiers import in_core
from tests.trainer.harness import Rows, make, seed_everything


pytestmark = pytest.mark.quick


def test_a_run_goes_on_at_a_complete_step_and_rows_that_come_again_are_told(caplog):
    record = {"batch": 4, "rows": 4, "accumulation": 2}
    assert place.batches_had(record, 8, 1) == 2
    assert place.batches_had({**record, "batch": 5}, 8, 1) == 3  # a pass that was over
    assert place.batches_had({**record, "batch": 5}, 4, 2) == 5
    assert not caplog.text
    assert place.batches_had(record, 3, 2) == 4
    assert "at a complete step of 6 rows, so 4 rows are trained on again" in caplog.text


@pytest.mark.parametrize("submesh, skipped", [(None, 6), ("tp", 3)])
def test_batches_that_all_ranks_share_are_skipped_once(submesh, skipped):
    loader = DataLoaderDispatcher(range(12), batch_size=1)
    loader.submesh_tp, loader.state = submesh, mock.Mock(num_processes=2)
    with mock.patch.object(place, "skip_first_batches") as skip, place.skipping_dealt_batches():
        trainer_module.skip_first_batches(loader, 3)
    skip.assert_called_once_with(loader, skipped)


class Numbered(Dataset):
    """Rows that note which of them a rank was given."""

    def __init__(self, count: int):
        self.rows = Rows("bert", count)
        self.given: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        self.given.append(index)
        return self.rows[index]


def _samples(folder, batch_size, settings, resume=None):
    """Which rows every rank trained on, as one list in the order of the steps; the logged steps."""
    data = Numbered(24)
    seed_everything()
    trainer = make(3, folder, models.build("bert"), data, per_device_train_batch_size=batch_size, **settings)
    steps = []
    original = trainer.training_step

    def training_step(model, inputs, num_items_in_batch=None):
        steps.append(inputs["input_ids"].tolist())
        return original(model, inputs, num_items_in_batch)

    trainer.training_step = training_step
    trainer.train(resume_from_checkpoint=resume)
    return steps, trainer.state.global_step, trainer.state.max_steps


def _rows_of(results) -> list[str]:
    """The rows of all ranks, step by step."""
    steps = zip(*(steps for steps, _, _ in results))
    return [str(row) for micros in steps for micro in micros for row in micro]


# 24 rows; 2 ranks with batches of 2: step 8 lies in the second epoch, 8 rows into it
EPOCHS = {"max_steps": -1, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 8}

# Ranks, batch size, accumulation.
CHANGES = [(1, 4, 1), (1, 3, 1), (3, 2, 1), (2, 5, 1), (2, 1, 3), (4, 1, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[str]]:
    """A run that nothing interrupts: its checkpoint, and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    order = _rows_of(run_ranks(_samples, 2, str(folder), 2, EPOCHS, timeout=240))
    assert len(order) == 72
    return folder / "checkpoint-8", order


@pytest.mark.parametrize(
    "num_ranks, batch_size, accumulation",
    in_core(CHANGES[:-1], CHANGES),
)
def test_the_rest_of_the_epoch_is_trained_on_when_the_number_of_ranks_changes(
    whole, tmp_path, num_ranks, batch_size, accumulation
):
    checkpoint, order = whole
    settings = {**EPOCHS, "gradient_accumulation_steps": accumulation, "save_strategy": "no"}
    resumed = run_ranks(_samples, num_ranks, str(tmp_path), batch_size, settings, str(checkpoint), timeout=240)
    rows, per_step = _rows_of(resumed), num_ranks * batch_size * accumulation
    had = 8 // per_step * per_step  # those of the step under way come again
    assert rows[: 24 - had] == order[24 + had : 48], "the rest of the epoch under way, in its order"
    if 24 % (num_ranks * batch_size) == 0:
        assert rows[-24:] == order[48:], "the last epoch"
    _, steps, max_steps = resumed[0]
    assert steps == max_steps == 8 + math.ceil((24 - had) / per_step) + math.ceil(24 / per_step)


def test_max_steps_is_reached_with_smaller_batches_too(tmp_path):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 8}
    run_ranks(_samples, 2, str(tmp_path), 4, settings, timeout=240)
    resumed = run_ranks(_samples, 1, str(tmp_path / "on"), 1, settings, str(tmp_path / "checkpoint-8"), timeout=240)
    steps, last, _ = resumed[0]
    assert last == 12 and len(steps) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 8},
        {"max_steps": 8, "ignore_data_skip": True},
        {"max_steps": 5},
        {"max_steps": -1, "num_train_epochs": 1},
    ],
)
def test_a_run_with_no_steps_left_trains_none(whole, tmp_path, settings):
    resumed = run_ranks(_samples, 2, str(tmp_path), 2, settings, str(whole[0]), timeout=240)
    assert [(steps, last) for steps, last, _ in resumed] == [([], 8)] * 2


def _saved_again(folder: str, resume: str) -> None:
    settings = {"max_steps": 8, "num_train_epochs": 3}
    trainer = make(3, folder, models.build("bert"), Numbered(24), per_device_train_batch_size=2, **settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer._save_checkpoint(trainer.model, trial=None)


def test_a_checkpoint_of_a_run_with_no_steps_left_is_at_the_same_place(whole, tmp_path):
    run_ranks(_saved_again, 2, str(tmp_path), str(whole[0]), timeout=240)
    wanted, found = (
        run_ranks(_samples, 2, str(tmp_path / name), 2, {**EPOCHS, "save_strategy": "no"}, str(folder), timeout=240)
        for name, folder in (("a", whole[0]), ("b", tmp_path / "checkpoint-8"))
    )
    assert found == wanted and all(steps for steps, _, _ in wanted)
