"""Every way in which `Trainer` evaluates gives the numbers of plain `Trainer` under DDP."""

import weakref

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tests import models
from tests.distributed import run_ranks
from tests.tiers import in_core
from tests.trainer.harness import PLAIN, Rows, Stream, assert_close, assert_learned, make, record, seed_everything


STAGES = (1, 2, 3)


class Ragged(Dataset):
    """Rows of unlike lengths, to be padded by `pad`."""

    def __init__(self, count: int, seed: int = 1):
        rows = Rows("bert", count, seed).rows
        lengths = [3 + index * 5 % 7 for index in range(count)]
        self.rows = [
            {"input_ids": row["input_ids"][:length].clamp(min=3), "labels": row["labels"]}
            for row, length in zip(rows, lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


def pad(rows: list[dict]) -> dict:
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.stack([r["labels"] for r in rows])}


def accuracy(prediction) -> dict:
    logits, labels = prediction.predictions, prediction.label_ids
    return {"accuracy": float((logits.argmax(-1) == labels).mean()), "rows": len(labels)}


class AccuracyByBatch:
    """For `batch_eval_metrics`: adds up batch by batch."""

    def __init__(self):
        self.seen, self.right = 0, 0

    def __call__(self, prediction, compute_result: bool) -> dict:
        self.seen += len(prediction.label_ids)
        self.right += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        if not compute_result:
            return {}
        found = {"accuracy": self.right / self.seen, "rows": self.seen}
        self.seen, self.right = 0, 0
        return found


class OnlyTheBest:
    """For `preprocess_logits_for_metrics`: of the logits of a batch, none is left when the next one comes."""

    def __init__(self):
        self.former = lambda: None

    def __call__(self, logits, labels):
        assert self.former() is None, "logits of a former batch are still in memory"
        self.former = weakref.ref(logits)
        return logits.argmax(-1)


def _of_the_best(prediction) -> dict:
    assert prediction.predictions.ndim == 1
    return {
        "accuracy": float((prediction.predictions == prediction.label_ids).mean()),
        "rows": len(prediction.label_ids),
    }


def _with_inputs_and_losses(prediction) -> dict:
    assert prediction.inputs.shape == (13, 10)
    return {**accuracy(prediction), "inputs": int(prediction.inputs.sum()), "mean": float(prediction.losses.mean())}


def _dispatching(**settings) -> dict:
    return {"accelerator_config": settings}


# Settings, and parts of the trainer that are made anew for each: those left out are `DEFAULTS`.
DEFAULTS = {"eval_dataset": lambda: Rows("bert", 13, seed=1), "compute_metrics": lambda: accuracy}
WAYS = {
    "uneven batches": ({}, {}),
    "fewer rows than ranks": ({}, {"eval_dataset": lambda: Rows("bert", 1, seed=1)}),
    "iterable data without length": ({}, {"eval_dataset": lambda: Stream(Rows("bert", 13, seed=1).rows)}),
    "iterable data, dispatch_batches=False": (
        _dispatching(dispatch_batches=False),
        {"eval_dataset": lambda: Stream(Rows("bert", 9, seed=1).rows)},
    ),
    "dispatch_batches=True": (_dispatching(dispatch_batches=True), {}),
    "split_batches=True": (_dispatching(split_batches=True), {}),
    "group_by_length": (
        {"train_sampling_strategy": "group_by_length"},
        {
            "train_dataset": lambda: Ragged(24, seed=0),
            "eval_dataset": lambda: Ragged(13),
            "data_collator": lambda: pad,
        },
    ),
    "eval_accumulation_steps": ({"eval_accumulation_steps": 2}, {}),
    "prediction_loss_only": ({"prediction_loss_only": True}, {}),
    "batch_eval_metrics": ({"batch_eval_metrics": True}, {"compute_metrics": AccuracyByBatch}),
    "preprocess_logits_for_metrics": (
        {},
        {"compute_metrics": lambda: _of_the_best, "preprocess_logits_for_metrics": OnlyTheBest},
    ),
    "include_for_metrics": (
        {"include_for_metrics": ["inputs", "loss"]},
        {"compute_metrics": lambda: _with_inputs_and_losses},
    ),
    "several data sets": (
        {},
        {"eval_dataset": lambda: {"short": Rows("bert", 3, seed=1), "long": Rows("bert", 13, seed=2)}},
    ),
    "no data": ({}, {"eval_dataset": lambda: Rows("bert", 0, seed=1)}),
}
IN_CORE = ("iterable data, dispatch_batches=False", "batch_eval_metrics", "several data sets")


def _evaluates(folder, way):
    settings, makers = WAYS[way]

    def run(kind):
        parts = {name: maker() for name, maker in {**DEFAULTS, **makers}.items()}
        data = parts.pop("train_dataset", None) or Rows("bert")
        seed_everything()
        trainer = make(
            kind, folder, models.build("bert"), data, parts=parts, max_steps=2, eval_strategy="steps", eval_steps=1,
            eval_on_start=True, **settings,
        )  # fmt: skip
        trainer.train()
        evals = [entry for entry in trainer.state.log_history if any(key.startswith("eval_") for key in entry)]
        test = parts["eval_dataset"]
        predicted = trainer.predict(test["long"] if isinstance(test, dict) else test)
        return record(trainer), [*map(_numbers, evals), _numbers(predicted.metrics)], predicted.predictions

    wanted_run, wanted, wanted_predictions = run(PLAIN)
    assert_learned(wanted_run, 2)
    for stage in STAGES:
        found_run, found, predictions = run(stage)
        assert_close(found_run, wanted_run, f"stage {stage} and Trainer")
        assert len(found) == len(wanted) >= 4
        for own, other in zip(found, wanted, strict=True):
            assert own == pytest.approx(other, rel=1e-5), f"stage {stage} and Trainer"
        if wanted_predictions is not None:
            assert np.allclose(predictions, wanted_predictions, rtol=1e-5, atol=1e-6)
    return wanted


def _numbers(metrics: dict) -> dict:
    """Without those that are of time."""
    timed = ("runtime", "_per_second", "preparation_time")
    return {key: value for key, value in metrics.items() if not key.endswith(timed)}


@pytest.mark.support("{way}", area="Evaluation", stages=STAGES)
@pytest.mark.parametrize("way", in_core(IN_CORE, WAYS))
def test_every_way_to_evaluate_gives_the_numbers_of_trainer(tmp_path, way):
    found, other = run_ranks(_evaluates, 2, str(tmp_path), way, timeout=240)
    assert found == other, "ranks agree on what they found"
    if way == "uneven batches":
        assert all(metrics["eval_rows"] == 13 for metrics in found[:-1])
