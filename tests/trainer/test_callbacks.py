"""Callbacks are called in the order of `Trainer`, and can see real values."""

import pytest
import torch
from transformers import TrainerCallback

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.distributed import ranks, run_ranks
from tests.trainer.harness import PLAIN, Rows, make


EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


class Watcher(TrainerCallback):
    """Notes every event, with one weight as it is at that moment and the keys of what was logged."""

    def __init__(self):
        self.seen = []

    def note(self, event, args, state, control, model=None, optimizer=None, logs=None, **kwargs):
        weight = None
        if event in ("on_step_end", "on_train_begin", "on_train_end"):
            with hf_zero.gathered(model.bert.encoder.layer[1].attention.self.query.weight):
                weight = model.bert.encoder.layer[1].attention.self.query.weight.detach().clone()
        rate = optimizer.param_groups[0]["lr"] if optimizer is not None else None
        self.seen.append((event, weight, rate, sorted(logs or ())))


for _event in EVENTS:
    setattr(Watcher, _event, lambda self, *args, _event=_event, **kwargs: self.note(_event, *args, **kwargs))


def _watch(folder):
    def run(kind):
        watcher = Watcher()
        parts = {"callbacks": [watcher], "eval_dataset": Rows("bert", 5)}
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make(
            kind,
            f"{folder}/{kind}",
            models.build("bert"),
            Rows("bert"),
            parts=parts,
            gradient_accumulation_steps=2,
            **settings,
        )
        trainer.train()
        return watcher.seen

    runs = {kind: run(kind) for kind in (2, 3, PLAIN)}
    assert {"on_step_end", "on_substep_end", "on_pre_optimizer_step", "on_save", "on_evaluate"} <= {
        e[0] for e in runs[3]
    }
    for kind in (2, 3):
        assert [seen[0] for seen in runs[kind]] == [seen[0] for seen in runs[PLAIN]]
        for (event, weight, rate, logs), (_, wanted, wanted_rate, wanted_logs) in zip(
            runs[kind], runs[PLAIN], strict=True
        ):
            assert rate == wanted_rate, event
            assert logs == wanted_logs, event
            if wanted is not None:
                assert torch.allclose(weight, wanted, rtol=1e-5, atol=1e-6), event
    seen = [weight for event, weight, *_ in runs[3] if event == "on_step_end"]
    assert len(seen) == 4 and all((a != b).any() for a, b in zip(seen, seen[1:], strict=False)), (
        "every step changes the weight"
    )


@pytest.mark.quick
def test_callbacks_keep_their_order_and_see_real_weights(tmp_path):
    run_ranks(_watch, 2, str(tmp_path), timeout=240)


class Ema(TrainerCallback):
    """An exponential moving average of the weights, swapped in at the end: reads and writes."""

    def __init__(self):
        self.average = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with hf_zero.gathered(model):
            for name, p in model.named_parameters():
                old = self.average.get(name)
                self.average[name] = p.detach().clone() if old is None else old.lerp(p.detach(), 0.5)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        with hf_zero.gathered(model, writeback=True), torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(self.average[name])


@ranks(2, timeout=240)
def test_a_callback_may_write_weights(tmp_path):
    evaluated = {}
    for kind in (3, PLAIN):
        parts = {"callbacks": [Ema()], "eval_dataset": Rows("bert", 5)}
        trainer = make(kind, tmp_path, models.build("bert"), Rows("bert"), parts=parts, learning_rate=1e-2)
        trainer.train()
        evaluated[kind] = trainer.evaluate()["eval_loss"]
    assert abs(evaluated[3] / evaluated[PLAIN] - 1) < 1e-5, evaluated


class GradientReader(TrainerCallback):
    def __init__(self, engine_of):
        self.engine_of, self.norms = engine_of, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        engine = self.engine_of(model)
        if engine is None:
            self.norms.append(model.classifier.weight.grad.norm().item())
        else:
            self.norms.append(hf_zero.ShardedModel(engine.model).full_grad("classifier.weight").norm().item())


@ranks(2, timeout=240)
def test_a_callback_reads_a_clipped_gradient_through_the_engine(tmp_path):
    norms = {}
    for kind in (1, 3, PLAIN):
        reader = GradientReader(engine_of)
        trainer = make(kind, tmp_path, models.build("bert"), Rows("bert"), parts={"callbacks": [reader]})
        trainer.train()
        norms[kind] = torch.tensor(reader.norms)
    assert torch.equal(norms[3], norms[1])
    assert torch.allclose(norms[3], norms[PLAIN], rtol=1e-5)
