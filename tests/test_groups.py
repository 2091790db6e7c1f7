"""Several shard groups train as one group of all ranks does: each holds the whole model, and gathers stay within it.

[Note: what differs] Each group adds up its ranks' gradients, and then the groups' sums are added: with groups of one
rank that is the order of one group of all ranks, bit for bit; with others the sums are rounded elsewhere.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm import ranks as comm_ranks
from hf_zero.comm.groups import ranks_of_a_host
from hf_zero.engine import build, engine_of
from hf_zero.engine.engine import COMPARE_EVERY
from hf_zero.errors import ConfigError, LifecycleError
from tests import models
from tests.compare import assert_close, assert_equal, assert_equal_on_all_ranks
from tests.distributed import ranks, run_ranks
from tests.test_parity import ATOL
from tests.training import Plain, Sharded, adamw, go_on, loss_of, train, train_accumulating


NAME, NUM_STEPS = "llama", 4
# How all ranks, those of a shard group and those of a replicate group exchange.
KINDS = {
    "two hosts": ["PairwiseComm", "SharedComm", "PairwiseComm"],
    "shared memory": ["SharedComm"] * 3,
    "messages": ["PairwiseComm"] * 3,
}


def _adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-3)


def _subject(stage: int, make_optimizer=adamw, **settings) -> Sharded:
    return Sharded(models.build(NAME), make_optimizer, stage, **settings)


@contextmanager
def on_two_hosts(is_so: bool) -> Iterator[None]:
    """Lets the first two of four ranks, and the last two, take themselves for ranks of a host each."""
    with pytest.MonkeyPatch.context() as patch:
        if is_so:
            host = f"host{dist.get_rank() // 2}"
            patch.setattr(comm_ranks, "boot_id", lambda: host)
            for known in ("_ADDRESSES", "_PARTS"):  # of one host
                patch.setattr(comm_ranks, known, WeakKeyDictionary())
        yield


@pytest.mark.parametrize("way", KINDS)
@pytest.mark.full("slow")
@ranks(4)
def test_groups_of_any_size_train_like_one_group_of_all_ranks(way):
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
        assert_equal_on_all_ranks(subject.weights(), f"stage {stage}")
        if two is not None:
            assert_equal(found, two, f"stages {stage} and 1 in groups of two")
        two = found
        for size in (1, 4) if stage == 3 else ():
            alike = train(_subject(stage, shard_size=size, **settings), NAME, num_steps=NUM_STEPS)
            assert_equal(alike, full, f"stage {stage} in groups of {size}, and over all ranks")
    plain = train(Plain(models.build(NAME), adamw), NAME, num_steps=NUM_STEPS)
    assert_close(two, plain, "groups of two and plain torch", atol=ATOL)


@pytest.mark.full("slow")
@ranks(4)
def test_settings_go_with_groups(tmp_path):
    for stage, settings in [
        (3, {"offload": "params", "offload_dir": str(tmp_path)}),
        (3, {"compute_dtype": torch.bfloat16, "shared_memory": False}),
        (2, {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
        (3, {"keep_gathered": 2, "bucket_nbytes": 4096, "shared_memory": False}),
    ]:
        is_half = "compute_dtype" in settings
        bounds = {"loss": 0.02, "norm": 0.05, "weight": 0.02, "atol": 2e-3} if is_half else {"atol": ATOL}
        two, four = (train(_subject(stage, shard_size=size, **settings), NAME, num_steps=3) for size in (2, 4))
        assert_close(two, four, f"stage {stage} with {settings}", **bounds)
    runs = [train_accumulating(_subject(3, shard_size=size), NAME) for size in (2, 4)]
    assert_close(*runs, "with several micro-batches", atol=ATOL)
    runs = [train(_subject(3, _adafactor, shard_size=size), NAME, num_steps=3) for size in (2, 4)]
    assert_close(*runs, "with an optimizer of whole parameters", weight=1e-3, atol=1e-4)


def _comms(comm) -> dict:
    return {"all": comm, "shard": comm.shard_group, "replicate": comm.replicate_group}


@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.full("more cases", after=1)
@ranks(4)
def test_gathers_stay_within_a_group_and_a_shard_alone_crosses(stage):
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


OPTIMIZERS = {"adamw": adamw, "adafactor": _adafactor}


# A stage, how many ranks a group has (None: all), and what rests elsewhere: so a run is saved, and so it goes on.
OPTIMIZER, PARAMS = {"offload": "optimizer"}, {"offload": "params"}
Way = tuple[int, int | None, dict]
RESUMED: list[Way] = [(3, None, {}), (3, 2, OPTIMIZER), (1, 2, {}), (2, None, OPTIMIZER), (2, 4, {}), (3, 1, PARAMS)]
SAVED: dict[str, list[Way]] = {
    "adamw": [
        *[(3, 2, {}), (3, None, {}), (3, 1, {}), (1, 2, {}), (2, 2, {})],
        *[(1, 2, OPTIMIZER), (2, 2, OPTIMIZER), (3, 2, OPTIMIZER), (3, 2, PARAMS), (3, None, PARAMS)],
    ],
    "adafactor": [(3, 2, {}), (3, None, {}), (2, 2, OPTIMIZER)],
}


def _save(folder: str, kind: str, way: Way) -> None:
    stage, size, settings = way
    subject = _subject(stage, OPTIMIZERS[kind], shard_size=size, **settings)
    go_on(subject, NAME, 0, 2)
    hf_zero.save_checkpoint(subject.engine, subject.optimizer, folder)
    losses = go_on(subject, NAME, 2, 5)
    if dist.get_rank() == 0:
        Path(folder, "unbroken.json").write_text(json.dumps(losses))


def _resume(folder: str, kind: str) -> None:
    unbroken = json.loads(Path(folder, "unbroken.json").read_text())
    for stage, size, settings in RESUMED:
        subject = _subject(stage, OPTIMIZERS[kind], shard_size=size, **settings)
        hf_zero.load_weights(subject.engine, folder)
        hf_zero.load_state(subject.engine, subject.optimizer, folder)
        found, rel = go_on(subject, NAME, 2, 5), 0 if kind == "adamw" else 1e-5
        assert found == pytest.approx(unbroken, rel=rel), f"stage {stage} in groups of {size}, {settings}"
        assert_equal_on_all_ranks(subject.weights(), "resumed")


@pytest.mark.parametrize("kind, saved", [(kind, way) for kind, ways in SAVED.items() for way in ways])
@pytest.mark.full("more cases", after=1)
def test_a_run_resumes_in_groups_of_another_size(tmp_path, kind, saved):
    """And at another stage, and with other offload: AdamW bit for bit."""
    run_ranks(_save, 4, str(tmp_path), kind, saved)
    run_ranks(_resume, 4, str(tmp_path), kind)


@pytest.mark.full("slow")
@pytest.mark.parametrize(
    "stage, settings", [(1, {}), (3, {}), (3, {"shared_memory": False}), (3, {"offload": "params"})]
)
@ranks(4)
def test_whole_gradients_and_writes_go_with_groups(stage, settings):
    grads, written = {}, {}
    for size in (2, 4):
        subject = _subject(stage, shard_size=size, **settings)
        loss_of(subject(**models.batch(NAME, seed=dist.get_rank()))).backward()
        names = [name for name, _ in subject.model.named_parameters()]
        grads[size] = {name: hf_zero.ShardedModel(subject.engine.model).full_grad(name) for name in names}
        subject.optimizer.zero_grad()
        with hf_zero.gathered(subject.model, writeback=True):
            for param in subject.model.parameters():
                param.data.fill_(dist.get_rank() + 0.5)  # those of rank 0 are taken
        assert all(bool((values == 0.5).all()) for values in subject.weights().values())
        go_on(subject, NAME, 0, 2)
        assert_equal_on_all_ranks(subject.weights(), f"stage {stage}, groups of {size}, after writes")
        written[size] = subject.weights()
    for name, grad in grads[4].items():
        torch.testing.assert_close(grads[2][name], grad, rtol=0, atol=1e-6)
        torch.testing.assert_close(written[2][name], written[4][name], rtol=0, atol=ATOL)


@pytest.mark.full("slow")
@pytest.mark.parametrize("settings", [{}, {"shared_memory": False}, {"offload": "params"}])
@ranks(4)
def test_groups_that_drift_apart_are_found(settings, tmp_path):
    """A rank's shard changes behind the engine's back, as by a broken memory."""
    for when in ("saving", "training"):
        subject = _subject(3, shard_size=2, **settings)
        go_on(subject, NAME, 0, 1)
        hf_zero.save_checkpoint(subject.engine, subject.optimizer, tmp_path)
        if dist.get_rank() == 3:
            subject.engine.gradients[0].flat.masters.values.add_(1)
        with pytest.raises(LifecycleError, match="on rank 3 are not those on rank 1, which holds the same shard"):
            if when == "saving":
                hf_zero.save_checkpoint(subject.engine, subject.optimizer, tmp_path)
            go_on(subject, NAME, 1, 1 + COMPARE_EVERY)
        dist.barrier()


def _refused(size) -> str:
    with pytest.raises(ConfigError) as caught:
        hf_zero.shard(models.build(NAME), stage=2, shard_size=size)
    return str(caught.value)


def test_a_size_may_be_a_whole_number_of_numpy():
    model = models.build(NAME)
    hf_zero.shard(model, stage=2, shard_size=np.int64(1))
    assert engine_of(model).config.shard_size == 1
    assert _refused(np.int64(0)).endswith("is not a number of ranks; give 1 or more, or auto")


def _refused_and_chosen() -> tuple[str, list[int]]:
    """What is said of groups of three, and the groups that "auto" makes of two hosts. How much memory a device has is
    not known, is enough, and is not on the first rank."""
    sizes = []
    for nbytes in (None, 2**40, 2**10):
        with on_two_hosts(True), pytest.MonkeyPatch.context() as patch:
            own = nbytes if dist.get_rank() == 0 else 2**40
            patch.setattr(build, "memory_of_device", lambda _, own=own: own)
            sizes.append(_subject(3, shard_size="auto").engine.comm.shard_group.num_ranks)
    return _refused(3), sizes


def test_sizes_that_do_not_fit_are_refused():
    assert _refused(0) == "shard_size: 0 is not a number of ranks; give 1 or more, or auto"
    assert _refused("two") == "shard_size: 'two' is not a number of ranks; give 1 or more, or auto"
    assert _refused(1.5).startswith("shard_size: 1.5 is of type float; give a whole number, auto, or None")
    with pytest.raises(ConfigError, match="stage 0 shards nothing; use stage 1, 2 or 3"):
        hf_zero.shard(models.build(NAME), stage=0, shard_size=2)
    for found, sizes in run_ranks(_refused_and_chosen, 4):
        assert found.startswith("shard_size: 4 ranks cannot form groups of 3; give a divisor of 4 (1, 2, 4), auto")
        assert sizes == [2, 2, 4], "one host, unless the states do not fit a device of the first rank"


def test_auto_takes_the_ranks_of_one_host():
    assert ranks_of_a_host(["a", "a", "b", "b"]) == 2
    assert ranks_of_a_host(["a"] * 4) == 4
    assert ranks_of_a_host(["a", "b", "c"]) == 3, "there is nothing to keep on a host"
    for uneven in (["a", "a", "b"], ["a", "b", "a", "b"], ["a", "a", "b", "c"], ["a", "a", "b", "b", "a", "a"]):
        assert ranks_of_a_host(uneven) == len(uneven)
