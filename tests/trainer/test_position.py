"""A run goes on at the sample where it was, whatever its batches were before and are now."""

import math
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import BatchSampler, Dataset, RandomSampler, SequentialSampler
from transformers import trainer as trainer_module

from hf_zero.trainer import place
from hf_zero.trainer.place import Epochs, Position, Remaining, epochs_of, leave_out, note_order
from tests import models
from tests.distributed import run_ranks
from tests.tiers import in_core
from tests.trainer.harness import Rows, make, seed_everything


pytestmark = pytest.mark.quick


def samples_of_steps(data: Epochs, first: int) -> list[range]:
    """Which places of an epoch's order the steps take from sample `first` on: counted, batch by batch."""
    cut = first - first % data.per_step
    order = [*range(cut), *range(first, data.num_samples)]  # what was taken of the step under way is left out
    batches = [order[begin : begin + data.per_batch] for begin in range(0, len(order), data.per_batch)]
    if data.drop_last and batches and len(batches[-1]) < data.per_batch:
        batches.pop()
    steps = [
        sum(batches[begin : begin + data.accumulation], []) for begin in range(0, len(batches), data.accumulation)
    ]
    return steps[first // data.per_step :]


SHAPES = [
    Epochs(num_samples, per_batch, accumulation, drop_last)
    for num_samples, per_batch in ((20, 4), (23, 4), (5, 7), (24, 1), (100, 32))
    for accumulation in (1, 3)
    for drop_last in (False, True)
    if not drop_last or num_samples >= per_batch
]


@pytest.mark.parametrize("data", SHAPES, ids=str)
def test_a_position_counts_on_as_the_batches_do(data):
    for first in range(data.num_samples):
        start = Position(2, first, 9)
        steps = samples_of_steps(data, first)
        assert start.left(data) == max(start.left(data), 0) == len(steps) or (not steps and start.left(data) <= 0)
        whole = samples_of_steps(data, 0)
        epoch, sample, taken = (2, first, steps) if steps else (3, 0, list(whole))
        for step in range(9, 60):
            assert start.after(step, data) == Position(epoch, sample, step)
            sample += data.per_step
            taken = taken[1:]
            if not taken:
                epoch, sample, taken = epoch + 1, 0, list(whole)


@pytest.mark.parametrize("data", SHAPES, ids=str)
def test_steps_and_epochs_that_are_left_end_where_they_should(data):
    for first in range(0, data.num_samples, 3):
        start = Position(1, first, 9)
        total = start.step + start.steps_until(4, data)
        assert start.after(total, data) == Position(4, 0, total)
        assert start.after(total - 1, data).epoch == 3
        for more in range(1, 30):
            end = start.after(start.step + more, data)
            assert start.epochs_until(more, data) == (end.epoch if end.sample == 0 else end.epoch + 1)


def test_samples_that_were_trained_on_are_left_out_in_their_epoch_alone():
    sampler = Remaining(SequentialSampler(range(6)), epoch=2, first=2, count=3)
    assert list(sampler) == [0, 1, 5] and len(sampler) == 6
    sampler.set_epoch(3)
    assert list(sampler) == [0, 1, 2, 3, 4, 5]


class ReadsSampler(BatchSampler):
    """Looks at the data by its sampler, as samplers of batches may."""

    def __iter__(self):
        return (batch for batch in super().__iter__() if len(batch) <= len(self.sampler.data_source))


def test_batch_samplers_read_their_sampler_and_a_loader_trains_again():
    sampler = RandomSampler(range(12), generator=torch.Generator())
    loader = DataLoaderShard(range(12), batch_sampler=ReadsSampler(sampler, 2, False))
    data = epochs_of(loader, 1)
    for _ in range(2):  # trainings
        assert epochs_of(loader, 1) == data == Epochs(12, 2)
        assert note_order(loader).sampler is sampler
        leave_out(loader, Position(0, 1, 1), data)
        assert loader.batch_sampler.sampler.data_source == range(12)
        assert len(list(loader)) == 6
    again = pickle.loads(pickle.dumps(Remaining(SequentialSampler(range(3)), epoch=0, first=0, count=1)))
    assert list(again) == [1, 2] and again.data_source == range(3)


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
def test_no_sample_comes_twice_or_is_left_out_when_the_number_of_ranks_changes(
    whole, tmp_path, num_ranks, batch_size, accumulation
):
    checkpoint, order = whole
    settings = {**EPOCHS, "gradient_accumulation_steps": accumulation, "save_strategy": "no"}
    resumed = run_ranks(_samples, num_ranks, str(tmp_path), batch_size, settings, str(checkpoint), timeout=240)
    rows, per_step = _rows_of(resumed), num_ranks * batch_size * accumulation
    second, third = rows[: 24 - 8], rows[-24:] if 24 % (num_ranks * batch_size) == 0 else None
    assert second == order[32:48], "the rest of the epoch under way, in its order"
    if third is not None:
        assert third == order[48:], "the last epoch"
    _, steps, max_steps = resumed[0]
    assert steps == max_steps == 8 + math.ceil(16 / per_step) + math.ceil(24 / per_step)


def test_max_steps_is_reached_with_smaller_batches_too(tmp_path):
    settings = {"max_steps": 12, "save_strategy": "steps", "save_steps": 8}
    run_ranks(_samples, 2, str(tmp_path), 4, settings, timeout=240)
    resumed = run_ranks(_samples, 1, str(tmp_path / "on"), 1, settings, str(tmp_path / "checkpoint-8"), timeout=240)
    steps, last, _ = resumed[0]
    assert last == 12 and len(steps) == 4
