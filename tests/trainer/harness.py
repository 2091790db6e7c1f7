"""One way to make a trainer for all that is compared: `Trainer` under DDP, and `ZeroTrainer` at any stage."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import hf_zero
from tests import models
from tests.compare import assert_close as compare_runs
from tests.compare import assert_equal, weights_of


PLAIN = "plain"  # in place of a stage: transformers' own Trainer, which wraps the model in DDP

# [Note: eps is 1e-4] where a gradient is nothing but rounding error, AdamW moves the weight by
# lr * m / (sqrt(v) + eps), and with torch's 1e-8 that is up to lr in any direction; see test_parity.
SETTINGS = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
    "logging_steps": 1,
    "logging_first_step": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


class Rows(Dataset):
    """Examples for one of `tests.models`: of fixed length, so that batches stack; labels of tokens are ragged."""

    def __init__(self, name: str, count: int = 24, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        batches = [models.BATCHES[name](generator) for _ in range(-(-count // 2))]
        rows = [{key: value[index] for key, value in batch.items()} for batch in batches for index in range(2)]
        self.rows = rows[:count]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Stream(IterableDataset):
    """Rows that come one after the other, nobody knows how many."""

    def __init__(self, rows: list):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@dataclass
class Run:
    """What a trainer leaves behind: everything that it logged, and the weights."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    evals: list[float]
    weights: dict[str, Tensor]


def make(kind, folder, model: nn.Module, train=None, *, mixin_on=None, parts=None, **settings):
    """A trainer on this rank.

    Args:
        kind: `PLAIN` or a stage.
        folder: its output_dir.
        model (`nn.Module`): not yet sharded.
        train: the data to train on.
        mixin_on (`type`): a subclass of `Trainer` to use instead.
        parts (`dict`): for the trainer, beyond model, arguments and data.
        settings: beyond or instead of `SETTINGS`; those that begin with `zero_` are left out of plain training.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    reset_accelerate()
    settings = {**SETTINGS, "output_dir": str(folder), **settings}
    trainer_class = mixin_on or Trainer
    if kind == PLAIN:
        settings = {key: value for key, value in settings.items() if not key.startswith("zero_")}
        settings.setdefault("ddp_find_unused_parameters", False)
        args = TrainingArguments(use_cpu=True, **settings)
    else:
        args = hf_zero.ZeroTrainingArguments(zero_stage=kind, **settings)
        trainer_class = type("MyTrainer", (hf_zero.ZeroTrainerMixin, trainer_class), {})
    trainer = trainer_class(model=model, args=args, train_dataset=train, **(parts or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer


def reset_accelerate() -> None:
    """Forgets what accelerate keeps from one trainer to the next in a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for singleton in (AcceleratorState, GradientState, PartialState):
        singleton._reset_state()


def train(kind, folder, name: str = "bert", *, data=None, model=None, resume=None, **kwargs) -> Run:
    """Makes a trainer for one of `tests.models`, trains, and returns what it left behind."""
    seed_everything()
    model = model if model is not None else models.build(name)
    trainer = make(kind, folder, model, Rows(name) if data is None else data, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return record(trainer)


def compare(run, *, stages=(1, 2, 3), steps: int = 4, equal=None, **close) -> dict[Any, Run]:
    """Calls `run` with each stage and `PLAIN`: every stage gives the numbers of plain training to rounding.

    Args:
        run (`Callable`): returns the `Run` of a stage, or of `PLAIN`.
        steps (`int`): that plain training takes.
        equal: pairs of stages that agree bit for bit. By default all of them do.
        close: for `assert_close`.
    """
    runs = {kind: run(kind) for kind in (PLAIN, *stages)}
    assert_learned(runs[PLAIN], steps)
    for stage in stages:
        assert_close(runs[stage], runs[PLAIN], f"stage {stage} and plain training", **close)
    for a, b in [(stage, stages[0]) for stage in stages[1:]] if equal is None else equal:
        assert_equal(runs[a], runs[b], f"stage {a} and stage {b}")
    return runs


def seed_everything(seed: int = 5) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def record(trainer) -> Run:
    """What a trainer has logged, and its weights, whole."""
    history = trainer.state.log_history

    def logged(key: str) -> list:
        return [entry[key] for entry in history if key in entry]

    return Run(
        logged("loss"), logged("grad_norm"), logged("learning_rate"), logged("eval_loss"), weights_of(trainer.model)
    )


def assert_close(a: Run, b: Run, what: str, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """To rounding. `atol` counts where all of a tensor's elements are small: steps * lr * rounding error of a gradient
    / eps, 10 * 1e-3 * 1e-7 / 1e-4 at most."""
    compare_runs(a, b, what, loss=rtol, norm=rtol, weight=rtol, atol=atol)


def assert_learned(run: Run, steps: int = 4) -> None:
    """The comparison was of a training that did something: as many steps as wanted, with gradients."""
    assert len(run.norms) == steps and all(isinstance(norm, float) and norm > 0 for norm in run.norms), run.norms
    assert all(np.isfinite(run.losses)), run.losses
