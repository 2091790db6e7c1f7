from collections.abc import Iterator

import pytest

from tests.device.backend import take_reports


@pytest.fixture(autouse=True)
def _no_reports() -> Iterator[None]:
    """Nothing is used before it is there, in any test."""
    take_reports()
    yield
    reports = take_reports()
    assert not reports, "\n".join(reports)
