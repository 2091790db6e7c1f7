"""The backend's own collectives, served by gloo: what they compute, and through how much memory."""

import os
import runpy
from datetime import timedelta
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm import base, connect, world
from hf_zero.comm import ranks as comm_ranks
from hf_zero.comm.distributed import NativeComm, refuse_unordered
from hf_zero.comm.groups import Average
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.ranks import communicator
from hf_zero.comm.shared import SharedComm
from hf_zero.comm.streams import Streams
from hf_zero.errors import ConfigError
from tests.comm.test_collectives import BF16, CPU, FP32, SMALL, average, own_part, summand
from tests.distributed import ranks, run_new_ranks


@ranks(2)
def test_values_that_are_not_summed_are_moved_in_any_dtype():
    comm = NativeComm(dist.group.WORLD, CPU, 60.0, SMALL)
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint16, torch.bool):
        shards = [torch.arange(1, 6).add(10 * rank).to(dtype) for rank in range(comm.num_ranks)]
        full, received = torch.zeros(5 * comm.num_ranks, dtype=dtype), torch.zeros(5, dtype=dtype)
        comm.all_gather(full, shards[comm.rank], what="codes").wait()
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(full.chunk(comm.num_ranks), shards)), dtype
        following, last = (comm.rank + 1) % comm.num_ranks, (comm.rank - 1) % comm.num_ranks
        comm.exchange([(shards[comm.rank], following)], [(received, last)], what="codes").wait()
        assert torch.equal(received.float(), shards[last].float()), dtype
        first = shards[comm.rank].clone()
        comm.broadcast_(first[0])  # a buffer may be 0-d
        assert first[0].float() == shards[0][0].float(), dtype


@ranks(2)
def test_several_reductions_under_way_share_two_buckets_which_only_casts_need():
    """Of two ranks the sum has one order: the average is exact."""
    comm, outs = NativeComm(dist.group.WORLD, CPU, 60.0, SMALL), [torch.empty(5_001) for _ in range(3)]
    comm.reduce_scatter(summand(comm.rank, 10_002), outs[0], dtype=FP32, accumulate=False, what="alone").wait()
    assert all(bucket.memory is None for bucket in comm.buckets)
    fulls = [summand(comm.rank, 10_002, BF16, seed) for seed in range(3)]
    pairs = list(zip(fulls, outs))
    works = [comm.reduce_scatter(f, o, dtype=FP32, accumulate=False, what="several") for f, o in pairs]
    for work in reversed(works):
        work.wait()
    for seed, out in enumerate(outs):
        assert torch.equal(out, own_part(comm, average(2, 10_002, BF16, FP32, seed)))
    assert [bucket.memory.numel() for bucket in comm.buckets] == [SMALL, SMALL]
    assert comm.buffer_nbytes == 2 * SMALL
    parts = [NativeComm(dist.group.WORLD, CPU, 60.0, SMALL) for _ in range(2)]
    comm.divide(*parts, Average(*parts))
    assert comm.buffer_nbytes == 2 * SMALL, "over all ranks, and over replicas, nothing goes through buckets"


@ranks(2)
def test_models_over_the_same_ranks_share_a_communicator():
    first, second = (NativeComm(dist.group.WORLD, CPU, 60.0, SMALL) for _ in range(2))
    assert first.group is second.group, "one for all models"
    assert NativeComm(dist.new_group(), CPU, 60.0, SMALL).group is not first.group


def test_a_second_communicator_needs_an_order_of_launches(monkeypatch):
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    with pytest.raises(ConfigError, match=r"NCCL 2.27.3 and NCCL_LAUNCH_ORDER_IMPLICIT=\(not set\) .*set NCCL"):
        refuse_unordered("shard_size", (2, 27, 3))
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with pytest.raises(ConfigError, match="^shard_size: .* 2.25.1 and NCCL_LAUNCH_ORDER_IMPLICIT=1 .*2.26 or newer"):
        refuse_unordered("shard_size", (2, 25, 1))
    refuse_unordered("shard_size", (2, 26))


def test_gloo_is_refused_for_a_model_on_an_accelerator():
    with pytest.raises(ConfigError, match="^device: the model is on cuda:0, but gloo .* such as nccl"):
        world._gloo_kind_of(None, torch.device("cuda", 0), True)


@pytest.mark.parametrize("given", [None, "0"])
@pytest.mark.parametrize("has_started", [False, True])
def test_launches_are_ordered_where_nccl_cannot_have_started(monkeypatch, has_started, given):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    monkeypatch.setattr(dist, "is_initialized", lambda: has_started)
    runpy.run_path(hf_zero.__file__)
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == (given or (None if has_started else "1"))


def test_streams_of_a_device_go_before_what_computes(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "Stream", lambda device, priority=0: made.append((device, priority)))
    Streams(torch.device("cuda", 1)).new()
    assert made == [(torch.device("cuda", 1), -1)]


def test_kernels_of_nccl_go_before_what_computes(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = []
    nccl = SimpleNamespace(Options=lambda is_high_priority_stream=False: SimpleNamespace(high=is_high_priority_stream))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda members, **settings: made.append((members, settings)) or object)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        communicator(dist.group.WORLD, range(4), torch.device("cuda", 0), 7.0, "collectives")
        communicator(dist.group.WORLD, range(4), CPU, 7.0, "others")
    finally:
        dist.destroy_process_group()
    (members, settings), (_, on_cpu) = made
    assert members == [0, 1, 2, 3] and settings["pg_options"].high
    assert settings["pg_options"]._timeout == settings["timeout"] == timedelta(seconds=7.0)
    assert on_cpu["pg_options"] is None


def test_a_device_without_an_index_is_that_of_the_local_rank(monkeypatch):
    backend = SimpleNamespace(device_count=lambda: 4, current_device=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert world.local_device("cuda") == torch.device("cuda", 3)
    assert world.local_device("cuda:1") == torch.device("cuda", 1), "what is given counts"
    assert world.local_device("cpu") == CPU
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert world.local_device("cuda") == torch.device("cuda", 0), "each process sees devices of its own"
    monkeypatch.delenv("LOCAL_RANK")
    assert world.local_device("cuda") == torch.device("cuda", 0)


def test_mps_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="mps is not supported.*no streams.*use_cpu=True"):
        hf_zero.shard(torch.nn.Linear(2, 2), device="mps")


def test_buckets_grow_with_the_ranks_and_the_memory_of_devices():
    assert [base.native_bucket_nbytes(ranks, 2, 0) // 2**20 for ranks in (16, 128, 512)] == [64, 64, 256]
    assert base.native_bucket_nbytes(8, 1, 24 * 2**30) == base.ONE_HOST_NBYTES
    large = 40 * 2**30
    assert [base.native_bucket_nbytes(ranks, 2, large) // 2**20 for ranks in (2, 16, 512)] == [128, 128, 256]


@ranks(2, timeout=120)
def test_the_smallest_device_decides_the_size_of_buckets_on_all_ranks():
    nbytes = [80 * 2**30, 24 * 2**30][dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_ranks, "free_and_total_nbytes", lambda device: (0, nbytes))
        patch.setattr(comm_ranks, "_ADDRESSES", WeakKeyDictionary())  # of tests before
        comm_ranks.exchange_addresses(dist.group.WORLD, torch.device("cuda", 0))
        assert comm_ranks.least_device_nbytes(dist.group.WORLD) == 24 * 2**30


@ranks(2)
def test_the_size_of_a_bucket_is_that_of_the_kind_of_link():
    comm = connect(CPU, timeout_seconds=60.0, bucket_nbytes="auto", shared_memory=False)
    assert comm._staging.nbytes == base.MESSAGES_NBYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_ranks, "this_host", lambda: f"host{comm.rank}")
        apart = dist.new_group()
        comm_ranks.exchange_addresses(apart)
    assert world._bucket_nbytes(NativeComm, comm.group) == base.ONE_HOST_NBYTES
    assert world._bucket_nbytes(NativeComm, apart) == base.SEVERAL_HOSTS_NBYTES
    assert world._bucket_nbytes(PairwiseComm, comm.group) == base.MESSAGES_NBYTES
    assert world._bucket_nbytes(SharedComm, comm.group) == base.SHARED_NBYTES


def _connects_after_unlike_many_groups() -> None:
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    comm = NativeComm(dist.new_group(), CPU, 10.0, SMALL)
    assert comm.on_host.all_gather_object(comm.rank) == [0, 1, 2]
    assert comm.side_group("another").all_gather_object(comm.rank) == [0, 1, 2]


def test_ranks_that_have_made_unlike_many_groups_connect():
    run_new_ranks(_connects_after_unlike_many_groups, 3, timeout=60.0)


def _refuses_unserved_devices() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    with pytest.raises(ConfigError, match="the model is on cpu, but the process group .* serves only cuda; move the"):
        hf_zero.shard(model, stage=3)


def test_a_model_on_a_device_that_no_backend_serves_is_refused():
    """As one on the CPU whose ranks have NCCL alone."""
    run_new_ranks(_refuses_unserved_devices, 2, backend="cuda:gloo", timeout=60.0)
