"""Every causal language model of transformers that a tiny configuration can build: for a part of the vocabulary at a
time its loss and gradients are those of all logits, or it is refused with the reason. None is computed from all logits
without a word."""

import pytest

from tests.architectures.chunked import EQUAL, REFUSED, UNTRAINABLE, compare_losses
from tests.architectures.walk import cases
from tests.tiers import more


TASK = "causal LM"
# What each does to its logits, or where its head is: biases, scales, soft-capping, routers.
CORE = {
    ("bloom", "causal LM"),
    ("cohere2", "causal LM"),
    ("falcon_h1", "causal LM"),
    ("gpt_oss", "causal LM"),
    ("hyperclovax", "causal LM"),
    ("minicpm3", "causal LM"),
    ("phimoe", "causal LM"),
    ("recurrent_gemma", "causal LM"),
}
REASONS: dict[tuple[str, str], str] = {
    ("blt", "causal LM"): "no head that is one plain linear layer",
    ("musicgen", "causal LM"): "no head that is one plain linear layer",
    ("musicgen_melody", "causal LM"): "no head that is one plain linear layer",
    ("prophetnet", "causal LM"): "transpose, which needs them whole",
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        found = [case for case in cases() if case.task == TASK]
        params = [case if case.key in CORE else more(case)[0] for case in found]
        metafunc.parametrize("case", params, ids=[case.name for case in found])


@pytest.mark.filterwarnings("ignore")  # of models, which are not ours
def test_losses_and_gradients_are_those_of_all_logits(case):
    found = compare_losses(case)
    if found.outcome == UNTRAINABLE:
        pytest.skip(f"without hf_zero: {found.reason}")
    assert found.outcome == (REFUSED if case.key in REASONS else EQUAL), found.reason
    assert REASONS.get(case.key, "") in found.reason
