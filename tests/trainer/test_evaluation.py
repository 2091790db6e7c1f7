"""Evaluation, prediction and generation: every way gives the numbers of plain `Trainer` under DDP."""

import weakref

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import hf_zero
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
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
    "uneven batches": ({}, {}),  # also before training, and with training that goes on afterwards
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
IN_CORE = ("uneven batches", "iterable data, dispatch_batches=False", "batch_eval_metrics", "several data sets")


def _evaluates(folder, way):
    settings, makers = WAYS[way]
    # before training, which Trainer wraps in DDP only a model that it has not evaluated, and with another one after it
    twice = way == "uneven batches"

    def fresh(kind):
        parts = {name: maker() for name, maker in {**DEFAULTS, **makers}.items()}
        data = parts.pop("train_dataset", None) or Rows("bert")
        seed_everything()
        return parts["eval_dataset"], make(
            kind, folder, models.build("bert"), data, parts=parts, max_steps=2, eval_strategy="steps", eval_steps=1,
            eval_on_start=True, **settings,
        )  # fmt: skip

    def run(kind):
        test, trainer = fresh(kind)
        evals = [trainer.evaluate()] if twice else []
        if kind == PLAIN:
            test, trainer = fresh(kind)
        trainer.train()
        evals += [entry for entry in trainer.state.log_history if any(key.startswith("eval_") for key in entry)]
        predicted = trainer.predict(test["long"] if isinstance(test, dict) else test)
        if twice:
            trainer.train()
        return record(trainer), [*map(_numbers, evals), _numbers(predicted.metrics)], predicted.predictions

    wanted_run, wanted, wanted_predictions = run(PLAIN)
    assert_learned(wanted_run, 2)
    runs = {stage: run(stage) for stage in ((0, *STAGES) if twice else STAGES)}
    for stage, (found_run, found, predictions) in runs.items():
        assert_equal(found_run, runs[1][0], f"stage {stage} and stage 1")
        assert_close(found_run, wanted_run, f"stage {stage} and Trainer")
        assert len(found) == len(wanted) >= 4
        for own, other in zip(found, wanted, strict=True):
            assert own == pytest.approx(other, rel=1e-5), f"stage {stage} and Trainer"
        if wanted_predictions is not None:
            assert np.array_equal(predictions, runs[1][2])
            assert np.allclose(predictions, wanted_predictions, rtol=1e-5, atol=1e-6)
    return wanted


def _numbers(metrics: dict) -> dict:
    """Without those that are of time."""
    timed = ("runtime", "_per_second", "preparation_time")
    return {key: value for key, value in metrics.items() if not key.endswith(timed)}


@pytest.mark.quick(cases=1)
@pytest.mark.support("{way}", area="Evaluation", stages=STAGES)
@pytest.mark.parametrize("way", in_core(IN_CORE, WAYS))
def test_every_way_to_evaluate_gives_the_numbers_of_trainer(tmp_path, way):
    found, other = run_ranks(_evaluates, 2, str(tmp_path), way, timeout=240)
    assert found == other, "ranks agree on what they found"
    if way == "uneven batches":
        assert all(metrics["eval_rows"] == 13 for metrics in found[:-1])


@ranks(2, timeout=240)
def test_early_stopping_and_the_best_model_at_the_end(tmp_path):
    from transformers import EarlyStoppingCallback

    def run(kind):
        # The rate is so high that the loss on other data soon grows: the best model is not the last.
        parts = {
            "eval_dataset": Rows("bert", 6, seed=1),
            "compute_metrics": accuracy,
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
        }
        trainer = make(
            kind,
            f"{tmp_path}/{kind}",
            models.build("bert"),
            Rows("bert"),
            parts=parts,
            max_steps=12,
            learning_rate=0.03,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=1,
            save_steps=1,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=False,
        )
        trainer.train()
        return trainer, record(trainer), trainer.evaluate()

    runs = {kind: run(kind) for kind in (1, 3, PLAIN)}
    assert_equal(runs[3][1], runs[1][1], "stage 3 and stage 1")
    # At this rate rounding errors grow with every step; what counts is that the same step is the best.
    assert_close(runs[3][1], runs[PLAIN][1], "stage 3 and Trainer", rtol=1e-3, atol=1e-4)
    for trainer, run, evaluated in runs.values():
        best = int(np.argmin(run.evals)) + 1
        assert trainer.state.global_step == best + 2 < 12, "two evaluations without progress were to stop it"
        assert trainer.state.best_global_step == best
        assert evaluated["eval_loss"] == pytest.approx(min(run.evals), rel=1e-6), "the best model was to be loaded"
    torch.distributed.barrier()
    best = runs[3][0].state.best_global_step
    kept = sorted(path.name for path in (tmp_path / "3").glob("checkpoint-*"))
    assert kept == sorted({f"checkpoint-{best}", f"checkpoint-{best + 2}"}), "save_total_limit and the best one"


def _generates(folder):
    from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

    steps_of = []

    def run(kind):
        model = models.build("t5")
        # Rank 1 stops after a token or two, rank 0 goes on to the limit.
        model.generation_config = GenerationConfig(
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=_first_answer(model) if _rank() == 1 else 1,
            max_length=9,
        )
        settings = dict(output_dir=folder, max_steps=2, report_to=[], disable_tqdm=True, save_strategy="no")
        settings |= dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, predict_with_generate=True)
        settings |= dict(generation_max_length=9, learning_rate=1e-4, adam_epsilon=1e-4)
        if kind == PLAIN:
            args = Seq2SeqTrainingArguments(use_cpu=True, **settings)
            trainer = Seq2SeqTrainer(model=model, args=args)
        else:
            args = hf_zero.ZeroSeq2SeqTrainingArguments(zero_stage=kind, **settings)
            trainer = hf_zero.ZeroSeq2SeqTrainer(model=model, args=args)
        count = [0]
        model.decoder.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        first = trainer.predict(Rows("t5", 7)).predictions
        steps_of.append(count[0])
        further = []
        for settings in ({"num_beams": 3}, {"do_sample": True, "top_k": 20, "num_beams": 1}):
            torch.manual_seed(3 + _rank())
            further.append(trainer.predict(Rows("t5", 7), **settings).predictions)
        return trainer.evaluate(Rows("t5", 7))["eval_loss"], first, *further

    runs = {kind: run(kind) for kind in (3, 2, 1, PLAIN)}
    for kind in (3, 2, 1):
        assert runs[kind][0] == pytest.approx(runs[PLAIN][0], rel=1e-5)
        for found, wanted in zip(runs[kind][1:], runs[PLAIN][1:], strict=True):
            assert np.array_equal(found, wanted), f"stage {kind}: {found} and {wanted}"
    return steps_of


def _rank() -> int:
    return torch.distributed.get_rank()


def _first_answer(model) -> int:
    with torch.no_grad():
        row = Rows("t5", 1).rows[0]
        start = torch.zeros(1, 1, dtype=torch.long)
        return int(model(input_ids=row["input_ids"][None], decoder_input_ids=start).logits[0, -1].argmax())


@pytest.mark.support("predict_with_generate: greedy, beams, sampling", area="Generation", stages=(1, 2, 3))
def test_ranks_that_stop_generating_at_different_lengths_do_not_wait_for_each_other(tmp_path):
    (*_, plain_0), (*_, plain_1) = run_ranks(_generates, 2, str(tmp_path), timeout=240)
    assert plain_0 > plain_1, "rank 1 was to stop early"
