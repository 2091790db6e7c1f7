"""Every language model of transformers that a tiny configuration can build, the multimodal ones among them: for a part
of the vocabulary at a time its loss and gradients are those of all logits, or it is refused with the reason. None is
computed from all logits without a word."""

import re

import pytest

from tests.architectures.chunked import EQUAL, REFUSED, UNTRAINABLE, compare_losses
from tests.architectures.walk import cases
from tests.tiers import more


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
    found = compare_losses(case)
    if found.outcome == UNTRAINABLE:
        pytest.skip(f"without hf_zero: {found.reason}")
    assert found.outcome == CORE.get(case.model_type, found.outcome), found.reason
    if found.outcome == REFUSED:
        assert re.search("no head that is a single plain linear layer|uses its logits for more", found.reason)
