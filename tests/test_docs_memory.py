"""The Python in docs/memory.md runs."""

from pathlib import Path

import torch

from hf_zero.engine import engine_of
from tests.distributed import run_ranks
from tests.test_readme import fenced_blocks


PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BLOCKS = [block.text for block in fenced_blocks(PAGE.read_text(encoding="utf-8")) if block.language == "python"]


def _offloads() -> None:
    names: dict = {}
    exec(BLOCKS[0], names)
    assert engine_of(names["sharded"]).bus.host_nbytes > 0
    started = [p.detach().clone() for p in names["model"].parameters()]
    assert all(p.dtype is torch.bfloat16 and p.isfinite().all() for p in started)
    exec(BLOCKS[0].partition("\n\n")[2].partition("optimizer = ")[2].partition("\n\n")[2], names)  # one step more
    assert any(not torch.equal(p, before) for p, before in zip(names["model"].parameters(), started))


def test_the_loop_that_offloads():
    assert len(BLOCKS) == 1
    for num_ranks in (1, 2):
        run_ranks(_offloads, num_ranks)
