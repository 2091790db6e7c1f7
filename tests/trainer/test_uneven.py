"""Ranks that have different numbers of rows: plain `Trainer` would wait for ever, and all ranks of ours raise."""

from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_zero.errors import DataError
from hf_zero.trainer import uneven
from tests import models
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import Rows, Stream, make
from tests.trainer.test_evaluation import AccuracyByBatch, accuracy


STAGES = (1, 2, 3)
PER_RANK = {"average_tokens_across_devices": False}  # otherwise Trainer scales this loss by the number of ranks


class OwnLoader(Trainer):
    """Every rank makes a loader over rows of its own, which accelerate does not see."""

    counts, batch_size = [1, 1], 2

    def get_eval_dataloader(self, eval_dataset=None):
        return self._own()

    def get_test_dataloader(self, test_dataset):
        return self._own()

    def _own(self):
        rank = self.args.process_index
        return DataLoader(_rows_of(self.counts)[rank], self.batch_size, collate_fn=self.data_collator)


def _rows_of(counts: list[int]) -> list[list[dict]]:
    rows = Rows("bert", sum(counts), seed=1).rows
    return [rows[: counts[0]], rows[counts[0] :]]


def _wanted(rows: list[dict], model) -> tuple[float, np.ndarray]:
    """Loss and logits of the model that is not sharded, of each row alone."""
    with torch.no_grad():
        outputs = [model(**{key: value[None] for key, value in row.items()}) for row in rows]
    return float(torch.stack([out.loss for out in outputs]).mean()), torch.cat([out.logits for out in outputs]).numpy()


def _compare(make_trainer, rows, is_ours=False):
    loss, logits = _wanted(rows, models.build("bert").eval())
    order = np.argsort(logits[:, 0])
    for stage in STAGES:
        by_batch = stage == 3 and not is_ours  # Trainer knows the last batch of accelerate's loaders alone
        metric = AccuracyByBatch() if by_batch else accuracy
        trainer = make_trainer(stage, metric, {"batch_eval_metrics": by_batch, "max_steps": 2, **PER_RANK})
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(loss, rel=1e-5), f"stage {stage}: {found} and {loss}"
        assert found["eval_rows"] == len(rows)
        predicted = trainer.predict(Rows("bert", 9)).predictions
        assert np.allclose(predicted[np.argsort(predicted[:, 0])], logits[order], rtol=1e-5, atol=1e-6)
        assert not trainer.accelerator.gradient_state.in_dataloader
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(losses) == len(set(losses)) == 2, "an evaluation after each step"


# rows of each rank in batches of 2, and what is said; those of equally many are evaluated
OWN_LOADERS = {
    "an empty rank": ([3, 0], "rank 1 has 0 batches, but rank 0 has 2"),
    "short last ones": ([3, 4], "rank 0 has 1 rows in a batch, but rank 1 has 2"),
    "equally many": ([4, 4], None),
}


@pytest.mark.parametrize("case", OWN_LOADERS)
@ranks(2, timeout=240)
def test_own_loaders_are_evaluated_where_ranks_have_equally_many_rows(tmp_path, case):
    counts, message = OWN_LOADERS[case]
    mixin_on = type("Mine", (OwnLoader,), {"counts": counts})

    def make_trainer(stage, metric, settings):
        parts = {"compute_metrics": metric, "eval_dataset": Rows("bert", 1)}
        settings = {"eval_strategy": "steps", "eval_steps": 1, **settings}
        return make(stage, tmp_path, models.build("bert"), Rows("bert"), mixin_on=mixin_on, parts=parts, **settings)

    if message is None:
        _compare(make_trainer, sum(_rows_of(counts), []), is_ours=True)
        return
    with pytest.raises(DataError, match=f"Evaluation: {message}; give all ranks equally many"):
        make_trainer(3, accuracy, {}).evaluate()


class Detects(Trainer):
    """Each row has an object of its own size as its label, as where things are to be found in images."""

    def prediction_step(self, *args, **kwargs):
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, logits, [{"boxes": label.expand(1 + int(label))} for label in labels]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.full("more cases", after=1)
@ranks(2, timeout=100)
def test_rows_are_gathered_as_objects_in_every_evaluation(tmp_path, stage):
    rows, seen = Rows("bert", 8, seed=1).rows, []
    wanted, _ = _wanted(rows, models.build("bert").eval())
    settings = {"eval_use_gather_object": True, "eval_do_concat_batches": False, **PER_RANK}
    parts = {"compute_metrics": lambda found: seen.append(found) or {}, "eval_dataset": Rows("bert", 8, seed=1)}
    trainer = make(stage, tmp_path, models.build("bert"), mixin_on=Detects, parts=parts, **settings)
    for _ in range(2):
        assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
        labels = [len(row["boxes"]) - 1 for batch in seen.pop().label_ids for row in batch]
        assert sorted(labels) == sorted(int(row["labels"]) for row in rows)


def _stream(shards):
    for shard in shards:
        yield from Rows("bert", shard, seed=shard).rows


@pytest.mark.support("iterable data in shards of different lengths", area="Evaluation", stages=STAGES)
@ranks(2, timeout=240)
def test_streams_are_split_by_batches(tmp_path):
    data = datasets.IterableDataset.from_generator(_stream, gen_kwargs={"shards": [5, 3]})

    def make_trainer(stage, metric, settings):
        parts = {"compute_metrics": metric, "eval_dataset": data}
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "accelerator_config": {"dispatch_batches": False}}
        trainer = make(stage, tmp_path, models.build("bert"), Rows("bert"), parts=parts, **settings)
        trainer.get_test_dataloader = lambda _data: trainer.get_eval_dataloader()
        return trainer

    _compare(make_trainer, [*_stream([5, 3])])


class OwnTraining(Trainer):
    """Every rank makes a loader over rows of its own to train on."""

    counts = [1, 1]

    def get_train_dataloader(self):
        rows = _rows_of(self.counts)[self.args.process_index]
        if self.counts[0] > 10:
            rows = Stream(rows)
        return DataLoader(rows, batch_size=1, collate_fn=self.data_collator)


# rows of each rank, accumulation, what is said, steps done
TRAININGS = {
    "the first has fewer": ([2, 4], 1, "rank 0 has 2 batches, but rank 1 has 4", 0),
    "streams": ([13, 11], 2, "rank 1 has 0 batches, but rank 0 has 1", 5),
}


def _own_training(folder, counts, accumulation):
    mixin_on = type("Mine", (OwnTraining,), {"counts": counts})
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 9 if counts[0] > 10 else -1}
    trainer = make(3, folder, models.build("bert"), Rows("bert"), mixin_on=mixin_on, num_train_epochs=2, **settings)
    said = ""
    try:
        trainer.train()
    except DataError as error:
        said = str(error)
    return said, trainer.state.global_step


@pytest.mark.parametrize("case", TRAININGS)
def test_training_stops_on_all_ranks_at_the_first_batch_that_one_lacks(tmp_path, case):
    counts, accumulation, message, steps = TRAININGS[case]
    found = run_ranks(_own_training, 2, str(tmp_path), counts, accumulation, timeout=100)
    assert [step for _, step in found] == [steps] * 2
    assert all(f"training data: {message}; give all ranks" in said for said, _ in found), found


def _even_training(folder):
    compared = mock.Mock(side_effect=AssertionError("known to be even"))
    with mock.patch.object(uneven.Evenly, "__next__", compared):
        make(3, folder, models.build("bert"), Rows("bert"), max_steps=3).train()
        return _own_training(folder, [3, 3], 1)


def test_even_loaders_cost_nothing_and_own_ones_of_one_length_train_to_the_end(tmp_path):
    assert run_ranks(_even_training, 2, str(tmp_path)) == [("", 6)] * 2
