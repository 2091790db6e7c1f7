"""Every architecture of transformers that a tiny configuration can build trains sharded as it does in plain DDP.

docs/models.md is what these tests say; with another version of transformers than that of the page, they only see to it
that nothing fails in hf_zero. An ordinary run takes a slice of the model types, each with its main head;
`--all` takes all heads. With `--write-docs`, what a run finds is written into the page.
"""

import pytest
import transformers

from tests.architectures import page
from tests.architectures.compare import Outcome, compare
from tests.architectures.walk import cases, main_cases
from tests.distributed import run_ranks


RESULTS: page.Results = {}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        walked = cases() if metafunc.config.getoption("--all") else main_cases()
        metafunc.parametrize("case", walked, ids=[case.name for case in walked])


@pytest.mark.rotating
def test_trains_as_the_page_says(case, request):
    outcome = RESULTS[case.key] = run_ranks(compare, 2, case, timeout=200)[0]
    if not request.config.getoption("--write-docs") and page.is_of(transformers.__version__):
        said = page.written().get(case.key)
        assert outcome == said, f"docs/models.md says otherwise; run `make test-all`, which writes it: {said}"


def test_the_page_has_every_case_and_no_other(request):
    known = {case.key for case in cases()}
    if request.config.getoption("--write-docs") and RESULTS:
        results = {key: outcome for key, outcome in {**page.written(), **RESULTS}.items() if key in known}
        page.PAGE.write_text(page.render(results, transformers.__version__), encoding="utf-8")
    if not page.is_of(transformers.__version__):
        pytest.skip("the page is of another version of transformers")
    assert set(page.written()) == known


def test_at_least_120_architectures_train():
    assert len({model_type for (model_type, _), outcome in page.written().items() if outcome.passed}) >= 120


def test_what_is_rendered_is_parsed():
    results = {
        ("a", "CTC"): Outcome(True),
        ("a", "TDT"): Outcome(True, has_own_loss=False),
        ("b", "CTC"): Outcome(False, "ValueError: no"),
    }
    assert page.parse(page.render(results, "5")) == results
