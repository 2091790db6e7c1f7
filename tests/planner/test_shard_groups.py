"""Shard groups in a plan: what `shard_size="auto"` comes to, as in a run."""

from functools import partial
from itertools import product

import pytest
import torch

from hf_zero.comm import ranks as comm_ranks
from hf_zero.comm.groups import fitting_size, shard_size_of
from hf_zero.config import MemoryTier, ZeroConfig
from hf_zero.engine.memory import STATES_SHARE, states_nbytes
from tests.loopback import run_loopback
from tests.planner import subjects
from tests.planner.subjects import predict


STATES = {"parameters", "frozen parameters", "masters", "optimizer state", "gradients", "reduced gradients"}
WAYS = [*product(range(4), ("none", "optimizer")), (3, "params")]
DTYPES = [{}, {"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}]


def _half_frozen():
    model = subjects.llama()
    for param in list(model.parameters())[::2]:
        param.requires_grad_(False)
    return model


@pytest.mark.quick
@pytest.mark.parametrize("make", [subjects.llama, _half_frozen])
def test_states_are_told_as_an_engine_holds_them(make):
    """Ranges of ranks are rounded up to 16 elements."""
    model = make()
    for (stage, offload), dtypes in product(WAYS, DTYPES):
        settings = {"stage": stage, "offload": offload, **dtypes}
        classes = predict(model, num_ranks=8, **settings).classes
        held = sum(each.nbytes for each in classes if each.name in STATES and each.tier is MemoryTier.DEVICE)
        assert states_nbytes(model, ZeroConfig(**settings), 8) == pytest.approx(held, rel=0.01), settings


@pytest.mark.quick
@pytest.mark.parametrize(("does", "told"), [(True, "fit"), (False, "do not fit either: hf-zero plan")])
def test_it_is_told_whether_larger_shard_groups_hold_the_states(does, told, monkeypatch, caplog):
    monkeypatch.setattr(comm_ranks, "hosts", lambda group: ["a", "a", "b", "b"])
    choose = partial(shard_size_of, group=None, shard_size="auto", fits=lambda size: does and size == 4)
    assert run_loopback(4, choose, torch.device("cpu")) == [4] * 4
    (line,) = caplog.messages
    assert (
        "do not fit on the devices when sharded over the 2 ranks of one host; sharded over 4 of 4 ranks, they " + told
        in line
    )
    assert does is line.endswith(told)


@pytest.mark.quick
def test_shard_groups_are_of_the_fewest_hosts_that_hold_the_states():
    assert fitting_size(4, 24, lambda _: True) == 4
    assert fitting_size(4, 24, lambda size: size > 4) == 8
    assert fitting_size(4, 24, lambda size: size > 12) == 24, "groups of 16 and 20 would not be equal"
    assert fitting_size(4, 24, lambda _: False) == fitting_size(24, 24, lambda _: False) == 24
    model, config = subjects.llama(), ZeroConfig(shard_size="auto")
    settings = {"num_ranks": 16, "ranks_per_host": 4, "shard_size": "auto"}
    for size in (4, 8, 16):
        memory = int(states_nbytes(model, config, size) / STATES_SHARE) + 1
        found = predict(model, memory_nbytes=memory, **settings)
        assert (found.shard_size, found.config.shard_size) == (size, "auto")
        assert found.classes == predict(model, **{**settings, "shard_size": size}).classes
    assert predict(model, memory_nbytes=1, **settings).shard_size == 16
    # how much ranks on CPUs may take of the memory that they share is not known
    assert (
        predict(model, memory_nbytes=1, on_cpu=True, **settings).shard_size
        == predict(model, **settings).shard_size
        == 4
    )
