"""Trainer tells which backward of a step is the last, and stages 0 and 1 reduce while it runs; no bit changes."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from hf_zero.engine.engine import BackwardPass, ZeroEngine
from tests.distributed import ranks
from tests.tiers import more
from tests.trainer.harness import Rows, assert_equal, train


# Five micro-batches in an epoch, so a window of two, another one, and a short one.
SETTINGS = {"gradient_accumulation_steps": 2, "max_steps": 6}


@pytest.mark.parametrize("stage", [1, *more(0)])
@ranks(2, timeout=240)
def test_the_last_backward_reduces_also_in_a_short_window(tmp_path, stage):
    folder = str(tmp_path)
    runs, num_early = {}, []
    finish = BackwardPass.finish

    def count(backward: BackwardPass) -> None:
        num_early.append(len(backward.num_coming) - len(backward._early))
        finish(backward)

    for tells in (False, True):
        num_early.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BackwardPass, "finish", count)
            if not tells:
                patch.setattr(ZeroEngine, "reducing_this_backward", lambda *_: nullcontext())
            runs[tells] = train(stage, Path(folder, str(tells)), "llama", data=Rows("llama", 20), **SETTINGS)
        early = [count > 0 for count in num_early]
        assert early == [False, tells, False, tells, tells] * 2, early
    assert_equal(runs[True], runs[False], "told")
