"""Several shard groups train as one group of all ranks does: each holds the whole model, and gathers stay within it.

[Note: what differs] Each group adds up its ranks' gradients, and then the groups' sums are added: with groups of one
rank that is the order of one group of all ranks, bit for bit; with others the sums are rounded elsewhere.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm import ranks, rendezvous
from hf_zero.comm.groups import ranks_of_a_host
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError
from tests import models
from tests.distributed import run_ranks
from tests.test_parity import ATOL
from tests.training import Plain, Sharded, adamw, assert_close, assert_equal, loss_of, train, train_accumulating


NAME, NUM_STEPS = "llama", 4
# How all ranks, those of a shard group and those of a replicate group exchange.
KINDS = {
    "two hosts": ["TwoLevelComm", "SharedComm", "PairwiseComm"],
    "shared memory": ["SharedComm"] * 3,
    "messages": ["PairwiseComm"] * 3,
}


def _adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def _subject(stage: int, make_optimizer=adamw, **settings) -> Sharded:
    return Sharded(models.build(NAME), make_optimizer, stage, **settings)


def _assert_equal_on_all_ranks(subject: Sharded, what: str) -> None:
    """Every rank ends with the same weights, bit for bit: what a group has is what all others have."""
    bits = [int(values.view(torch.int32).sum(dtype=torch.int64)) for values in subject.weights().values()]
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, bits)
    assert all(other == bits for other in everyones), what


@contextmanager
def on_two_hosts(is_so: bool) -> Iterator[None]:
    """Lets the first two of four ranks, and the last two, take themselves for ranks of a host each."""
    with pytest.MonkeyPatch.context() as patch:
        if is_so:
            host = f"host{dist.get_rank() // 2}"
            patch.setattr(rendezvous, "_boot_id", lambda: host)
            patch.setattr(ranks, "_ADDRESSES", WeakKeyDictionary())
            patch.setattr(socket, "gethostname", lambda: host)
        yield


def _train_all(way: str) -> None:
    settings = {"shared_memory": way != "messages"}
    full = train(_subject(3, **settings), NAME, num_steps=NUM_STEPS)
    two = None
    for stage in (1, 2, 3):
        with on_two_hosts(way == "two hosts"):
            subject = _subject(stage, shard_size="auto" if way == "two hosts" else 2, **settings)
        comm = subject.engine.comm
        kinds = [type(each).__name__ for each in (comm, comm.shard_group, comm.replicate_group)]
        assert kinds == KINDS[way] and comm.shard_group.num_ranks == 2
        found = train(subject, NAME, num_steps=NUM_STEPS)
        assert_close(found, full, f"stage {stage} in groups of two, and over all ranks", atol=ATOL)
        _assert_equal_on_all_ranks(subject, f"stage {stage}")
        if two is not None:
            assert_equal(found, two, f"stages {stage} and 1 in groups of two")
        two = found
        for size in (1, 4) if stage == 3 else ():
            alike = train(_subject(stage, shard_size=size, **settings), NAME, num_steps=NUM_STEPS)
            assert_equal(alike, full, f"stage {stage} in groups of {size}, and over all ranks")
    plain = train(Plain(models.build(NAME), adamw), NAME, num_steps=NUM_STEPS)
    assert_close(two, plain, "groups of two and plain torch", atol=ATOL)


@pytest.mark.parametrize("way", KINDS)
@pytest.mark.full("slow")
def test_groups_of_any_size_train_like_one_group_of_all_ranks(way):
    run_ranks(_train_all, 4, way)


def _train_otherwise() -> None:
    for stage, settings in [
        (2, {"offload": "optimizer"}),
        (3, {"offload": "params"}),
        (3, {"compute_dtype": torch.bfloat16}),
        (2, {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
        (3, {"keep_gathered": 2, "bucket_nbytes": 4096}),
    ]:
        for shared_memory in (True, False):
            runs = [
                train(_subject(stage, shard_size=size, shared_memory=shared_memory, **settings), NAME, num_steps=3)
                for size in (2, 4)
            ]
            is_half = "compute_dtype" in settings
            bounds = {"loss": 0.02, "norm": 0.05, "weight": 0.02} if is_half else {}
            assert_close(*runs, f"stage {stage} with {settings}", atol=2e-3 if is_half else ATOL, **bounds)
            same = train(_subject(stage, shard_size=1, shared_memory=shared_memory, **settings), NAME, num_steps=3)
            if not is_half:
                assert_equal(same, runs[1], f"groups of one, stage {stage} with {settings}")
    runs = [train_accumulating(_subject(3, shard_size=size), NAME) for size in (2, 4)]
    assert_close(*runs, "with several micro-batches", atol=ATOL)
    runs = [train(_subject(3, _adafactor, shard_size=size), NAME, num_steps=3) for size in (2, 4)]
    assert_close(*runs, "with an optimizer of whole parameters", weight=1e-3, atol=1e-4)


def _train_on_unlike_hosts() -> None:
    full = train(_subject(3), NAME, num_steps=NUM_STEPS)
    host = "one" if dist.get_rank() < 2 else f"host{dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_boot_id", lambda: host)
        patch.setattr(ranks, "_ADDRESSES", WeakKeyDictionary())
        subject = _subject(3, shard_size=2)
    assert subject.engine.comm.shard_group.shared_memory is None
    assert_close(train(subject, NAME, num_steps=NUM_STEPS), full, "one group on a host, one on two", atol=ATOL)


@pytest.mark.full("slow")
def test_groups_of_which_some_could_share_memory_all_send_messages():
    run_ranks(_train_on_unlike_hosts, 4)


@pytest.mark.full("slow")
def test_settings_go_with_groups():
    run_ranks(_train_otherwise, 4)


def _sends(stage: int) -> None:
    subject = _subject(stage, shard_size=2, shared_memory=False)
    comm = subject.engine.comm
    train(subject, NAME, num_steps=1)
    counted = {name: dict(each.counters.sent_nbytes) for name, each in _comms(comm).items()}
    train(subject, NAME, num_steps=1)
    sent = {
        name: {verb: nbytes - counted[name].get(verb, 0) for verb, nbytes in each.counters.sent_nbytes.items()}
        for name, each in _comms(comm).items()
    }
    elements = sum(flat.layout.full_numel for flat in subject.engine.flats)
    shard, across, total = sent["shard"], sent["replicate"], sent["all"]
    # half of all within the group, and of a shard, which is half of all, another half each way across
    assert shard["reduce"] == 4 * elements // 2
    assert across == {"reduce": 4 * elements // 4, "gather": 4 * elements // 4}
    assert total["all_reduce"] == sum(across.values())
    assert total["gather"] == shard["gather"] and total["reduce"] == shard["reduce"]
    assert stage != 3 or shard["gather"] >= 4 * elements // 2
    bare = engine_of(hf_zero.shard(models.build(NAME), stage=stage, shared_memory=False)).comm
    assert bare.replicate_group is None and bare.shard_group is bare


def _comms(comm) -> dict:
    return {"all": comm, "shard": comm.shard_group, "replicate": comm.replicate_group}


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.full("more cases", after=1)
def test_gathers_stay_within_a_group_and_a_shard_alone_crosses(stage):
    run_ranks(_sends, 4, stage)


def _go_on(subject: Sharded, first: int, last: int) -> list[float]:
    """The same batch on every rank: its average is the same bit for bit, whatever the groups."""
    losses = []
    for step in range(first, last):
        loss = loss_of(subject(**models.batch(NAME, seed=step)))
        loss.backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {"adamw": adamw, "adafactor": _adafactor}


def _save(folder: str, kind: str, stage: int, size: int | None) -> None:
    subject = _subject(stage, OPTIMIZERS[kind], shard_size=size)
    _go_on(subject, 0, 2)
    before = {name: values.clone() for name, values in subject.weights().items()}
    hf_zero.save_checkpoint(subject.engine, subject.optimizer, folder)
    written = subject.engine.comm.all_gather_object(
        [(shard.name, shard.start, shard.tensor.numel()) for shard in subject.engine.named_shards()]
    )
    seen: dict[str, list] = {}
    for ranges in written:
        for name, start, numel in ranges:
            seen.setdefault(name, []).append((start, numel))
    for name, values in before.items():  # each element once
        end = 0
        for start, numel in sorted(seen[name]):
            assert start == end, name
            end += numel
        assert end == values.numel(), name
    losses = _go_on(subject, 2, 5)
    if dist.get_rank() == 0:
        Path(folder, "unbroken.json").write_text(json.dumps(losses))


def _resume(folder: str, kind: str, stage: int, size: int | None) -> None:
    subject = _subject(stage, OPTIMIZERS[kind], shard_size=size)
    hf_zero.load_weights(subject.engine, folder)
    hf_zero.load_state(subject.engine, subject.optimizer, folder)
    unbroken = json.loads(Path(folder, "unbroken.json").read_text())
    assert _go_on(subject, 2, 5) == pytest.approx(unbroken, rel=0 if kind == "adamw" else 1e-5)
    _assert_equal_on_all_ranks(subject, "resumed")


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("saved, resumed", [(2, None), (None, 2), (1, 2)])
@pytest.mark.full("more cases", after=1)
def test_a_run_resumes_in_groups_of_another_size(tmp_path, kind, saved, resumed):
    run_ranks(_save, 4, str(tmp_path), kind, 3, saved)
    run_ranks(_resume, 4, str(tmp_path), kind, 3, resumed)
    run_ranks(_resume, 4, str(tmp_path), kind, 1, saved)


def _refused(size) -> str:
    with pytest.raises(ConfigError) as caught:
        hf_zero.shard(models.build(NAME), stage=2, shard_size=size)
    return str(caught.value)


def test_sizes_that_do_not_fit_are_refused():
    assert _refused(0) == "shard_size: 0 is no number of ranks; give 1 or more, or auto"
    assert _refused("two") == "shard_size: 'two' is no number of ranks; give 1 or more, or auto"
    assert _refused(1.5).startswith("shard_size: 1.5 is of type float; give a whole number, auto, or None")
    with pytest.raises(ConfigError, match="stage 0 shards nothing; use stage 1, 2 or 3"):
        hf_zero.shard(models.build(NAME), stage=0, shard_size=2)
    for found in run_ranks(_refused, 4, 3):
        assert found.startswith("shard_size: 4 ranks cannot form groups of 3; give a divisor of 4 (1, 2, 4), auto")


def test_auto_takes_the_ranks_of_one_host():
    assert ranks_of_a_host(["a", "a", "b", "b"]) == 2
    assert ranks_of_a_host(["a"] * 4) == 4
    assert ranks_of_a_host(["a", "b", "c"]) == 3, "there is nothing to keep on a host"
    for uneven in (["a", "a", "b"], ["a", "b", "a", "b"], ["a", "a", "b", "c"], ["a", "a", "b", "b", "a", "a"]):
        assert ranks_of_a_host(uneven) == len(uneven)
