"""Every language model of transformers that a tiny configuration can build, the multimodal ones among them: for a part
of the vocabulary at a time its loss and gradients are those of all logits, or it is refused with the reason. None is
computed from all logits without a word."""

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.activation import chunked_loss
from hf_zero.activation.chunked_loss import ChunkedLoss
from hf_zero.errors import UnsupportedError
from tests.architectures.compare import Untrainable, build, own_loss_of
from tests.architectures.inputs import make_inputs
from tests.architectures.walk import Case, cases
from tests.tiers import more
from tests.trainer.harness import seed_everything


EQUAL, REFUSED = "equal", "refused"
NUM_ITEMS = 7  # what the sum over the labels is divided by, where the model takes it
TASKS = [
    "causal LM",
    "image-text-to-text",
    "multimodal LM",
    "seq2seq LM",
    "speech seq2seq",
    "masked LM",
    "pretraining",
]
# What each does to its logits, or where its head is: biases, scales, soft-capping, routers; and whether it is refused.
CORE = {
    **dict.fromkeys(("bloom", "cohere2", "falcon_h1", "gpt_oss", "hyperclovax", "minicpm3", "phimoe"), EQUAL),
    **dict.fromkeys(("recurrent_gemma", "llava"), EQUAL),
    **dict.fromkeys(("mobilebert", "whisper", "bart", "t5"), REFUSED),
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        found = [case for case in cases() if case.task in TASKS]
        params = [case if case.model_type in CORE else more(case)[0] for case in found]
        metafunc.parametrize("case", params, ids=[case.name for case in found])


@pytest.mark.filterwarnings("ignore")  # of models, which are not ours
def test_losses_and_gradients_are_those_of_all_logits(case):
    try:
        model, inputs = _prepared(case)
        trial = copy.deepcopy(model)
        plain = _loss(trial, inputs)
        grads = {key: param.grad for key, param in trial.named_parameters() if param.requires_grad}
    except Exception as error:  # noqa: B902 - whatever it is, it is the reason
        pytest.skip(f"without hf_zero: {type(error).__name__}: {error}".partition("\n")[0])
    wanted = CORE.get(case.model_type)
    try:
        with _narrow_ranges() as num_losses:
            sharded = hf_zero.shard(model, stage=3, chunked_loss="on")
            chunked = _loss(model, inputs)
    except UnsupportedError as error:
        assert wanted != EQUAL
        assert re.search("no head that is a single plain linear layer|uses its logits for more", str(error))
        return
    assert wanted != REFUSED
    assert num_losses(), f"{case.name}: the loss was computed from all logits without a word"
    torch.testing.assert_close(chunked, plain, rtol=2e-6, atol=0)
    largest = max(float(grad.abs().max()) for grad in grads.values() if grad is not None and grad.numel())
    for key, grad in grads.items():
        found = sharded.full_grad(key)
        assert (grad is None or not grad.any()) is (found is None or not found.any()), key
        if grad is not None and found is not None:
            atol = 5e-6 * float(grad.abs().max()) + 1e-7 * largest if grad.numel() else 0.0
            torch.testing.assert_close(found, grad, rtol=1e-5, atol=atol, msg=f"{case.name}: {key}")


def _prepared(case: Case) -> tuple[nn.Module, dict]:
    model = build(case)
    inputs = make_inputs(model, case.task, 0)
    labels = inputs.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
        labels[0, 1] = -100
    has_more = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(model.forward).parameters.values())
    if has_more or "num_items_in_batch" in inspect.signature(model.forward).parameters:
        inputs["num_items_in_batch"] = torch.tensor(NUM_ITEMS)
    return model, inputs


def _loss(model: nn.Module, inputs: dict) -> Tensor:
    seed_everything(0)  # dropout, and what else a forward draws
    loss = own_loss_of(model(**inputs))
    if loss is None:
        raise Untrainable("the model computes no loss")
    loss.mean().backward()
    if not torch.isfinite(loss).all():
        raise Untrainable("the loss of the tiny model is not finite")
    return loss.detach()


@contextmanager
def _narrow_ranges() -> Iterator[Callable[[], int]]:
    """Makes tiny vocabularies have several ranges. Gives how many losses were computed in them."""
    counted: list[ChunkedLoss] = []
    loss_of = ChunkedLoss.loss_of

    def count(self, *args):
        counted.append(self)
        return loss_of(self, *args)

    with (
        mock.patch.multiple(chunked_loss, CPU_NBYTES=1024, MIN_WIDTH=16),
        mock.patch.object(ChunkedLoss, "loss_of", count),
    ):
        yield lambda: len(counted)
