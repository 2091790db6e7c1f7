"""One rank has more batches than the other: plain `Trainer` would wait for ever."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from hf_zero.accelerator import shared_batches
from hf_zero.errors import DataError
from hf_zero.trainer import uneven
from tests import models
from tests.distributed import run_ranks
from tests.tiers import in_core
from tests.trainer.harness import Rows, make
from tests.trainer.test_evaluation_ways import AccuracyByBatch, accuracy


STAGES = (1, 2, 3)
# rows of each rank: one has none, and one has more than `per_device_eval_batch_size` says in a batch
OWN_LOADERS = {
    "an empty rank": ([5, 0], 2),
    "an empty first rank": ([0, 3], 2),
    "large batches": ([7, 2], 3),
    "short last ones": ([5, 5], 3),
}


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


def _compare(make_trainer, rows):
    loss, logits = _wanted(rows, models.build("bert").eval())
    order = np.argsort(logits[:, 0])
    for stage in STAGES:
        by_batch = stage == 3
        metric = AccuracyByBatch() if by_batch else accuracy
        trainer = make_trainer(stage, metric, {"batch_eval_metrics": by_batch, "max_steps": 2})
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(loss, rel=1e-5), f"stage {stage}: {found} and {loss}"
        assert found["eval_rows"] == len(rows)
        predicted = trainer.predict(Rows("bert", 9)).predictions
        assert np.allclose(predicted[np.argsort(predicted[:, 0])], logits[order], rtol=1e-5, atol=1e-6)
        assert not trainer.accelerator.gradient_state.in_dataloader
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(losses) == len(set(losses)) == 2, "an evaluation after each step"


def _own_loaders(folder, case):
    counts, batch_size = OWN_LOADERS[case]
    mixin_on = type("Mine", (OwnLoader,), {"counts": counts, "batch_size": batch_size})

    def make_trainer(stage, metric, settings):
        parts = {"compute_metrics": metric, "eval_dataset": Rows("bert", 1)}
        settings = {"eval_strategy": "steps", "eval_steps": 1, **settings}
        return make(stage, folder, models.build("bert"), Rows("bert"), mixin_on=mixin_on, parts=parts, **settings)

    _compare(make_trainer, sum(_rows_of(counts), []))


@pytest.mark.support("Custom loaders with different numbers of batches, {case}", area="Evaluation", stages=STAGES)
@pytest.mark.parametrize("case", in_core(["an empty first rank"], OWN_LOADERS))
def test_a_rank_without_further_rows_takes_part_until_the_last_batch(tmp_path, case):
    run_ranks(_own_loaders, 2, str(tmp_path), case, timeout=240)


class Detects(Trainer):
    """Each row has an object of its own size as its label, as where things are to be found in images."""

    def prediction_step(self, *args, **kwargs):
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, logits, [{"boxes": label.expand(1 + int(label))} for label in labels]


def _objects(folder, stage):
    """In every evaluation, also where ranks have equally many rows."""
    rows, seen = Rows("bert", 8, seed=1).rows, []
    wanted, _ = _wanted(rows, models.build("bert").eval())
    settings = {"eval_use_gather_object": True, "eval_do_concat_batches": False}
    settings["average_tokens_across_devices"] = False
    for base in (OwnLoader, Trainer):
        parts = {"compute_metrics": lambda found: seen.append(found) or {}, "eval_dataset": Rows("bert", 8, seed=1)}
        mixin_on = type("Mine", (Detects, base), {"counts": [7, 1], "batch_size": 2})
        trainer = make(stage, folder, models.build("bert"), mixin_on=mixin_on, parts=parts, **settings)
        for _ in range(2):
            assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
            labels = [len(row["boxes"]) - 1 for batch in seen.pop().label_ids for row in batch]
            assert sorted(labels) == sorted(int(row["labels"]) for row in rows)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.full("more cases", after=1)
def test_rows_are_gathered_as_objects_in_every_evaluation(tmp_path, stage):
    run_ranks(_objects, 2, str(tmp_path), stage, timeout=100)


def _stream(shards):
    for shard in shards:
        yield from Rows("bert", shard, seed=shard).rows


SOURCES = {
    "even_batches=False": {"even_batches": False},
    "iterable data in shards of different lengths": {"dispatch_batches": False},
}


def _uneven(folder, source):
    import datasets

    if source == "even_batches=False":
        data, rows = Rows("bert", 9, seed=1), Rows("bert", 9, seed=1).rows
    else:
        data = datasets.IterableDataset.from_generator(_stream, gen_kwargs={"shards": [5, 2]})
        rows = [*_stream([5, 2])]

    def make_trainer(stage, metric, settings):
        parts = {"compute_metrics": metric, "eval_dataset": data}
        settings = {"eval_strategy": "steps", "eval_steps": 1, "accelerator_config": SOURCES[source], **settings}
        trainer = make(stage, folder, models.build("bert"), Rows("bert"), parts=parts, **settings)
        trainer.get_test_dataloader = lambda _data: trainer.get_eval_dataloader()
        return trainer

    _compare(make_trainer, rows)


@pytest.mark.full("more cases", after=2)
@pytest.mark.support("{source}", area="Evaluation", stages=STAGES)
@pytest.mark.parametrize("source", in_core(["iterable data in shards of different lengths"], SOURCES))
def test_what_accelerate_leaves_uneven_is_evaluated_row_by_row(tmp_path, source):
    run_ranks(_uneven, 2, str(tmp_path), source, timeout=240)


class OwnTraining(Trainer):
    """Every rank makes a loader over rows of its own to train on."""

    counts = [1, 1]

    def get_train_dataloader(self):
        rows = _rows_of(self.counts)[self.args.process_index]
        if self.counts[0] > 10:
            rows = _Stream(rows)
        return DataLoader(rows, batch_size=1, collate_fn=self.data_collator)


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self._rows = rows

    def __iter__(self):
        return iter(self._rows)


# rows of each rank, accumulation, further settings, what is said, steps done
TRAININGS = {
    "the first has fewer": ([2, 4], 1, {}, "step 3: rank 0 has no batches left, but rank 1 has 1", 2),
    "by accumulation": ([7, 6], 4, {"max_steps": 9}, "step 2: rank 1 has 2 batches left, but rank 0 has 3", 1),
    "streams": ([13, 11], 2, {"max_steps": 9}, "step 6: rank 1 has 1 batch left, but rank 0 has 2", 5),
    "none at all": ([0, 3], 1, {}, "before the first step: rank 0 has no batches left, but rank 1 has 3", 0),
}


def _own_training(folder, counts, accumulation, settings, seen=None):
    mixin_on = type("Mine", (OwnTraining,), {"counts": counts})
    settings = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": accumulation, **settings}
    parts = (
        {}
        if seen is None
        else {
            "compute_metrics": lambda found: seen.append(trainer.accelerator.borrows) or {},
            "eval_dataset": Rows("bert", 4),
        }
    )
    trainer = make(3, folder, models.build("bert"), Rows("bert"), mixin_on=mixin_on, parts=parts, **settings)
    said = ""
    try:
        trainer.train()
        assert trainer.accelerator.borrows is None, "after training"
    except DataError as error:
        said = str(error)
    return said, trainer.state.global_step, trainer.lr_scheduler and trainer.lr_scheduler.state_dict()["last_epoch"]


@pytest.mark.parametrize("case", TRAININGS)
@pytest.mark.full("more cases", after=2)
def test_training_stops_on_all_ranks_at_the_first_batch_that_one_lacks(tmp_path, case):
    counts, accumulation, settings, message, steps = TRAININGS[case]
    found = run_ranks(_own_training, 2, str(tmp_path), counts, accumulation, settings, timeout=100)
    assert [step for _, step, _ in found] == [steps] * 2
    assert all(f"training data, {message}; give every rank" in said for said, _, _ in found), found


def _even_training(folder):
    compared = mock.Mock(side_effect=AssertionError("known to be even"))
    with mock.patch.object(uneven, "islice", compared):
        make(3, folder, models.build("bert"), Rows("bert"), max_steps=3).train()
    seen: list = []
    found = _own_training(folder, [3, 3], 1, {"eval_strategy": "epoch"}, seen)
    assert seen == [None, None], "evaluations by loaders that are even"
    return found


def test_even_loaders_cost_nothing_and_own_ones_of_one_length_train_to_the_end(tmp_path):
    assert [(said, steps) for said, steps, _ in run_ranks(_even_training, 2, str(tmp_path))] == [("", 6)] * 2


class GathersRows(Trainer):
    """Gathers a number of each row in training, as TRL's trainers do."""

    gathered: list[int] = []

    def compute_loss(self, model, inputs, **kwargs):
        rows = self.accelerator.gather(inputs["input_ids"][:, 1])
        for_metrics = self.accelerator.gather_for_metrics((inputs["input_ids"][:, 1], inputs["labels"].sum()))
        assert torch.equal(for_metrics[0], rows) and len(for_metrics[1]) <= self.args.world_size
        self.gathered.append(rows.tolist())
        with mock.patch.object(shared_batches, "gather", wraps=shared_batches.gather) as gathers:
            assert len(self.accelerator.gather(inputs["labels"].sum())) == self.args.world_size
            if model.training:
                assert len(self.accelerator.gather_for_metrics(inputs["labels"].sum())) == self.args.world_size
        assert gathers.call_count == 1 + model.training, "numbers, of which each rank has one, are gathered at once"
        return super().compute_loss(model, inputs, **kwargs)


def _gathers_rows(folder, settings, count):
    GathersRows.gathered = []
    settings = {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", **settings}
    parts = {"eval_dataset": Rows("bert", 4)}  # whose evaluation is between the epochs
    make(3, folder, models.build("bert"), Rows("bert", count), mixin_on=GathersRows, parts=parts, **settings).train()
    return GathersRows.gathered


def test_rows_are_gathered_in_training_where_ranks_have_unlike_numbers_of_them(tmp_path):
    found = run_ranks(_gathers_rows, 2, str(tmp_path), {"accelerator_config": {"even_batches": False}}, 7, timeout=100)
    assert found[0] == found[1]
    wanted = sorted(int(row["input_ids"][1]) for row in Rows("bert", 7).rows)
    assert [len(rows) for rows in found[0]] == [4, 3, 4] * 2
    assert sorted(found[0][0] + found[0][1]) == wanted
