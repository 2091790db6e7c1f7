"""Predictions against what others have published: peaks of memory, and throughput.

Nothing of ours is fitted here but the utilization of matrix products, on other rows than those that are compared.
"""

import statistics

import pytest

from hf_zero.planner import device_named
from tests.planner.published import FITTED, TITAN_A100, TITAN_H100, Row, predicted, tokens_per_second, utilization_of


def _near(row: Row) -> None:
    told = predicted(row)
    assert tokens_per_second(row, told) == pytest.approx(row.tokens, rel=0.2)
    if row.peak_gib is not None:
        assert told.peak_nbytes / 2**30 == pytest.approx(row.peak_gib, rel=0.1)


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("row", [*TITAN_H100, *TITAN_A100], ids=str)
def test_throughput_and_peak_are_what_was_published(row):
    _near(row)


@pytest.mark.full("slow")
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_the_utilization_is_the_median_of_other_rows(device):
    found = [utilization_of(row) for row in FITTED if row.device == device]
    assert device_named(device).utilization == pytest.approx(statistics.median(found), abs=0.011)
    assert statistics.quantiles(found, n=4)[2] - statistics.quantiles(found, n=4)[0] < 0.15  # the spread of the rows
