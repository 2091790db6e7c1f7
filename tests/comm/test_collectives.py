"""What collectives compute and count, over every way between ranks: gloo messages, shared memory of one host, and the
backend's own collectives (served by gloo)."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import Comm, connect
from hf_zero.comm.blockwise import Packed
from hf_zero.comm.distributed import NativeComm
from hf_zero.comm.pairwise import SUM_NBYTES, PairwiseComm
from hf_zero.comm.shared import SharedComm
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from tests.distributed import ranks, run_ranks
from tests.tiers import more


CPU = torch.device("cpu")
LARGE, SMALL = 32 * 2**20, 4096  # bytes of a bucket; the small one holds less than most of the messages below
FP32, BF16 = torch.float32, torch.bfloat16
# Dtypes of the summands, of the sum and of the average; the backend's own collectives take more.
DTYPES = [(FP32, FP32, FP32), (BF16, FP32, FP32), (BF16, BF16, BF16), (BF16, FP32, BF16)]
NATIVE_DTYPES = [*DTYPES, (BF16, BF16, FP32), (FP32, BF16, FP32)]


def connected(kind: str, bucket_nbytes: int = LARGE, group: dist.ProcessGroup | None = None) -> Comm:
    """Connects this rank with those of a group, by default with all."""
    if kind == "native":
        return NativeComm(group or dist.group.WORLD, CPU, 60.0, bucket_nbytes)
    settings = {"timeout_seconds": 60.0, "bucket_nbytes": bucket_nbytes, "shared_memory": kind == "shared memory"}
    comm = connect(CPU, group=group, **settings)
    assert type(comm) in (Comm, SharedComm if kind == "shared memory" else PairwiseComm)
    return comm


def play(act: Callable, kind: str, num_ranks: int, *args, bucket_nbytes: int = LARGE) -> list:
    """Calls `act(comm, *args)` on every rank."""
    return run_ranks(_connect_and_play, num_ranks, act, kind, bucket_nbytes, args)


def _connect_and_play(act: Callable, kind: str, bucket_nbytes: int, args: tuple):
    return act(connected(kind, bucket_nbytes), *args)


def summand(rank: int, numel: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """What a rank puts into a reduction: every rank can make every other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def average(num_ranks: int, numel: int, in_dtype: torch.dtype = FP32, sum_dtype: torch.dtype = FP32, seed: int = 0):
    """The sum over the ranks as a tree, divided by their number, in `sum_dtype`."""
    sums = [summand(rank, numel, in_dtype, seed) for rank in range(num_ranks)]
    while len(sums) > 1:
        pairs = [sums[start : start + 2] for start in range(0, len(sums), 2)]
        sums = [pair[0].to(sum_dtype) + pair[1].to(sum_dtype) if len(pair) == 2 else pair[0] for pair in pairs]
    return sums[0].to(sum_dtype) / num_ranks


def own_part(comm: Comm, full: Tensor) -> Tensor:
    return full.chunk(comm.num_ranks)[comm.rank]


def filled(comm: Comm, values: Tensor) -> Tensor:
    """The values in memory of the communicator, which other ranks can read where it is shared."""
    return comm.empty(values.numel(), values.dtype).copy_(values)


def numels(num_ranks: int, below: int) -> list[int]:
    rng = random.Random(num_ranks)
    return [1, 16, 1024, *(rng.randrange(1, below) for _ in range(3))]


def each_way(*kinds: str, num_ranks: tuple[int, ...]) -> pytest.MarkDecorator:
    """Parameters `kind, num_ranks`: the first number of ranks in the core."""
    first, *others = num_ranks
    core = [(kind, first) for kind in kinds]
    return pytest.mark.parametrize("kind, num_ranks", [*core, *more(*((k, n) for k in kinds for n in others))])


ALL = ("messages", "shared memory", "native")


def gathers(comm: Comm, dtype: torch.dtype) -> None:
    for numel in numels(comm.num_ranks, 100_000):
        wanted = torch.cat([summand(rank, numel, dtype) for rank in range(comm.num_ranks)])
        apart = filled(comm, summand(comm.rank, numel, dtype))
        full = torch.full_like(wanted, 7)
        comm.all_gather(full, apart, what="apart").wait()
        assert torch.equal(full, wanted), numel
        full = filled(comm, torch.full_like(wanted, 7))
        shard = full[comm.rank * numel : (comm.rank + 1) * numel].copy_(summand(comm.rank, numel, dtype))
        pending = comm.all_gather(full, shard, what="in place")
        pending.wait()
        pending.wait()  # costs nothing
        assert torch.equal(full, wanted), numel


@pytest.mark.quick(cases=3)
@each_way(*ALL, num_ranks=(3, 2, 5))
def test_a_gather_puts_every_rank_in_its_range(kind, num_ranks):
    for dtype in (FP32, BF16):
        play(gathers, kind, num_ranks, dtype)


def reduces(comm: Comm, is_exact: bool, sizes: list[int]) -> None:
    def check(found: Tensor, wanted: Tensor, what: str, *rounding: torch.dtype) -> None:
        """To the bit, or to the rounding of a few numbers of about 1: gloo adds in an order of its own."""
        eps = 0.0 if is_exact else 4 * max(torch.finfo(dtype).eps for dtype in rounding)
        assert torch.allclose(found.double(), wanted.double(), rtol=eps, atol=eps), what

    for in_dtype, sum_dtype, out_dtype in NATIVE_DTYPES if isinstance(comm, NativeComm) else DTYPES:
        for seed, numel in enumerate(sizes):
            what = f"{numel} elements, {in_dtype}, {sum_dtype}, {out_dtype}"
            full_numel, rounding = numel * comm.num_ranks, (sum_dtype, out_dtype)
            wanted = own_part(comm, average(comm.num_ranks, full_numel, in_dtype, sum_dtype, seed))
            full = filled(comm, summand(comm.rank, full_numel, in_dtype, seed))
            out = torch.full((numel,), 7, dtype=out_dtype)
            comm.reduce_scatter(full, out, dtype=sum_dtype, accumulate=False, what="apart").wait()
            check(out, wanted.to(out_dtype), what, *rounding)
            # the second average is added in the dtype of `out`, unrounded before that
            full.copy_(summand(comm.rank, full_numel, in_dtype, seed))  # every other rank has read it
            comm.reduce_scatter(full, out, dtype=sum_dtype, accumulate=True, what="accumulated").wait()
            check(out, wanted.to(out_dtype).clone().add_(wanted), f"{what}, accumulated", *rounding)
            if in_dtype is out_dtype:
                full.copy_(summand(comm.rank, full_numel, in_dtype, seed))
                own = full[comm.rank * numel : (comm.rank + 1) * numel]
                comm.reduce_scatter(full, own, dtype=sum_dtype, accumulate=False, what="in place").wait()
                check(own, wanted.to(out_dtype), f"{what}, in place", *rounding)


@pytest.mark.quick(cases=3)
@pytest.mark.parametrize("bucket_nbytes", [LARGE, SMALL + 3])
@each_way(*ALL, num_ranks=(3, 2, 5))
def test_a_reduction_averages_in_one_order(kind, num_ranks, bucket_nbytes):
    sizes = numels(num_ranks, 5_000) + ([70_000] if bucket_nbytes == LARGE else [])
    assert 4 * 70_000 > SUM_NBYTES
    play(reduces, kind, num_ranks, kind != "native", sizes, bucket_nbytes=bucket_nbytes)


def overlaps(comm: Comm) -> None:
    """Several collectives under way, waited for in another order than they were begun."""
    numel, num_ranks = 5000, comm.num_ranks
    fulls = [filled(comm, summand(comm.rank, numel * num_ranks, FP32, seed)) for seed in range(3)]
    outs = [torch.empty(numel) for _ in range(3)]
    gathered = [torch.empty(numel * num_ranks) for _ in range(2)]
    shards = [filled(comm, summand(comm.rank, numel, FP32, 10 + seed)) for seed in range(2)]
    works = []
    for turn in range(3):
        works.append(comm.reduce_scatter(fulls[turn], outs[turn], dtype=FP32, accumulate=False, what=f"r{turn}"))
        comm.progress()
        if turn < 2:
            works.append(comm.all_gather(gathered[turn], shards[turn], what=f"g{turn}"))
    for index in (3, 4, 1, 0, 2):
        works[index].wait()
    for seed, out in enumerate(outs):
        torch.testing.assert_close(out, own_part(comm, average(num_ranks, numel * num_ranks, seed=seed)))
    for seed, full in enumerate(gathered):
        assert torch.equal(full, torch.cat([summand(rank, numel, FP32, 10 + seed) for rank in range(num_ranks)]))


@pytest.mark.quick(cases=2)
@each_way(*ALL, num_ranks=(3, 2, 5))
def test_collectives_under_way_do_not_disturb_one_another(kind, num_ranks):
    for bucket_nbytes in (LARGE, SMALL):
        play(overlaps, kind, num_ranks, bucket_nbytes=bucket_nbytes)


def small_ones(comm: Comm) -> None:
    rows = comm.all_gather_vector(torch.tensor([comm.rank, 10 * comm.rank]))
    assert torch.equal(rows, torch.tensor([[rank, 10 * rank] for rank in range(comm.num_ranks)]))
    tensor = torch.full((3,), float(comm.rank + 1))
    comm.broadcast_(tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert comm.broadcast_object({"rank": comm.rank}) == {"rank": 0}
    assert comm.all_gather_object(comm.rank) == list(range(comm.num_ranks))
    assert comm.side_group("files").all_gather_object(comm.rank) == list(range(comm.num_ranks))
    comm.barrier()


@each_way(*ALL, num_ranks=(2, 3))
def test_small_collectives(kind, num_ranks):
    play(small_ones, kind, num_ranks)


def one_rank(comm: Comm) -> None:
    small_ones(comm)
    values, out = torch.arange(6.0), torch.empty(6)
    for accumulate in (False, True):
        comm.reduce_scatter(values.clone(), out, dtype=FP32, accumulate=accumulate, what="alone").wait()
    assert torch.equal(out, 2 * values)
    assert comm.num_ranks == 1 and comm.counters.total_sent_nbytes == 0


def test_one_rank_reduces_to_itself():
    play(one_rank, "messages", 1)


def counts(comm: Comm) -> None:
    others = comm.num_ranks - 1
    full, shard = comm.empty(1000 * comm.num_ranks, FP32), comm.empty(1000, FP32)
    comm.all_gather(full, shard, what="counted").wait()
    assert comm.counters.sent_nbytes == {"gather": 4000 * others}
    summands = comm.empty(1000 * comm.num_ranks, BF16)
    comm.reduce_scatter(summands, shard, dtype=BF16, accumulate=False, what="counted").wait()
    assert comm.counters.sent_nbytes == {"gather": 4000 * others, "reduce": 2000 * others}
    assert comm.counters.total_sent_nbytes == 6000 * others


@each_way("messages", "shared memory", "native", num_ranks=(3, 5))
def test_sent_bytes_are_counted_in_the_dtype_that_travels(kind, num_ranks):
    """Of shared memory what others read is counted."""
    play(counts, kind, num_ranks)


def exchanges(comm: Comm) -> None:
    """Two messages to every other rank, of two dtypes, but none from the last rank; twice, under one name."""
    others, last = [rank for rank in range(comm.num_ranks) if rank != comm.rank], comm.num_ranks - 1

    def message(source: int, target: int, turn: int, dtype: torch.dtype) -> Tensor:
        return summand(source, 1000 + target, dtype, seed=10 * turn + target)

    for turn in range(2):
        pairs = [(rank, dtype) for rank in others for dtype in (FP32, BF16)]
        sends = [(message(comm.rank, rank, turn, dtype), rank) for rank, dtype in pairs if comm.rank != last]
        receives = [(torch.empty(1000 + comm.rank, dtype=dtype), rank) for rank, dtype in pairs if rank != last]
        comm.exchange(sends, receives, what="some").wait()
        for tensor, rank in receives:
            assert torch.equal(tensor, message(rank, comm.rank, turn, tensor.dtype)), f"from rank {rank}"
    comm.exchange([], [], what="nothing").wait()
    sent = 0 if comm.rank == last else 2 * sum((1000 + rank) * 6 for rank in others)
    assert comm.counters.sent_nbytes.get("exchange", 0) == sent


@each_way(*ALL, num_ranks=(3, 2))
def test_an_exchange_brings_each_message_to_its_place(kind, num_ranks):
    play(exchanges, kind, num_ranks, bucket_nbytes=SMALL)


def all_to_alls(comm: Comm) -> None:
    given = 100 * comm.rank + torch.arange(3 * comm.num_ranks, dtype=torch.float64).view(-1, 3)
    out = torch.empty_like(given)
    comm.all_to_all(out, given, what="rows").wait()
    own = torch.arange(3 * comm.rank, 3 * comm.rank + 3)
    assert torch.equal(out, torch.stack([100 * rank + own for rank in range(comm.num_ranks)]).double())
    assert comm.counters.sent_nbytes["exchange"] == given.nbytes * (comm.num_ranks - 1) // comm.num_ranks


@each_way(*ALL, num_ranks=(3, 2))
def test_an_all_to_all_brings_each_row_to_its_place(kind, num_ranks):
    play(all_to_alls, kind, num_ranks, bucket_nbytes=SMALL)


def packs(comm: Comm) -> None:
    full, out = torch.linspace(-1, 1, 8_000), torch.empty(4_000)
    Packed(comm).reduce_scatter(full, out, dtype=FP32, accumulate=False, what="few").wait()
    torch.testing.assert_close(out, own_part(comm, torch.linspace(-1, 1, 8_000)), rtol=0, atol=1 / 127)


def packs_beside(comm: Comm) -> None:
    """Two reductions under one name, of which one sends 8 bits: neither receives what belongs to the other."""
    fulls = [torch.linspace(-1, 1, 4_000 * comm.num_ranks) for _ in range(2)]
    outs = [torch.zeros(4_000) for _ in range(2)]
    each = zip((Packed(comm), comm), fulls, outs)
    pending = [one.reduce_scatter(*own, dtype=FP32, accumulate=True, what="few") for one, *own in each]
    for one in pending:
        one.wait()
    torch.testing.assert_close(outs[1], own_part(comm, torch.linspace(-1, 1, 4_000 * comm.num_ranks)))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1 / 127)


def test_values_in_8_bits_and_others_go_one_after_the_other():
    play(packs_beside, "messages", 3, bucket_nbytes=4_096)


def test_buckets_of_any_size_hold_what_is_sent_in_few_bits():
    for bucket_nbytes in (5_002, 5_000, 4_096):
        play(packs, "messages", 2, bucket_nbytes=bucket_nbytes)


@pytest.mark.parametrize("kind", ["messages", "shared memory"])
@ranks(3)
def test_a_group_of_some_ranks_numbers_them_itself(kind):
    """Only ranks 0 and 2 of three form the group: its own numbering is not the world's."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    comm = connected(kind, SMALL, group)
    assert (comm.num_ranks, comm.rank) == (2, dist.get_rank() // 2)
    full, out = filled(comm, torch.full((4,), float(dist.get_rank() + 1))), torch.empty(2)
    comm.reduce_scatter(full, out, dtype=FP32, accumulate=False, what="part").wait()
    gathered = torch.empty(4)
    comm.all_gather(gathered, filled(comm, out * (comm.rank + 1)), what="part").wait()
    assert gathered.tolist() == [2.0, 2.0, 4.0, 4.0]
    tensor = torch.full((1,), float(dist.get_rank()))
    comm.broadcast_(tensor)
    assert tensor.item() == 0.0


@pytest.mark.parametrize("num_ranks", [2, 3])
@ranks("num_ranks")
def test_ranks_need_not_have_their_averages_in_like_places(num_ranks):
    """Each rank has its averages in another place: added to what is there, apart, and in its own summand."""
    comm, numel = connected("messages", SMALL), 5000
    wanted = own_part(comm, average(num_ranks, numel * num_ranks))
    for turn in range(3):
        kind = (comm.rank + turn) % 3
        full = summand(comm.rank, numel * num_ranks)
        out = own_part(comm, full) if kind == 2 else torch.full((numel,), 7.0)
        comm.reduce_scatter(full, out, dtype=FP32, accumulate=kind == 0, what="unlike").wait()
        assert torch.equal(out, wanted + 7 if kind == 0 else wanted), turn


@pytest.mark.quick
@ranks(2)
def test_units_of_two_models_that_have_one_name_are_not_mixed_up():
    comms = [connected("messages"), connected("messages")]
    numel, found = 30, {}
    for seed in (0, 1) if comms[0].rank == 0 else (1, 0):
        out, full = torch.empty(numel // 2), summand(comms[0].rank, numel, seed=seed)
        found[seed] = out, comms[seed].reduce_scatter(full, out, dtype=FP32, accumulate=False, what="layers.0")
    for seed, (out, pending) in found.items():
        pending.wait()
        assert torch.equal(out, own_part(comms[0], average(2, numel, seed=seed))), seed


@pytest.mark.parametrize("value", ["large", 100, -1, 2.5])
def test_a_size_that_is_none_is_refused_in_one_line(value):
    with pytest.raises(ConfigError, match=f"bucket_nbytes: {value!r} is not a size; give 4096 bytes or more, or auto"):
        ZeroConfig(bucket_nbytes=value)
