"""What errors came from."""

import errno

from hf_zero.errors import causes
from hf_zero.trainer.hub import hub_reason


def test_the_causes_of_an_error_end_also_where_they_go_round():
    first, second = OSError(errno.EIO, "input/output error"), ValueError("not saved")
    second.__cause__ = first
    assert list(causes(second)) == [second, first]
    first.__cause__ = second
    assert list(causes(second)) == [second, first]
    alone = ValueError("raised from itself")
    alone.__cause__ = alone
    assert list(causes(alone)) == [alone] and list(causes(None)) == []
    assert hub_reason(alone) is None
