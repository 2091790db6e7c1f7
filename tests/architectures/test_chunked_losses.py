"""Every language model of transformers that a tiny configuration can build, the multimodal ones among them: for a part
of the vocabulary at a time its loss and gradients are those of all logits, or it is refused with the reason. None is
computed from all logits without a word."""

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
    ("llava", "image-text-to-text"),
    ("mobilebert", "masked LM"),
    ("whisper", "speech seq2seq"),
}
NO_PLAIN_HEAD = {
    "causal LM": ("blt", "musicgen", "musicgen_melody"),
    "image-text-to-text": ("idefics",),
    "masked LM": ("perceiver",),
    "pretraining": ("electra", "funnel", "lxmert", "vit_mae"),
    "seq2seq LM": ("fsmt",),
}
WITH_A_VECTOR = {  # of the vocabulary, which they add to their logits
    "masked LM": ("esm",),
    "seq2seq LM": (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "marian", "mbart", "mvp", "pegasus"),
        "plbart",
    ),
}
REASONS: dict[tuple[str, str], str] = {
    **{
        (name, task): "no head that is a single plain linear layer"
        for task, names in NO_PLAIN_HEAD.items()
        for name in names
    },
    **{(name, task): "add needs them" for task, names in WITH_A_VECTOR.items() for name in names},
    **{("mobilebert", task): "computes them without calling its head" for task in ("masked LM", "pretraining")},
    ("prophetnet", "causal LM"): "transpose needs them",
    ("prophetnet", "seq2seq LM"): "is_contiguous needs them",
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        found = [case for case in cases() if case.task in TASKS]
        params = [case if case.key in CORE else more(case)[0] for case in found]
        metafunc.parametrize("case", params, ids=[case.name for case in found])


@pytest.mark.filterwarnings("ignore")  # of models, which are not ours
def test_losses_and_gradients_are_those_of_all_logits(case):
    found = compare_losses(case)
    if found.outcome == UNTRAINABLE:
        pytest.skip(f"without hf_zero: {found.reason}")
    assert found.outcome == (REFUSED if case.key in REASONS else EQUAL), found.reason
    assert REASONS.get(case.key, "") in found.reason
