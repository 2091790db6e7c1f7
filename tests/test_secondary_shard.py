"""A second copy of the parameters within each host: after an update they leave it once, and no bit changes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint import load_state, load_weights, save_pretrained, save_state
from hf_zero.comm.groups import ranks_beside
from hf_zero.engine import build, engine_of
from tests import models
from tests.checkpoint import models as tiny
from tests.checkpoint.test_training import train as train_whole_batches
from tests.distributed import run_ranks
from tests.simulated import training
from tests.simulated.training import SCENARIOS
from tests.test_groups import on_two_hosts
from tests.tiers import in_core
from tests.training import Sharded, adamw, assert_equal, loss_of, train_accumulating


NAME = "llama"
# How all ranks, and those of one host, exchange.
KINDS = {True: ["TwoLevelComm", "HostComm"], False: ["PairwiseComm", "PairwiseComm"]}


@contextmanager
def _gathering(subject: Sharded, *, across: bool, within: bool) -> Iterator[None]:
    """Checks which ways values are gathered inside."""
    counted = subject.engine.comm.counters.sent_nbytes
    before = dict(counted)
    yield
    added = [counted.get(verb, 0) > before.get(verb, 0) for verb in ("gather", "gather within hosts")]
    assert added == [across, within], (before, counted)


def _leaves_a_host_once(shared_memory: bool) -> None:
    with on_two_hosts(True):
        subject = Sharded(models.build(NAME), adamw, 3, shared_memory=shared_memory, secondary_shard=True)
    comm = subject.engine.comm
    assert [type(each).__name__ for each in (comm, comm.host_group)] == KINDS[shared_memory]
    for step in range(2):
        with _gathering(subject, across=True, within=False):
            loss = loss_of(subject(**models.batch(NAME, seed=step)))
        with _gathering(subject, across=False, within=True):
            loss.backward()
        with _gathering(subject, across=False, within=True), torch.no_grad():
            subject(**models.batch(NAME, seed=9))
        with _gathering(subject, across=False, within=True):  # a further micro-batch
            loss_of(subject(**models.batch(NAME, seed=step))).backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    with _gathering(subject, across=True, within=False), torch.no_grad():
        subject(**models.batch(NAME, seed=9))
    with _gathering(subject, across=False, within=True):  # an evaluation has filled it
        loss_of(subject(**models.batch(NAME, seed=3)))
    block = subject.model.model.layers[1]
    with hf_zero.gathered(block, writeback=True):
        next(block.parameters()).data.mul_(2)
    with _gathering(subject, across=True, within=True):  # one block was written to, the others are as they were
        loss_of(subject(**models.batch(NAME, seed=3)))
    _is_measured(subject)


def _is_measured(subject: Sharded) -> None:
    engine = subject.engine
    own = [flat.rest.secondary.shard.values for flat in engine.flats if flat.rest.secondary is not None]
    blocks = sum(flat.layout.full_numel for unit in engine.blocks for flat in unit.flats)
    assert sum(values.numel() for values in own) == blocks // 2
    at_rest = sum(flat.master.nbytes for flat in engine.flats)
    report = hf_zero.ShardedModel(subject.model).memory()
    assert report.parameter_nbytes == at_rest + sum(values.nbytes for values in own)


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_values_leave_a_host_once_after_an_update(shared_memory):
    run_ranks(_leaves_a_host_once, 4, shared_memory)


# All that a training at stage 3 may do: several micro-batches, evaluations, blocks that ranks skip, what breaks off.
WAYS = [
    name
    for name, scenario in SCENARIOS.items()
    if scenario.settings["stage"] == 3 and scenario.settings.get("offload") != "params"
    if scenario.world == "accelerator" and not scenario.shares_batches
]
CORE = [("stage 3, blocks skipped", True)]


def _trains_alike(name: str, shared_memory: bool) -> None:
    scenario, records = SCENARIOS[name], []
    for secondary_shard in (False, True):
        own = {"shared_memory": shared_memory, "secondary_shard": secondary_shard}
        with on_two_hosts(True):
            changed = replace(scenario, settings=scenario.settings | own)
            records.append(training.train(changed, torch.device("cpu")))
    assert_equal(records[1], records[0], name)


@pytest.mark.parametrize("name, shared_memory", in_core(CORE, [(name, on) for name in WAYS for on in (True, False)]))
def test_no_bit_depends_on_it(name, shared_memory):
    run_ranks(_trains_alike, 4, name, shared_memory)


def _goes_through_updates(shared_memory: bool, shard_size: int | None = None) -> None:
    """Steps with nothing but an update between them: no forward may see the values before it."""
    records = []
    for secondary_shard in (False, True):
        own = {"shared_memory": shared_memory, "shard_size": shard_size, "secondary_shard": secondary_shard}
        with on_two_hosts(True):
            subject = Sharded(models.build(NAME), adamw, 3, compute_dtype=torch.bfloat16, **own)
        records.append(train_accumulating(subject, NAME, num_steps=3, num_micro=2))
        assert (subject.engine.comm.shard_group.host_group is not None) is secondary_shard
    assert_equal(records[1], records[0], "several steps")


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_forward_sees_the_values_after_the_update(shared_memory):
    run_ranks(_goes_through_updates, 4, shared_memory)


@pytest.mark.full("slow")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_shard_groups_of_several_hosts_have_a_copy_on_each(shared_memory):
    run_ranks(_goes_through_updates, 8, shared_memory, 4)  # four hosts of two ranks, two in each group


def _frozen_never_leaves(dtype: torch.dtype | None) -> None:
    model = models.build(NAME)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "layers" not in name)
    settings = {"secondary_shard": True, "shared_memory": False, "compute_dtype": dtype}
    with on_two_hosts(True):
        subject = Sharded(model, adamw, 3, **settings)
    engine, counted = subject.engine, subject.engine.comm.counters.sent_nbytes
    sent = []
    for step in range(3):
        before = counted.get("gather", 0)
        loss_of(subject(**models.batch(NAME, seed=step))).backward()
        sent.append(counted["gather"] - before)
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    nbytes = [flat.layout.shard_numel * flat.dtype.itemsize for flat in engine.flats if not flat.trainable]
    assert sent[1] == sent[2] == sent[0] - sum(nbytes) * (engine.comm.num_ranks - 1)


@pytest.mark.full("slow")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_frozen_leaves_a_host_once(dtype):
    run_ranks(_frozen_never_leaves, 4, dtype)


def _frozen_beside_trained(shared_memory: bool) -> None:
    """In one unit a buffer is gathered over all ranks, and behind it two of frozen parameters within hosts."""
    records = []
    for secondary_shard in (False, True):
        model = models.build(NAME)
        for name, p in model.named_parameters():
            p.requires_grad_("layers" not in name or "attn" in name)
            p.data = p.data.bfloat16() if "norm" in name else p.data
        with on_two_hosts(True):
            subject = Sharded(model, adamw, 3, shared_memory=shared_memory, secondary_shard=secondary_shard)
        assert [flat.trainable for flat in subject.engine.blocks[0].flats] == [True, False, False]
        records.append(train_accumulating(subject, NAME, num_steps=3, num_micro=1))
    assert_equal(records[1], records[0], "frozen beside trained")


@pytest.mark.parametrize("shared_memory", in_core([True], [True, False]))
def test_frozen_parameters_beside_trained_ones(shared_memory):
    run_ranks(_frozen_beside_trained, 4, shared_memory)


def _goes_on(folder: Path) -> None:
    def start(secondary_shard: bool):
        with on_two_hosts(True):
            engine = engine_of(hf_zero.shard(tiny.tied_llama(), stage=3, secondary_shard=secondary_shard))
        return engine, hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=1e-2)

    runs = [start(True), start(False), start(True)]
    train_whole_batches(*runs[0], 0, 3)
    save_pretrained(runs[0][0], folder)
    save_state(*runs[0], folder)
    losses = [train_whole_batches(*runs[0], 3, 6)]
    for run in runs[1:]:
        train_whole_batches(*run, 7, 8)  # of other values
        load_weights(run[0], folder)
        load_state(*run, folder)
        losses.append(train_whole_batches(*run, 3, 6))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.full("slow")
def test_a_run_goes_on_with_it_and_without(tmp_path):
    run_ranks(_goes_on, 4, tmp_path)


def _counts_the_copy() -> None:
    with on_two_hosts(True):
        engine = Sharded(models.build(NAME), adamw, 3, secondary_shard=True).engine
    numel = sum(flat.layout.shard_numel for flat in engine.flats if flat.trainable)
    blocks = sum(flat.layout.full_numel for unit in engine.blocks for flat in unit.flats)
    nbytes = blocks  # a buffer; the second copy on this rank takes twice that
    pages = {"SC_AVPHYS_PAGES": 4 * (12 * numel + 2 * nbytes + 6 * nbytes), "SC_PAGE_SIZE": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_zero.engine.build.os.sysconf", pages.__getitem__)
        assert build._fitting(nbytes, engine.units, engine.comm) == 3


@pytest.mark.full("more cases", after=0)
def test_blocks_that_stay_gathered_leave_room_for_it():
    run_ranks(_counts_the_copy, 4)


def _says(hosts: list[str], shard_size: int | None = None) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_zero.comm.world")
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        of_group = dist.get_process_group_ranks
        patch.setattr("hf_zero.comm.ranks.hosts", lambda group: [hosts[rank] for rank in of_group(group)])
        settings = {"shared_memory": False, "secondary_shard": True, "shard_size": shard_size}
        subject = Sharded(models.build(NAME), adamw, 3, **settings)
    logger.removeHandler(handler)
    assert subject.engine.comm.host_group is None
    assert all(flat.rest.secondary is None for flat in subject.engine.flats)
    return said


@pytest.mark.full("slow")
def test_where_it_can_do_nothing_one_rank_says_so():
    assert run_ranks(_says, 2, ["a", "a"]) == [[], []]
    (line,), others = run_ranks(_says, 2, ["a", "b"])
    assert "secondary_shard does nothing: the hosts have 1, 1 of the ranks" in line and not others
    (line,), *others = run_ranks(_says, 4, ["a", "a", "b", "b"], 2)
    assert "does nothing: the ranks of each shard group are on one host" in line and not any(others)


@pytest.mark.quick
@pytest.mark.parametrize(
    "hosts, found",
    [("aabb", [2, 3]), ("abab", [0, 2]), ("aaaa", None), ("abcd", None), ("aaab", None)],
)
def test_the_ranks_of_a_host_need_not_be_neighbours(hosts, found):
    assert ranks_beside(found[0] if found else 3, list(hosts)) == found
