"""Every architecture of transformers that a tiny configuration can build trains sharded as it does in plain DDP.

results.yaml has the result of every test, and docs/models.md is its summary. With another version of transformers than
that of results.yaml, the tests only check that nothing fails in hf_zero. `--write-docs` writes both files."""

from functools import cache
from pathlib import Path

import pytest
import transformers
import yaml

from tests.architectures.compare import Outcome, compare
from tests.architectures.walk import TASKS, cases
from tests.distributed import run_ranks
from tests.tiers import more


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS = Path(__file__).with_name("results.yaml")
HEADER = """# Models

transformers {version} has {num_types} model types with a head that computes a loss. {num_passed} of them train with
hf_zero, with {num_heads} of {num_cases} heads: each is built from a tiny configuration and trained for 3 steps on 2
ranks (gloo). Losses, gradient norms and weights of stages 1, 2 and 3 are bit-identical, and equal to those of plain
DDP up to rounding. `make test-all` writes this page; `tests/architectures/results.yaml` lists every head and the
reason for each failure.
"""
UNTRAINED = """## Model types that do not train

These fail in the tests, with plain torch too. Most need a package that is not installed, or inputs that the tests do
not generate.
"""
REFUSED = """## Not at stage 3

hf_zero refuses stage 3 for these models; they train at stages 1 and 2:
"""
STAGE_3 = "hf_zero refuses stage 3"
COMMON = 20  # tasks with fewer heads are counted together
TRAINS, TRAINS_BY_OWN_LOSS = "trains", "trains (own loss)"

Results = dict[tuple[str, str], Outcome]  # by model type and task


def _ordered(results: Results) -> list[tuple[str, str]]:
    return sorted(results, key=lambda key: (key[0], list(TASKS).index(key[1])))


def summary(results: Results, version: str) -> str:
    """The page.

    Args:
        results: of every case.
        version (`str`): of transformers.
    """
    keys = _ordered(results)
    passing = [key for key in keys if results[key].passed]
    trained = dict.fromkeys(model_type for model_type, _ in passing)
    refused = [key for key in keys if not results[key].passed and results[key].reason.startswith(STAGE_3)]
    known = {*trained, *(model_type for model_type, _ in refused)}
    untrained = [model_type for model_type in dict.fromkeys(name for name, _ in keys) if model_type not in known]
    counts = {"num_passed": len(trained), "num_types": len({name for name, _ in keys})}
    counts |= {"num_heads": len(passing), "num_cases": len(keys)}
    tested = {task: [key for key in keys if key[1] == task] for task in TASKS}
    common = {task: of for task, of in tested.items() if len(of) >= COMMON}
    common["others"] = [key for task, of in tested.items() if task not in common for key in of]
    heads = [f"{task} {sum(results[key].passed for key in of)}/{len(of)}" for task, of in common.items()]
    lines = [HEADER.format(version=version, **counts), f"Heads that train, of those tested: {', '.join(heads)}."]
    lines += ["", UNTRAINED, ", ".join(untrained), "", REFUSED]
    lines += [f"- {model_type} ({task})" for model_type, task in refused]
    return "\n".join([*lines, ""])


@cache
def read() -> tuple[Results, str]:
    """The results of the last `make test-all`, and the version of transformers that they are of: others have other
    models and other messages."""
    kept = yaml.safe_load(RESULTS.read_text(encoding="utf-8"))
    found = {}
    for model_type, heads in kept["heads"].items():
        for task, result in heads.items():
            passed = result in (TRAINS, TRAINS_BY_OWN_LOSS)
            found[model_type, task] = Outcome(passed, "" if passed else result, result != TRAINS_BY_OWN_LOSS)
    return found, kept["transformers"]


def write(results: Results, version: str) -> None:
    """Writes the results, and the page."""
    heads: dict[str, dict[str, str]] = {}
    for model_type, task in _ordered(results):
        outcome = results[model_type, task]
        trains = TRAINS if outcome.has_own_loss else TRAINS_BY_OWN_LOSS
        heads.setdefault(model_type, {})[task] = trains if outcome.passed else outcome.reason
    kept = {"transformers": version, "heads": heads}
    text = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=10_000, allow_unicode=True)
    RESULTS.write_text(text, encoding="utf-8")
    read.cache_clear()
    PAGE.write_text(summary(results, version), encoding="utf-8")


FOUND: Results = {}
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
    outcome, (written, version) = run_ranks(compare, 2, case, timeout=200)[0], read()
    FOUND[case.key] = outcome
    if not request.config.getoption("--write-docs") and version == transformers.__version__:
        said = written.get(case.key)
        assert outcome == said, f"results.yaml says otherwise; run `make test-all`, which writes it: {said}"


def test_the_page_has_every_case_and_no_other_and_is_the_summary_of_the_results(request):
    known, (written, version) = {case.key for case in cases()}, read()
    if request.config.getoption("--write-docs") and FOUND:
        results = {key: outcome for key, outcome in {**written, **FOUND}.items() if key in known}
        write(results, transformers.__version__)
        written, version = read()
    assert PAGE.read_text(encoding="utf-8") == summary(written, version)
    assert len({model_type for (model_type, _), outcome in written.items() if outcome.passed}) >= 120
    if version != transformers.__version__:
        pytest.skip("the page is of another version of transformers")
    assert set(written) == known
