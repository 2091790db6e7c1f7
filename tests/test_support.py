"""docs/support.md says what the tests say, and nothing else."""

import pytest

from tests.conftest import RECORDER
from tests.support import FAILED, PAGE, YES, Cell, Claim, cells, parse


pytestmark = pytest.mark.quick


def test_the_page_says_what_the_tests_say_when_all_pass(request):
    """And a test that does not pass is seen anyway."""
    config = request.config
    if config.args != config.getini("testpaths"):
        pytest.skip("tells only when all tests are collected: `make test`")
    claims = config.stash[RECORDER].claims.values()
    said, written = cells((claim, True) for claim in claims), parse(PAGE.read_text(encoding="utf-8"))
    unlike = {cell: (said.get(cell), written.get(cell)) for cell in said | written}
    unlike = {cell: pair for cell, pair in unlike.items() if pair[0] != pair[1]}
    assert not unlike, f"what tests say, and docs/support.md; run `make test-all`, which writes what passes: {unlike}"


def test_a_cell_that_one_test_fails_does_not_say_yes():
    claim = Claim("Area", "feature", (1, 2), YES)
    assert cells([(claim, True), (claim, False)]) == {Cell("Area", "feature", stage): FAILED for stage in (1, 2)}
