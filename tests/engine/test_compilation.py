"""Compiled blocks: the engine's hooks stay outside of the graphs, of which there is one for each kind of block."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import UnsupportedError
from tests.distributed import ranks, run_new_ranks
from tests.engine.models import Tower, inputs, loss_of
from tests.engine.reference import assert_like_plain_torch
from tests.engine.test_checkpointing import InsideTower, OutsideTower, built
from tests.tiers import more


pytestmark = pytest.mark.direct


LIMIT = 240.0


def watch_graphs() -> dict:
    """Returns what torch counts from now on. Call it in new ranks: torch counts the graphs of the whole process, and
    what earlier tests have left there adds to them."""
    from torch._dynamo.utils import counters

    return counters


def _compiled(cls, use_reentrant, num_graphs):
    counters = watch_graphs()
    steps = 4  # after the first, blocks may get other slots

    def act(model, rank, step):
        engine = engine_of(model)
        if engine is not None:
            counters.clear() if step == 0 else None
            hf_zero.compile_blocks(engine, backend="aot_eager", fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True) if step else nullcontext():
            loss = loss_of(model(inputs(rank, step)))
            loss.backward()
        if engine is not None and step == steps - 1:
            assert counters["stats"]["unique_graphs"] == num_graphs, dict(counters["stats"])
            assert not counters["graph_break"]
            torch._dynamo.reset()  # the next stage compiles anew
        return [loss.detach()]

    assert_like_plain_torch(built(cls, use_reentrant), act, num_steps=steps)


# A reentrant segment outside of the blocks runs them first without gradients: a second graph.
@pytest.mark.support(
    "torch.compile of blocks, gradient checkpointing by hand", area="Training features", stages=(1, 2, 3)
)
@pytest.mark.parametrize("cls, use_reentrant, num_graphs", [(OutsideTower, False, 1), (OutsideTower, True, 2)])
@pytest.mark.full("more cases", after=1)
def test_compiled_blocks_in_checkpoints_share_one_graph(cls, use_reentrant, num_graphs):
    run_new_ranks(_compiled, 2, cls, use_reentrant, num_graphs, timeout=LIMIT)


@pytest.mark.support("torch.compile of blocks", area="Training features", stages=(1, 2, 3))
@pytest.mark.parametrize("cls", [Tower, *more(InsideTower)])
def test_compiled_blocks_share_one_graph_and_train_as_in_plain_torch(cls):
    run_new_ranks(_compiled, 2, cls, False, 1, timeout=LIMIT)


@ranks(2, timeout=LIMIT)
def test_modules_outside_of_blocks_stay_as_they_are():
    model = Tower()
    engine = hf_zero.shard(model, stage=3)
    hf_zero.compile_blocks(engine, backend="eager")
    forwards = [block.forward.forward for block in model.layers]
    hf_zero.compile_blocks(engine, backend="eager")
    assert [block.forward.forward for block in model.layers] == forwards, "the same options once more change nothing"
    assert isinstance(model.embed.forward.forward, partial) and "forward" not in model.layers[0].up.__dict__


@pytest.mark.support("torch.compile of a model without blocks", area="Training features", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_a_model_without_blocks_is_refused(stage):
    engine = hf_zero.shard(nn.Linear(3, 2), stage=stage)
    with pytest.raises(UnsupportedError, match="Linear: has no repeated blocks .*remove torch_compile"):
        hf_zero.compile_blocks(engine)


@pytest.mark.support("Modules compiled before sharding", area="Training features", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_modules_that_are_compiled_already_are_refused(stage):
    whole, block = Tower(), Tower()
    whole.compile(backend="eager")
    block.layers[1].compile(backend="eager")
    for model in (whole, block, torch.compile(Tower(), backend="eager")):
        with pytest.raises(UnsupportedError, match=r"(model|layers\.1): is already compiled.*hf_zero.compile_blocks"):
            hf_zero.shard(model, stage=stage)
