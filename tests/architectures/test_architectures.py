"""Every architecture of transformers that a tiny configuration can build trains sharded as it does in plain DDP.

docs/models.md is what these tests say. An ordinary run takes a slice of the model types, each with its main head;
`--all` takes all heads, and with `--write-docs` writes the page.
"""

import pytest
import transformers

from tests.architectures import page
from tests.architectures.compare import Outcome, compare
from tests.architectures.walk import Case, cases, main_cases
from tests.distributed import run_ranks


RESULTS: dict[Case, Outcome] = {}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        walked = cases() if metafunc.config.getoption("--all") else main_cases()
        metafunc.parametrize("case", walked, ids=[case.name for case in walked])


@pytest.fixture(scope="module")
def written() -> dict[tuple[str, str], Outcome]:
    """What the page says."""
    return page.parse(page.PAGE.read_text(encoding="utf-8")) if page.PAGE.exists() else {}


@pytest.mark.rotating
def test_trains_as_the_page_says(case, written, request):
    outcome = run_ranks(compare, 2, case, timeout=200)[0]
    RESULTS[case] = outcome
    if not request.config.getoption("--write-docs"):
        said = written.get((case.model_type, case.task))
        assert outcome == said, f"docs/models.md says otherwise; run `make test-all`, which writes it: {said}"


def test_the_page_has_every_case(written, request):
    if request.config.getoption("--write-docs"):
        if set(RESULTS) == set(cases()):
            page.PAGE.write_text(page.render(RESULTS, transformers.__version__), encoding="utf-8")
        return
    assert set(written) == {(case.model_type, case.task) for case in cases()}


def test_at_least_120_architectures_train(written):
    assert len({model_type for (model_type, _), outcome in written.items() if outcome.passed}) >= 120


def test_what_is_rendered_is_parsed():
    one, two, three = (Case(model_type, task, "") for model_type, task in [("a", "CTC"), ("a", "TDT"), ("b", "CTC")])
    results = {one: Outcome(True), two: Outcome(True, has_own_loss=False), three: Outcome(False, "Error: no")}
    parsed = page.parse(page.render(results, "5"))
    assert parsed == {(case.model_type, case.task): outcome for case, outcome in results.items()}
