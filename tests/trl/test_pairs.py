"""ORPO, CPO and SimPO without all logits: the numbers of TRL's own, in less memory."""

import pytest
import torch


pytest.importorskip("trl")

import hf_zero.trl
from hf_zero.activation import chunked_loss, chunked_loss_of
from hf_zero.engine import engine_of
from hf_zero.errors import UnsupportedError
from tests.tensor_meter import TensorMeter
from tests.tiers import more
from tests.trainer.harness import seed_everything
from tests.trl.harness import data, make, policy, save_models


pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}


def _trainer(folder, mode: str, name: str = "ORPO", model=None, **settings):
    seed_everything()
    save_models(folder)
    model = policy(folder) if model is None else model
    trainer = make(3, name, folder, model, data("preference"), zero_chunked_loss=mode, **settings)
    trainer.accelerator.shard(trainer.model)
    return trainer


def _loss_of(trainer) -> tuple:
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
    loss.backward()
    engine = engine_of(trainer.model)
    grads = {key: hf_zero.ShardedModel(engine.model).full_grad(key) for key, _ in trainer.model.named_parameters()}
    return loss.detach(), metrics, grads


@pytest.mark.parametrize(
    "name, settings", [("ORPO", {}), ("CPO", SIMPO), *more(("CPO", {"cpo_alpha": 0.5}), ("CPO", {"loss_type": "ipo"}))]
)
def test_losses_metrics_and_gradients_are_those_of_all_logits(tmp_path, monkeypatch, name, settings):
    monkeypatch.setattr(chunked_loss, "CPU_NBYTES", 1024)
    monkeypatch.setattr(chunked_loss, "MIN_WIDTH", 16)
    counted, scores_of = [], chunked_loss.ChunkedLoss.scores_of
    monkeypatch.setattr(chunked_loss.ChunkedLoss, "scores_of", lambda *args: counted.append(1) or scores_of(*args))
    plain = _loss_of(_trainer(tmp_path, "off", name, **settings))
    assert not counted
    chunked = _loss_of(_trainer(tmp_path, "on", name, **settings))
    assert counted == [1]
    torch.testing.assert_close(chunked[0], plain[0], rtol=1e-5, atol=0)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-5, abs=1e-6) and len(plain[1]) >= 9
    for key, grad in plain[2].items():
        torch.testing.assert_close(chunked[2][key], grad, rtol=1e-5, atol=2e-6 * grad.abs().max(), msg=key)


def test_memory_is_less_by_all_logits_their_gradient_and_a_copy(tmp_path, monkeypatch):
    """At the peak TRL's own has the logits of all tokens and their gradient, and of the chosen answers, which are a
    half, a copy and its log-softmax. Here there are a range of 1/8 of the vocabulary and its gradient."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab, peaks = 2**14, {}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    for mode in ("off", "auto"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, pad_token_id=0, **sizes))
        trainer = _trainer(tmp_path, mode, model=model)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        num_tokens = 2 * max(batch[f"{answer}_input_ids"].numel() for answer in ("chosen", "rejected"))
        monkeypatch.setattr(chunked_loss, "CPU_NBYTES", vocab // 8 * num_tokens * 4)
        for _ in range(2):
            with TensorMeter() as meter:
                meter.mark("begin")
                trainer.get_batch_loss_metrics(trainer.model, batch)[0].backward()
                meter.mark("end")
            trainer.model.zero_grad()
        span = meter.span("begin", "end")
        peaks[mode] = span.peak_nbytes - span.start_nbytes
    logits = vocab * num_tokens * 4
    assert peaks["off"] - peaks["auto"] > (3 - 2 / 8) * logits * 0.95, {k: v / logits for k, v in peaks.items()}


def test_a_class_that_sees_the_logits_gets_them(tmp_path):
    trainer = _trainer(tmp_path, "on")
    forward, batch = trainer.concatenated_forward, next(iter(trainer.get_train_dataloader()))
    with pytest.raises(UnsupportedError, match="of which the loss of each token and the mean are left"):
        forward(trainer.model, batch)[2].softmax(-1)
    own = {"get_batch_loss_metrics": lambda self, model, batch, train_eval="train": None}
    trainer.__class__ = type("Reader", (type(trainer),), own)
    with pytest.raises(UnsupportedError, match="Reader.get_batch_loss_metrics is a method of your own"):
        trainer.concatenated_forward(trainer.model, batch)
    chunked_loss_of(trainer.model).is_auto = True
    assert isinstance(trainer.concatenated_forward(trainer.model, batch)[2], torch.Tensor)
    assert not chunked_loss_of(trainer.model).is_active


def test_log_probabilities_are_computed_on_the_class_as_by_that_of_trl():
    from trl.experimental.orpo import ORPOTrainer

    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    for average in (False, True):
        wanted = ORPOTrainer.get_batch_logps(logits, labels, average)
        for cls in (hf_zero.trl.ZeroORPOTrainer, hf_zero.trl.ZeroCPOTrainer):
            assert torch.equal(cls.get_batch_logps(logits, labels, average), wanted)
