"""TRL's head, computed as a chunked loss: the numbers of TRL's own function, in less memory."""

import pytest
import torch


pytest.importorskip("trl")

import hf_zero
from hf_zero.activation import chunked_loss, chunked_loss_of, vocabulary_ranges
from hf_zero.trl.fused_head import add_fused_lm_head, utils
from tests.activation.test_chunked_loss import SIZES, _batch, _made
from tests.tensor_meter import TensorMeter
from tests.tiers import more


@pytest.fixture
def count(monkeypatch) -> list:
    """One item for each loss that is computed a range at a time."""
    found: list = []
    statistics_of = chunked_loss.ChunkedLoss.statistics_of
    monkeypatch.setattr(
        chunked_loss.ChunkedLoss, "statistics_of", lambda *args: found.append(1) or statistics_of(*args)
    )
    return found


def outputs_and_gradients(mode: str, name: str, stage: int, device: str | torch.device = "cpu") -> tuple:
    model = _made(name).to(device)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", *vocabulary_ranges.STATISTICS))
    batch = {key: value.to(device) for key, value in _batch().items()}
    with torch.no_grad():  # some of the labels are what the model expects
        batch["labels"][1, 4:9] = model(input_ids=batch["input_ids"]).logits[1, 3:8].argmax(-1)
    sharded = hf_zero.shard(model, stage=stage, strict=True, chunked_loss=mode)
    outputs = model(**batch, fused_lm_head=True)
    weights = torch.linspace(-1, 1, outputs.entropy.numel(), device=device).view_as(outputs.entropy)
    (outputs.loss + (outputs.entropy * weights).sum()).backward()
    return outputs, {key: sharded.full_grad(key) for key, _ in model.named_parameters()}


@pytest.mark.parametrize("stage", [3, *more(0)])
@pytest.mark.parametrize("name", ["gemma2", *more("llama", "cohere", "granite", "mixtral", "phi")])
def test_what_it_gives_for_each_token_is_what_trl_gives(monkeypatch, count, name, stage):
    """Soft-capping, scales, a bias, a router's loss; the entropy has gradients, too."""
    monkeypatch.setattr(chunked_loss, "CPU_NBYTES", 1024)
    monkeypatch.setattr(chunked_loss, "MIN_WIDTH", 16)
    plain = outputs_and_gradients("off", name, stage)
    assert not count
    chunked = outputs_and_gradients("on", name, stage)
    assert count
    for key in ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits"):
        torch.testing.assert_close(chunked[0][key], plain[0][key], rtol=1e-5, atol=1e-6, msg=key)
    assert plain[0].is_top1.any() and torch.equal(chunked[0].is_top1, plain[0].is_top1)
    for key, grad in plain[1].items():
        assert (grad is None) is (chunked[1][key] is None)
        if grad is not None:
            torch.testing.assert_close(chunked[1][key], grad, rtol=1e-5, atol=2e-6 * grad.abs().max(), msg=key)


def test_memory_is_that_of_two_ranges(monkeypatch, count):
    """TRL's own makes at least a range of all 2^14 words, fp32, its exponentials and their product. Here a range of
    1/8 of the vocabulary has its exponentials beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab, tokens = 2**14, 256
    config = LlamaConfig(**{**SIZES, "vocab_size": vocab, "num_hidden_layers": 1})
    batch = dict.fromkeys(("input_ids", "labels"), torch.ones(1, tokens, dtype=torch.int64))
    monkeypatch.setattr(chunked_loss, "CPU_NBYTES", vocab // 8 * tokens * 4)
    peaks = {}
    for mode in ("off", "auto"):
        model = LlamaForCausalLM(config).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        hf_zero.shard(model, stage=3, chunked_loss=mode)
        model(**batch, fused_lm_head=True).loss.backward()
        model.zero_grad()
        with TensorMeter() as meter:
            meter.mark("begin")
            model(**batch, fused_lm_head=True).loss.backward()
            meter.mark("end")
        span = meter.span("begin", "end")
        peaks[mode] = span.peak_nbytes - span.start_nbytes
    logits = vocab * tokens * 4
    assert count and peaks["off"] - peaks["auto"] > (3 - 2 / 8) * logits * 0.98


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_device_with_kernels_of_trl_is_left_to_them_unless_told(monkeypatch, count, mode):
    model = _made("llama")
    add_fused_lm_head(model)
    hf_zero.shard(model, stage=3, chunked_loss=mode)
    chunked_loss_of(model)._max_nbytes = 0
    monkeypatch.setattr(chunked_loss, "CPU_NBYTES", 1024)
    monkeypatch.setattr(utils, "_use_triton", lambda device: True)
    assert model(**_batch(), fused_lm_head=True).loss > 0
    assert bool(count) is (mode == "on")


def test_small_logits_and_a_model_without_settings_are_left_to_trl(count):
    model = _made("llama")
    add_fused_lm_head(model)
    assert model(**_batch(), fused_lm_head=True).loss > 0
    hf_zero.shard(model, stage=3, chunked_loss="auto")
    assert model(**_batch(), fused_lm_head=True).loss > 0
    assert not count
