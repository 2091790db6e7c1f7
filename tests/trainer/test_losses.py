"""Which of a trainer's losses are computed without all logits: those of which nothing else is read."""

import pytest
import torch
from transformers import Trainer

import hf_zero
from hf_zero.activation import chunked_loss, chunked_loss_of
from hf_zero.errors import ConfigError
from tests import models
from tests.trainer.harness import Rows, make, record


def _trained(folder, monkeypatch, mode: str, **settings):
    """A trainer that has trained and evaluated, the losses that it logged, and how many were computed in ranges."""
    monkeypatch.setattr(chunked_loss, "CPU_NBYTES", 1024)
    monkeypatch.setattr(chunked_loss, "MIN_WIDTH", 16)
    count, loss_of = [], chunked_loss.ChunkedLoss.loss_of
    monkeypatch.setattr(chunked_loss.ChunkedLoss, "loss_of", lambda *args: count.append(1) or loss_of(*args))
    rows = Rows("llama", count=4)
    parts = {"eval_dataset": rows, **settings.pop("parts", {})}
    trainer = make(
        3, folder, models.build("llama"), rows, parts=parts, zero_chunked_loss=mode, max_steps=2, **settings
    )
    trainer.train()
    in_training = len(count)
    trainer.evaluate()
    run = record(trainer)
    return trainer, run, (in_training, len(count) - in_training)


def test_losses_are_those_of_plain_training_in_training_and_evaluation(tmp_path, monkeypatch):
    _, plain, none = _trained(tmp_path, monkeypatch, "off")
    trainer, chunked, counts = _trained(tmp_path, monkeypatch, "on")
    assert none == (0, 0) and counts == (2, 2)
    assert chunked.losses == pytest.approx(plain.losses, rel=1e-6) and len(plain.losses) == 2
    assert chunked.evals == pytest.approx(plain.evals, rel=1e-6) and len(plain.evals) == 1
    assert not chunked_loss_of(trainer.model).is_active  # a forward of a user's own gives logits


def test_losses_in_half_precision_are_computed_without_all_logits(tmp_path, monkeypatch):
    # accelerate's autocast stays active around the compute copies
    _, plain, _ = _trained(tmp_path, monkeypatch, "off", bf16=True, use_cpu=True)
    _, chunked, counts = _trained(tmp_path, monkeypatch, "on", bf16=True, use_cpu=True)
    assert counts == (2, 2)
    assert chunked.losses == pytest.approx(plain.losses, rel=2e-3) and len(plain.losses) == 2


def test_metrics_get_their_logits(tmp_path, monkeypatch):
    shapes = []

    def compute_metrics(predictions):
        shapes.append(predictions.predictions.shape)
        return {}

    _, _, counts = _trained(tmp_path, monkeypatch, "on", parts={"compute_metrics": compute_metrics})
    assert counts == (2, 0) and shapes[0][-1] == models.VOCAB


def test_small_logits_are_computed_at_once_by_default(tmp_path, monkeypatch):
    assert hf_zero.ZeroTrainingArguments(str(tmp_path)).zero_chunked_loss == "auto"
    assert _trained(tmp_path, monkeypatch, "auto")[2] == (0, 0)
    monkeypatch.setattr(chunked_loss, "_largest_block_nbytes", lambda *_: 0)
    assert _trained(tmp_path, monkeypatch, "auto")[2] == (2, 2)  # large ones are not


class Reading:
    """Reads the logits of the loss that it has computed by Trainer."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        assert type(outputs.logits) is torch.Tensor
        return (loss, outputs) if return_outputs else loss


def test_a_class_above_the_mixin_gets_the_logits_that_it_asks_for(tmp_path):
    trainer = make(
        3, tmp_path, models.build("llama"), parts={"eval_dataset": Rows("llama", count=4)}, zero_chunked_loss="on"
    )
    trainer.__class__ = type("Reader", (Reading, type(trainer)), {})
    trainer.evaluate()


class OwnLoss(Trainer):
    """Reads its logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0 * outputs.logits.sum()
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_a_class_of_its_own_keeps_its_logits(tmp_path, monkeypatch):
    assert _trained(tmp_path, monkeypatch, "auto", mixin_on=OwnLoss)[2] == (0, 0)
    with pytest.raises(ConfigError, match="zero_chunked_loss: compute_loss_func computes the loss from all logits"):
        parts = {"compute_loss_func": lambda *_, **__: None}
        make(3, tmp_path, models.build("llama"), zero_chunked_loss="on", parts=parts)
    with pytest.raises(ConfigError, match="OwnLoss overrides compute_loss"):
        make(3, tmp_path, models.build("llama"), mixin_on=OwnLoss, zero_chunked_loss=True)


class Brief(Trainer):
    """Names as few parameters as the calls of Trainer give."""

    def train(self, resume_from_checkpoint=None):
        return super().train(resume_from_checkpoint)

    def compute_loss(self, model, inputs, **kwargs):
        assert self.model.training == ("return_outputs" not in kwargs)
        return super().compute_loss(model, inputs, **kwargs)

    def evaluation_loop(self, dataloader, description, **kwargs):
        return super().evaluation_loop(dataloader, description, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, **kwargs):
        return super().prediction_step(model, inputs, prediction_loss_only, **kwargs)


def test_a_class_behind_the_mixin_is_given_what_trainer_gives(tmp_path):
    parts = {"eval_dataset": Rows("bert", count=4)}
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), mixin_on=Brief, parts=parts, max_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def test_smoothed_labels_need_all_logits(tmp_path, monkeypatch, caplog):
    assert _trained(tmp_path, monkeypatch, "auto", label_smoothing_factor=0.1)[2] == (0, 0)
    assert "chunked_loss: label smoothing computes all logits at once" in caplog.text
