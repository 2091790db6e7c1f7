"""Every architecture of transformers that a tiny configuration can build trains sharded as it does in plain DDP.

results.yaml has the result of every test, and docs/models.md is its summary. With another version of transformers than
that of results.yaml, the tests only check that nothing fails in hf_zero. `--write-docs` writes both files."""

import pytest
import transformers

from tests.architectures import page
from tests.architectures.compare import compare
from tests.architectures.walk import cases
from tests.distributed import run_ranks
from tests.tiers import more


RESULTS: page.Results = {}
# Unlike one another: shared blocks, tied weights, experts, two stacks, states, convolutions, several modalities.
CORE = {
    ("albert", "masked LM"),
    ("bart", "seq2seq LM"),
    ("bert", "masked LM"),
    ("blip-2", "image-text-to-text"),
    ("bloom", "causal LM"),
    ("clip", "zero-shot image classification"),
    ("convnext", "image classification"),
    ("deberta-v2", "sequence classification"),
    ("deepseek_v3", "causal LM"),
    ("yolos", "object detection"),
    ("falcon_mamba", "causal LM"),
    ("gemma3_text", "causal LM"),
    ("gpt2", "causal LM"),
    ("gpt_oss", "causal LM"),
    ("lfm2", "causal LM"),
    ("llama", "causal LM"),
    ("mixtral", "causal LM"),
    ("modernbert", "token classification"),
    ("qwen2_vl", "image-text-to-text"),
    ("qwen3_next", "causal LM"),
    ("segformer", "semantic segmentation"),
    ("t5", "seq2seq LM"),
    ("vit", "image classification"),
    ("wav2vec2", "CTC"),
    ("whisper", "speech seq2seq"),
    ("xlnet", "question answering"),
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        params = [case if case.key in CORE else more(case)[0] for case in cases()]
        metafunc.parametrize("case", params, ids=[case.name for case in cases()])


@pytest.mark.full("more cases", after=12)
@pytest.mark.quick(cases=4)
def test_trains_as_the_page_says(case, request):
    outcome, (written, version) = run_ranks(compare, 2, case, timeout=200)[0], page.read()
    RESULTS[case.key] = outcome
    if not request.config.getoption("--write-docs") and version == transformers.__version__:
        said = written.get(case.key)
        assert outcome == said, f"results.yaml says otherwise; run `make test-all`, which writes it: {said}"


def test_the_page_has_every_case_and_no_other_and_is_the_summary_of_the_results(request):
    known, (written, version) = {case.key for case in cases()}, page.read()
    if request.config.getoption("--write-docs") and RESULTS:
        results = {key: outcome for key, outcome in {**written, **RESULTS}.items() if key in known}
        page.write(results, transformers.__version__)
        written, version = page.read()
    assert page.PAGE.read_text(encoding="utf-8") == page.summary(written, version)
    assert len({model_type for (model_type, _), outcome in written.items() if outcome.passed}) >= 120
    if version != transformers.__version__:
        pytest.skip("the page is of another version of transformers")
    assert set(written) == known
