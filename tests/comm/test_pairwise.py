import random

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import connect
from hf_zero.comm.distributed import DistributedComm
from hf_zero.comm.pairwise import SUM_NBYTES
from tests.distributed import RemoteError, run_ranks
from tests.staged import StagedComm


CPU = torch.device("cpu")
SMALL = 4096  # bytes: fewer than most messages below


def _connect(bucket_nbytes: int = 32 * 2**20, timeout_seconds: float = 60.0):
    return connect(CPU, timeout_seconds=timeout_seconds, bucket_nbytes=bucket_nbytes, shared_memory=False)


def _summand(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank puts into a reduction: every rank can make every other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _average(numel: int, in_dtype: torch.dtype, sum_dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The sum over the ranks as a tree, divided by their number, in `sum_dtype`."""
    sums = [_summand(rank, numel, in_dtype, seed) for rank in range(dist.get_world_size())]
    while len(sums) > 1:
        pairs = [sums[start : start + 2] for start in range(0, len(sums), 2)]
        sums = [pair[0].to(sum_dtype) + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return sums[0].to(sum_dtype) / dist.get_world_size()


def _mine(full: torch.Tensor) -> torch.Tensor:
    return full.chunk(dist.get_world_size())[dist.get_rank()]


def _gathers(numels: list[int], dtype: torch.dtype) -> None:
    comm = _connect()
    for numel in numels:
        wanted = torch.cat([_summand(rank, numel, dtype) for rank in range(comm.num_ranks)])
        full = torch.full((numel * comm.num_ranks,), 7, dtype=dtype)
        comm.all_gather(full, _summand(comm.rank, numel, dtype), what="apart").wait()
        assert torch.equal(full, wanted), numel
        full = torch.full_like(full, 7)
        _mine(full).copy_(_summand(comm.rank, numel, dtype)) if numel else None
        shard = full[comm.rank * numel : (comm.rank + 1) * numel]
        pending = comm.all_gather(full, shard, what="in place")
        pending.wait()
        pending.wait()  # costs nothing
        assert torch.equal(full, wanted), numel


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_puts_every_rank_in_its_range(num_ranks, dtype):
    rng = random.Random(num_ranks)
    run_ranks(_gathers, num_ranks, [1, 16, 4096, *(rng.randrange(1, 100_000) for _ in range(4))], dtype)


def _reduces(numels: list[int], bucket_nbytes: int, in_dtype, sum_dtype, out_dtype) -> None:
    comm = _connect(bucket_nbytes)
    for seed, numel in enumerate(numels):
        full_numel = numel * comm.num_ranks
        wanted = _mine(_average(full_numel, in_dtype, sum_dtype, seed)) if numel else torch.zeros(0)
        out = torch.full((numel,), 7, dtype=out_dtype)
        full = _summand(comm.rank, full_numel, in_dtype, seed)
        comm.reduce_scatter(full, out, dtype=sum_dtype, accumulate=False, what="apart").wait()
        assert torch.equal(out, wanted.to(out_dtype)), f"{numel}: {(out - wanted).abs().max()}"

        full = _summand(comm.rank, full_numel, in_dtype, seed)
        comm.reduce_scatter(full, out, dtype=sum_dtype, accumulate=True, what="accumulated").wait()
        # the second average is added in the dtype of `out`, unrounded before that
        assert torch.equal(out, wanted.to(out_dtype).clone().add_(wanted)), numel

        if in_dtype is out_dtype:
            full = _summand(comm.rank, full_numel, in_dtype, seed)
            own = full[comm.rank * numel : (comm.rank + 1) * numel]
            comm.reduce_scatter(full, own, dtype=sum_dtype, accumulate=False, what="in place").wait()
            assert torch.equal(own, wanted.to(out_dtype)), numel


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("bucket_nbytes", [32 * 2**20, SMALL, SMALL + 3])
@pytest.mark.parametrize(
    "in_dtype, sum_dtype, out_dtype",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.full("more cases", after=12)
def test_reduce_averages_in_one_order(num_ranks, bucket_nbytes, in_dtype, sum_dtype, out_dtype):
    rng = random.Random(num_ranks)
    numels = [1, 16, 1024, *(rng.randrange(1, 10_000) for _ in range(3))]
    if bucket_nbytes > SUM_NBYTES:
        numels.append(70_000)  # exceeds it
    run_ranks(_reduces, num_ranks, numels, bucket_nbytes, in_dtype, sum_dtype, out_dtype)


def _reduces_alone() -> None:
    comm = _connect()
    values = torch.arange(6.0)
    out = torch.empty(6)
    comm.reduce_scatter(values.clone(), out, dtype=torch.float32, accumulate=False, what="alone").wait()
    comm.reduce_scatter(values.clone(), out, dtype=torch.float32, accumulate=True, what="alone").wait()
    assert torch.equal(out, 2 * values)
    assert comm.num_ranks == 1 and comm.counters.total_sent_nbytes == 0


def test_one_rank_reduces_to_itself():
    run_ranks(_reduces_alone, 1)


def _overlaps(bucket_nbytes: int) -> None:
    """Several collectives under way, waited for in another order than they were begun."""
    comm = _connect(bucket_nbytes)
    numel, num_ranks = 5000, comm.num_ranks
    fulls = [_summand(comm.rank, numel * num_ranks, torch.float32, seed) for seed in range(3)]
    outs = [torch.empty(numel) for _ in range(3)]
    gathered = [torch.empty(numel * num_ranks) for _ in range(2)]
    shards = [_summand(comm.rank, numel, torch.float32, 10 + seed) for seed in range(2)]
    first = comm.reduce_scatter(fulls[0], outs[0], dtype=torch.float32, accumulate=False, what="first")
    g0 = comm.all_gather(gathered[0], shards[0], what="g0")
    second = comm.reduce_scatter(fulls[1], outs[1], dtype=torch.float32, accumulate=False, what="second")
    g1 = comm.all_gather(gathered[1], shards[1], what="g1")
    third = comm.reduce_scatter(fulls[2], outs[2], dtype=torch.float32, accumulate=False, what="third")
    for pending in (g1, third, g0, first, second):
        pending.wait()
    for seed, out in enumerate(outs):
        assert torch.equal(out, _mine(_average(numel * num_ranks, torch.float32, torch.float32, seed))), seed
    for seed, full in enumerate(gathered):
        wanted = torch.cat([_summand(rank, numel, torch.float32, 10 + seed) for rank in range(num_ranks)])
        assert torch.equal(full, wanted), seed


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("bucket_nbytes", [32 * 2**20, SMALL])
def test_collectives_under_way_do_not_disturb_one_another(num_ranks, bucket_nbytes):
    run_ranks(_overlaps, num_ranks, bucket_nbytes)


def _travels_at_once() -> None:
    comm, come, sent, post = _connect(SMALL), {}, [], DistributedComm._post

    def noted(comm, receives, sends, tag, what):
        sent.extend(tensor.nbytes for tensor, _ in sends)
        for tensor, rank in receives:
            come[rank] = come.get(rank, 0) + tensor.nbytes
        return post(comm, receives, sends, tag, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedComm, "_post", noted)
        for out_dtype in (torch.float32, torch.float64):
            full, out = _summand(comm.rank, 5000 * comm.num_ranks, torch.float32), torch.empty(5000, dtype=out_dtype)
            pending = comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="apart")
            # all that one rank has for this one, and of the others' a piece that fits in the bucket with theirs
            assert max(come.values()) == 20_000 and sum(come.values()) <= 20_000 + SMALL, come
            pending.wait()
            assert sum(sent) == sum(come.values()) == 20_000 * (comm.num_ranks - 1)
            come.clear(), sent.clear()
    assert len(comm.buckets) == (1 if comm.num_ranks == 2 else 2), "two ranks stage nothing"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_of_one_summand_travels_before_the_reduction_is_waited_for(num_ranks):
    run_ranks(_travels_at_once, num_ranks)


def _differ() -> None:
    """Each rank has its averages in another place: added to what is there, apart, and in its own summand."""
    comm, numel = _connect(SMALL), 5000
    wanted = _mine(_average(numel * comm.num_ranks, torch.float32, torch.float32))
    for turn in range(3):
        kind = (comm.rank + turn) % 3
        full = _summand(comm.rank, numel * comm.num_ranks, torch.float32)
        out = _mine(full) if kind == 2 else torch.full((numel,), 7.0)
        comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=kind == 0, what="unlike").wait()
        assert torch.equal(out, wanted + 7 if kind == 0 else wanted), turn


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_need_not_have_their_averages_in_like_places(num_ranks):
    run_ranks(_differ, num_ranks)


def _counts() -> None:
    comm = _connect(SMALL)
    others = comm.num_ranks - 1
    full, shard = torch.zeros(1000 * comm.num_ranks), torch.zeros(1000)
    comm.all_gather(full, shard, what="counted").wait()
    assert comm.counters.sent_nbytes == {"gather": 4000 * others}
    comm.reduce_scatter(full.bfloat16(), shard, dtype=torch.float32, accumulate=False, what="counted").wait()
    assert comm.counters.sent_nbytes == {"gather": 4000 * others, "reduce": 2000 * others}
    assert comm.counters.total_sent_nbytes == 6000 * others


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_sent_bytes_are_counted_in_the_dtype_that_travels(num_ranks):
    run_ranks(_counts, num_ranks)


def _small_ones() -> None:
    comm = _connect()
    rows = comm.all_gather_vector(torch.tensor([comm.rank, 10 * comm.rank]))
    assert torch.equal(rows, torch.tensor([[rank, 10 * rank] for rank in range(comm.num_ranks)]))
    tensor = torch.full((3,), float(comm.rank + 1))
    comm.broadcast_(tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert comm.broadcast_object({"rank": comm.rank}) == {"rank": 0}
    assert comm.all_gather_object(comm.rank) == list(range(comm.num_ranks))
    comm.barrier()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_small_collectives(num_ranks):
    run_ranks(_small_ones, num_ranks)


def _serves_a_part() -> float:
    """Only ranks 0 and 2 of three form the group: its own numbering is not the world's."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return 1.5
    comm = connect(CPU, group=group, timeout_seconds=60.0, bucket_nbytes=SMALL, shared_memory=False)
    assert (comm.num_ranks, comm.rank) == (2, dist.get_rank() // 2)
    full = torch.full((4,), float(dist.get_rank() + 1))
    out = torch.empty(2)
    comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="part").wait()
    gathered = torch.empty(4)
    comm.all_gather(gathered, out * (comm.rank + 1), what="part").wait()
    assert gathered.tolist() == [2.0, 2.0, 4.0, 4.0]
    tensor = torch.full((1,), float(dist.get_rank()))
    comm.broadcast_(tensor)
    assert tensor.item() == 0.0
    return out[0].item() - 0.5


def test_a_group_of_some_ranks_numbers_them_itself():
    assert run_ranks(_serves_a_part, 3) == [1.5, 1.5, 1.5]


def _one_stays_away() -> None:
    comm = _connect(timeout_seconds=2.0)
    if comm.rank:
        comm.all_gather(torch.empty(16 * comm.num_ranks), torch.ones(16), what="layers.3").wait()


def test_a_rank_that_stays_away_is_named_with_the_unit():
    with pytest.raises(RemoteError) as caught:
        run_ranks(_one_stays_away, 2)
    assert caught.value.kind == "CommError"
    for words in ("gather of unit 'layers.3'", "rank 0 (", "pid ", "does not answer within 2 s", "look at its log"):
        assert words in str(caught.value)


def _copies(dtype: torch.dtype) -> None:
    """As if the tensors were a device's: the copies make no difference here, but each must be there."""
    comm = StagedComm(dist.group.WORLD, CPU, 60.0, SMALL)
    numel, num_ranks = 3000, comm.num_ranks
    full, out = _summand(comm.rank, numel * num_ranks, dtype), torch.zeros(numel)
    wanted = _mine(_average(numel * num_ranks, dtype, torch.float32))
    comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="sum").wait()
    assert torch.equal(out, wanted)
    comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=True, what="sum").wait()
    assert torch.equal(out, wanted + wanted)
    gathered = torch.zeros(numel * num_ranks, dtype=dtype)
    _mine(gathered).copy_(_summand(comm.rank, numel, dtype))
    comm.all_gather(gathered, _mine(gathered), what="all").wait()
    assert torch.equal(gathered, torch.cat([_summand(rank, numel, dtype) for rank in range(num_ranks)]))
    assert comm.all_gather_vector(torch.tensor([comm.rank])).flatten().tolist() == list(range(num_ranks))
    assert [bucket.memory.numel() for bucket in comm.buckets] == [SMALL, SUM_NBYTES, SMALL, SMALL]
    assert comm.buffer_nbytes == 3 * SMALL + SUM_NBYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_a_device_go_through_copies(dtype):
    run_ranks(_copies, 3, dtype)


def _exchanges(kind: str) -> None:
    """Two messages to every other rank, of two dtypes, but none from the last rank; twice, under one name."""
    comm = {
        "pairwise": _connect,
        "staged": lambda: StagedComm(dist.group.WORLD, CPU, 60.0, SMALL),
        "native": lambda: DistributedComm(dist.group.WORLD, CPU, 60.0),
    }[kind]()
    others, last = [rank for rank in range(comm.num_ranks) if rank != comm.rank], comm.num_ranks - 1

    def message(source: int, target: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
        return _summand(source, 1000 + target, dtype, seed=10 * turn + target)

    for turn in range(2):
        pairs = [(rank, dtype) for rank in others for dtype in (torch.float32, torch.bfloat16)]
        sends = [(message(comm.rank, rank, turn, dtype), rank) for rank, dtype in pairs if comm.rank != last]
        receives = [(torch.empty(1000 + comm.rank, dtype=dtype), rank) for rank, dtype in pairs if rank != last]
        comm.exchange(sends, receives, what="some").wait()
        for tensor, rank in receives:
            assert torch.equal(tensor, message(rank, comm.rank, turn, tensor.dtype)), f"from rank {rank}"
    comm.exchange([], [], what="nothing").wait()
    sent = 0 if comm.rank == last else 2 * sum((1000 + rank) * 6 for rank in others)
    assert comm.counters.sent_nbytes.get("exchange", 0) == sent


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", ["pairwise", "staged", "native"])
def test_an_exchange_brings_each_message_to_its_place(kind, num_ranks):
    run_ranks(_exchanges, num_ranks, kind)


def _reduces_in_few_bits() -> None:
    for bucket_nbytes in (5_002, 5_000, 4_096):
        comm, out = _connect(bucket_nbytes), torch.empty(4_000)
        full = torch.linspace(-1, 1, 8_000)
        comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="few", packs=True).wait()
        torch.testing.assert_close(out, _mine(full), rtol=0, atol=1 / 127)


def test_buckets_of_any_size_hold_what_is_sent_in_few_bits():
    run_ranks(_reduces_in_few_bits, 2)


def _two_models() -> None:
    comms = [_connect(), _connect()]
    numel, found = 30, {}
    for seed in (0, 1) if comms[0].rank == 0 else (1, 0):
        out = torch.empty(numel // 2)
        summand = _summand(comms[0].rank, numel, torch.float32, seed)
        pending = comms[seed].reduce_scatter(summand, out, dtype=torch.float32, accumulate=False, what="layers.0")
        found[seed] = out, pending
    for seed, (out, pending) in found.items():
        pending.wait()
        assert torch.equal(out, _mine(_average(numel, torch.float32, torch.float32, seed))), seed


@pytest.mark.quick
def test_units_of_two_models_that_have_one_name_are_not_mixed_up():
    run_ranks(_two_models, 2)
