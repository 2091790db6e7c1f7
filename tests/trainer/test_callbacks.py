"""Callbacks are called in the order of `Trainer`, and can see real values."""

import pytest
import torch
from transformers import TrainerCallback

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.distributed import ranks
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


@pytest.mark.quick
@ranks(2, timeout=240)
def test_callbacks_keep_their_order_and_see_real_weights(tmp_path):
    def run(kind):
        watcher = Watcher()
        parts = {"callbacks": [watcher], "eval_dataset": Rows("bert", 5)}
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make(
            kind,
            f"{tmp_path}/{kind}",
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
