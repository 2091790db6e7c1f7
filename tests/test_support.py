"""docs/support.md says what the tests say, and nothing else."""

import pytest

from tests.conftest import RECORDER
from tests.support import FAILED, PAGE, REFUSED, YES, Cell, Claim, cells, parse, render


pytestmark = pytest.mark.quick


def test_every_result_so_far_stands_in_the_page(request):
    written = parse(PAGE.read_text(encoding="utf-8"))
    wrong = {cell: said for cell, said in request.config.stash[RECORDER].cells().items() if written.get(cell) != said}
    assert not wrong, f"docs/support.md says otherwise; run `make test-all`, which writes it: {wrong}"


def test_the_page_claims_nothing_that_no_test_claims(request):
    config = request.config
    if config.args != config.getini("testpaths"):
        pytest.skip("tells only when all tests are collected: `make test`")
    claimed = {
        Cell(claim.area, claim.feature, stage)
        for claim in config.stash[RECORDER].claims.values()
        for stage in claim.stages
    }
    assert set(parse(PAGE.read_text(encoding="utf-8"))) == claimed


def test_a_cell_that_one_test_fails_does_not_say_yes():
    claim = Claim("Area", "feature", (1, 2), YES)
    assert cells([(claim, True), (claim, False)]) == {Cell("Area", "feature", stage): FAILED for stage in (1, 2)}


def test_yes_and_refused_do_not_add_up():
    works, refuses = Claim("Area", "feature", (1,), YES), Claim("Area", "feature", (1,), REFUSED)
    assert cells([(works, True), (refuses, True)]) == {Cell("Area", "feature", 1): FAILED}


def test_what_is_rendered_is_parsed():
    table = {Cell("A", "one", 0): YES, Cell("A", "two", 3): REFUSED, Cell("B", "three", 1): YES}
    assert parse(render(table)) == table
