"""Losses that are computed for a part of the vocabulary at a time: to rounding those of all logits, in less memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_zero
from hf_zero.activation import chunked_loss, chunked_loss_of
from hf_zero.activation.chunked_loss import DeferredLogits
from hf_zero.activation.vocabulary_ranges import TokenLoss, stepped
from hf_zero.engine import partition
from hf_zero.errors import UnsupportedError
from tests import models
from tests.activation.subjects import added_at_the_peak
from tests.compare import assert_close, assert_equal
from tests.distributed import ranks
from tests.tiers import more
from tests.training import Sharded, adamw, train, train_accumulating


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 203, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
# what each does to its logits is in its settings
MODELS = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "gemma2": {**SIZES, "head_dim": 8, "final_logit_softcapping": 3.0},
    "cohere": {**SIZES, "logit_scale": 0.3},
    "granite": {**SIZES, "logits_scaling": 4.0},
    "mixtral": {**SIZES, "num_local_experts": 4, "output_router_logits": True},
    "phi": SIZES,  # its head has a bias
    "gpt2": GPT2,
}


@contextmanager
def narrow(vocabulary_numel: int | None = None) -> Iterator[None]:
    """Makes ranges so narrow that the tiny vocabularies have several. Embedding and head of at least
    `vocabulary_numel` elements are units of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CPU_NBYTES", 1024)
        patch.setattr(chunked_loss, "MIN_WIDTH", 16)
        if vocabulary_numel is not None:
            patch.setattr(partition, "VOCABULARY_NUMEL", vocabulary_numel)
        yield


@pytest.fixture(autouse=True)
def _narrow():
    with narrow():
        yield


def _made(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # no dropout


def _batch(**changed) -> dict:
    tokens = torch.randint(1, 203, (2, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels, **changed}


def _loss_and_gradients(mode: str, name: str, dtype: torch.dtype | None, **batch) -> tuple:
    model = _made(name)
    sharded = hf_zero.shard(model, stage=3, strict=True, compute_dtype=dtype, chunked_loss=mode)
    output = model(**_batch(**batch))
    output.loss.backward()
    assert isinstance(output.logits, DeferredLogits) is (mode == "on")
    return output.loss.detach(), {key: sharded.full_grad(key) for key, _ in model.named_parameters()}


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("name", ["gemma2", "llama", *more("cohere", "granite", "mixtral", "phi", "gpt2")])
def test_loss_and_gradients_are_those_of_all_logits(name):
    items = torch.tensor(20)
    plain, chunked = (_loss_and_gradients(mode, name, None, num_items_in_batch=items) for mode in ("off", "on"))
    torch.testing.assert_close(*(loss for loss, _ in (plain, chunked)), rtol=1e-6, atol=0)
    for key, grad in plain[1].items():
        assert (grad is None) is (chunked[1][key] is None)
        if grad is not None:
            torch.testing.assert_close(chunked[1][key], grad, rtol=1e-5, atol=1e-6 * grad.abs().max(), msg=key)


def test_half_precision_rounds_no_more_than_all_logits_do():
    exact = _loss_and_gradients("off", "gemma2", None)
    plain, chunked = (_loss_and_gradients(mode, "gemma2", torch.bfloat16) for mode in ("off", "on"))
    assert abs(chunked[0] - exact[0]) <= 2 * abs(plain[0] - exact[0]) + 1e-5
    for key, grad in exact[1].items():
        errors = [(found[1][key] - grad).norm() / grad.norm() for found in (plain, chunked)]
        assert errors[1] <= 1.2 * errors[0] + 1e-3, key


@pytest.mark.full("more cases", after=2)
@pytest.mark.parametrize(
    "name, dtype, has_units",  # head and embedding are units of their own
    [("llama", None, True), *more(("llama", None, False), ("gpt2", None, False), ("llama", torch.bfloat16, True))],
)
@ranks(2)
def test_stages_give_equal_bits(name, dtype, has_units):
    with narrow(1 if has_units else None):
        for trains in (train, train_accumulating):
            records = {}
            for stage in (0, 1, 2, 3):
                subject = Sharded(models.build(name), adamw, stage, compute_dtype=dtype, chunked_loss="on")
                assert chunked_loss_of(subject.model) is not None
                assert (subject.engine.head is not None) is has_units
                records[stage] = trains(subject, name, num_steps=3)
            plain = trains(Sharded(models.build(name), adamw, 3, compute_dtype=dtype), name, num_steps=3)
            for one, other in ((0, 1), (2, 3), *([(0, 3)] if trains is train else [])):
                assert_equal(records[one], records[other], f"{name}: stages {one} and {other}")
            if dtype is None:
                assert_close(records[3], plain, name)


def _with_frozen_head(model: nn.Module) -> nn.Module:
    model.lm_head.weight.requires_grad_(False)
    return model


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))


def _checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


WAYS = {
    "a frozen head": (_with_frozen_head, {}),
    "LoRA": (_adapted, {}),
    "checkpointing": (_checkpointed, {}),
    "parameters on the host": (nn.Module.train, {"offload": "params"}),
    "shard groups": (nn.Module.train, {"shard_size": 1}),
}


@ranks(2)
def test_it_goes_with_what_else_changes_parameters_and_activations():
    """The head may be frozen, come from the host, or be summed over groups; blocks may be computed again."""
    with narrow(1):
        for what, (prepared, settings) in WAYS.items():
            records = []
            for mode in ("off", "on"):
                torch.manual_seed(7)  # for the adapter
                model = prepared(models.build("llama"))
                subject = Sharded(model, adamw, 3, strict=True, chunked_loss=mode, **settings)
                assert (chunked_loss_of(subject.model) is not None) is (mode == "on")
                records.append(train(subject, "llama", num_steps=3))
            assert_close(records[1], records[0], what)


def test_memory_is_less_by_the_logits_but_one_range(monkeypatch):
    """At the peak of the plain loss there are logits, their log-softmax and its gradient, each 4 bytes for a token and
    word; here a range and its gradient, of 1/8 of the vocabulary (and few numbers of each token)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab, tokens = 2**14, 256
    config = LlamaConfig(**{**SIZES, "vocab_size": vocab, "num_hidden_layers": 1})
    batch = dict.fromkeys(("input_ids", "labels"), torch.ones(1, tokens, dtype=torch.int64))
    monkeypatch.setattr(chunked_loss, "CPU_NBYTES", vocab // 8 * tokens * 4)
    peaks = {}
    for mode in ("off", "auto"):
        model = LlamaForCausalLM(config).train()
        hf_zero.shard(model, stage=3, chunked_loss=mode)
        peaks[mode] = added_at_the_peak(model, batch)
    logits = vocab * tokens * 4
    assert peaks["off"] - peaks["auto"] > (2 - 2 / 8) * logits * 0.98


def test_auto_is_on_where_logits_take_more_than_the_largest_block():
    model = _made("llama")
    hf_zero.shard(model, stage=2, chunked_loss="auto")
    block = sum(param.numel() * 4 for param in model.model.layers[0].parameters())
    rows = block // (4 * 203)  # tokens whose logits take as much
    for length, is_chunked in ((rows // 2, False), (rows // 2 + 1, True)):
        tokens = torch.ones(2, length, dtype=torch.int64)
        output = model(input_ids=tokens, labels=tokens)
        assert isinstance(output.logits, DeferredLogits) is is_chunked
        assert not isinstance(model(input_ids=tokens).logits, DeferredLogits)  # without labels there is no loss


def _bart() -> nn.Module:
    """Adds a vector to its logits."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"d_model": 32, "vocab_size": 203, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads))


@pytest.mark.parametrize("made, needed_by", [(_bart, "add"), (lambda: models.build("t5"), "view")])
def test_a_model_that_needs_its_logits_gets_them_or_is_refused(caplog, made, needed_by):
    torch.manual_seed(0)
    model, batch = made(), _batch()
    batch = {key: value.clamp(max=30) for key, value in batch.items()}
    model.eval()
    plain = model(**batch).loss
    hf_zero.shard(model, stage=3, strict=True, chunked_loss="auto")
    chunked_loss_of(model)._max_nbytes = 0
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(model(**batch).loss, plain)
    own = [record for record in caplog.records if record.name.startswith("hf_zero")]
    assert [record.message.count(f": {needed_by} needs them") for record in own] == [1]
    chunked_loss_of(model).is_auto = False
    with pytest.raises(UnsupportedError, match="uses its logits for more than the loss"):
        model(**batch)


def test_a_loss_that_does_not_use_loss_function_is_refused(monkeypatch):
    model = _made("llama")
    hf_zero.shard(model, stage=3, chunked_loss="on")
    monkeypatch.setattr(chunked_loss_of(model), "_is_served", lambda hidden: False)  # as if it read the head's weight
    with pytest.raises(UnsupportedError, match="it computes its loss without loss_function; remove chunked_loss"):
        model(**_batch())


def test_hooks_on_the_head_see_logits():
    model, seen = _made("llama"), []
    hf_zero.shard(model, stage=3, strict=True, chunked_loss="on")
    model.lm_head.register_forward_hook(lambda _module, _args, output: seen.append(output.shape))
    with pytest.raises(UnsupportedError, match="its head has a hook"):
        model(**_batch())
    chunked_loss_of(model).is_auto, chunked_loss_of(model)._max_nbytes = True, 0
    model(**_batch())
    assert seen == [(2, 17, 203)]
    model = _made("llama")
    hf_zero.shard(model, stage=3, strict=True, chunked_loss="on")
    model.lm_head.register_full_backward_hook(lambda _module, _inputs, outputs: seen.append(outputs[0].shape))
    with pytest.raises(UnsupportedError, match="its head has a hook"):
        model(**_batch())


def test_a_head_that_is_not_one_linear_layer_is_refused(monkeypatch):
    model = _made("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UnsupportedError, match="no head that is a single plain linear layer"):
        hf_zero.shard(model, stage=3, chunked_loss="on")
    monkeypatch.setattr(type(model), "get_output_embeddings", _has_none)
    hf_zero.shard(model, stage=3, chunked_loss="auto")
    assert not isinstance(model(**_batch()).logits, DeferredLogits)


def _has_none(_model):
    raise NotImplementedError


def test_labels_outside_of_the_vocabulary_are_refused():
    model = _made("llama")
    hf_zero.shard(model, stage=3, chunked_loss="on")
    with pytest.raises(RuntimeError, match="a label is neither -100 nor a token of the vocabulary of size 203"):
        model(**_batch(labels=torch.full((2, 17), 203)))


@pytest.mark.parametrize("steps", [(), (lambda logits: logits / 0.7,)], ids=["plain", "temperature"])
@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float32).min, -1e5])
def test_masked_words_add_nothing(mask, steps):
    """The first range is masked as a whole, so is one later on, and a part of a third."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=draw) for size in (12, 75))
    bias, targets = torch.randn(75, generator=draw), torch.randint(16, 32, (12,), generator=draw)
    masked = torch.cat([torch.arange(16), torch.arange(32, 52), torch.arange(70, 75)])
    bias[masked] = mask
    weight[masked] = 0.0
    found = []
    for is_chunked in (True, False):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
        if is_chunked:
            losses = TokenLoss.apply(*leaves, targets, steps, 16)
        else:
            losses = F.cross_entropy(stepped(F.linear(*leaves), steps), targets, reduction="none")
        losses.sum().backward()
        found.append((losses, *(each.grad for each in leaves)))
    assert all(each.isfinite().all() for each in found[1])
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-6)


def _deferred(hidden: torch.Tensor, head: nn.Linear) -> DeferredLogits:
    model = nn.Sequential(head)
    engine = hf_zero.engine.engine_of(hf_zero.shard(model, stage=0).model)
    chunked = chunked_loss.ChunkedLoss(engine, head, [], None, is_auto=True)
    chunked._is_open = True  # as inside a forward; the logits of few tokens are computed by a call of the head
    return DeferredLogits(chunked, hidden, (*hidden.shape[:-1], 40), hidden.dtype)


def _masked(logits):
    logits[..., 20:] = -1e4
    return logits


def _divided(logits):
    logits = logits.float()
    logits.div_(3)
    return logits


def _scaled_under_another_name(logits):
    other = logits
    logits *= 0.5
    return other


def _written_after_an_operation(logits):
    doubled = logits * 2
    logits[..., :20] = -5.0
    return torch.cat([doubled, logits])


def _written_under_a_view(logits):
    view = logits[:, 1:]
    logits.masked_fill_(torch.arange(40) < 20, -5.0)
    return view


def _read_without_gradients(logits):
    with torch.no_grad():
        logits.argmax(-1)
    return logits


USES = [_masked, _divided, _scaled_under_another_name, _written_after_an_operation, _written_under_a_view]
USES += [_read_without_gradients, lambda x: torch.tanh(x / 3) * 3 - 0, lambda x: -x + 1, lambda x: x * torch.ones(40)]
USES += [lambda x: torch.stack((x, x * 2)), lambda x: x[:, -1].to(torch.float64).float(), lambda x: 2 * x.float()]


@pytest.mark.parametrize("use", USES)
def test_operations_on_deferred_logits_have_the_same_values_and_gradients(use):
    torch.manual_seed(0)
    head, hidden = nn.Linear(16, 40), torch.randn(2, 6, 16, requires_grad=True)
    found = []
    for logits in (_deferred(hidden, head), head(hidden)):
        assert logits.shape == (2, 6, 40) and logits.size(-1) == 40 and logits.dim() == 3
        rows = use(logits).reshape(-1, 40)
        loss = F.cross_entropy(rows, torch.arange(rows.shape[0]))
        found.append((loss.detach(), *torch.autograd.grad(loss, hidden)))
    torch.testing.assert_close(*found)


def test_logits_are_not_computed_when_the_forward_has_ended():
    """Their weights may be others by then, and other ranks may not gather them."""
    model = _made("llama")
    hf_zero.shard(model, stage=3, chunked_loss="auto")
    chunked = chunked_loss_of(model)
    chunked._max_nbytes = 0
    logits = model(**_batch()).logits
    with pytest.raises(UnsupportedError, match="are read .argmax. after its forward"):
        logits.argmax(-1)
    for hook in (model.register_forward_pre_hook, model.model.register_forward_pre_hook):
        handle = hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**_batch())
        handle.remove()
        assert not isinstance(model(input_ids=_batch()["input_ids"]).logits, DeferredLogits)
    handle = model.register_forward_pre_hook(_fail, prepend=True)
    with pytest.raises(ValueError, match="refused"):
        model(**_batch())
    handle.remove()
    assert not chunked._is_open and isinstance(model(**_batch()).logits, DeferredLogits)


def _interrupt(_module, _args):
    raise KeyboardInterrupt


def _fail(_module, _args):
    raise ValueError("refused")
