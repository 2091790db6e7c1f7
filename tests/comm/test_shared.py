"""Exchange through shared memory, against the same arithmetic as the pairwise exchange."""

import errno
import gc
import os
import random
import resource
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import connect, peers, ranks, rendezvous
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.peers import Kind, Peer
from hf_zero.comm.shared import SharedComm
from hf_zero.errors import CommError
from tests.comm.test_pairwise import CPU, _average, _mine, _summand
from tests.distributed import RemoteError, run_ranks


DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
]


def _connect(timeout_seconds: float = 60.0) -> SharedComm:
    comm = connect(CPU, timeout_seconds=timeout_seconds, bucket_nbytes=2**20)
    assert type(comm) is SharedComm
    return comm


def _filled(comm: SharedComm, values: torch.Tensor) -> torch.Tensor:
    memory = comm.empty(values.numel(), values.dtype)
    memory.copy_(values)
    return memory


def _gathers(numels: list[int], dtype: torch.dtype) -> None:
    comm = _connect()
    for numel in numels:
        wanted = torch.cat([_summand(rank, numel, dtype) for rank in range(comm.num_ranks)])
        full = _filled(comm, torch.full_like(wanted, 7))
        shard = _mine(full)
        shard.copy_(_summand(comm.rank, numel, dtype))
        pending = comm.all_gather(full, shard, what="in place")
        pending.wait()
        pending.wait()  # costs nothing
        assert torch.equal(full, wanted), numel
        apart = torch.full_like(wanted, 7)
        comm.all_gather(apart, _filled(comm, _summand(comm.rank, numel, dtype)), what="apart").wait()
        assert torch.equal(apart, wanted), numel


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_puts_every_rank_in_its_range(num_ranks, dtype):
    rng = random.Random(num_ranks)
    run_ranks(_gathers, num_ranks, [1, 16, 4096, *(rng.randrange(1, 100_000) for _ in range(4))], dtype)


def _reduces(numels: list[int], in_dtype, sum_dtype, out_dtype) -> None:
    comm = _connect()
    for seed, numel in enumerate(numels):
        full_numel = numel * comm.num_ranks
        wanted = _mine(_average(full_numel, in_dtype, sum_dtype, seed))
        full = _filled(comm, _summand(comm.rank, full_numel, in_dtype, seed))
        out = torch.full((numel,), 7, dtype=out_dtype)
        comm.reduce_scatter(full, out, dtype=sum_dtype, accumulate=False, what="apart").wait()
        assert torch.equal(out, wanted.to(out_dtype)), f"{numel}: {(out - wanted).abs().max()}"

        full.copy_(_summand(comm.rank, full_numel, in_dtype, seed))  # every peer has read it
        comm.reduce_scatter(full, out, dtype=sum_dtype, accumulate=True, what="accumulated").wait()
        assert torch.equal(out, wanted.to(out_dtype).clone().add_(wanted)), numel

        if in_dtype is out_dtype:
            full.copy_(_summand(comm.rank, full_numel, in_dtype, seed))
            comm.reduce_scatter(full, _mine(full), dtype=sum_dtype, accumulate=False, what="in place").wait()
            assert torch.equal(_mine(full), wanted.to(out_dtype)), numel


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("in_dtype, sum_dtype, out_dtype", DTYPES)
def test_reduce_averages_in_one_order(num_ranks, in_dtype, sum_dtype, out_dtype):
    rng = random.Random(num_ranks)
    numels = [1, 16, 1024, *(rng.randrange(1, 10_000) for _ in range(3)), 70_000]  # the last exceeds SUM_NBYTES
    run_ranks(_reduces, num_ranks, numels, in_dtype, sum_dtype, out_dtype)


def _overlaps() -> None:
    """Several collectives under way, ranks at their own pace, waited for in another order than they were begun."""
    comm = _connect()
    numel, num_ranks = 5000, comm.num_ranks
    fulls = [_filled(comm, _summand(comm.rank, numel * num_ranks, torch.float32, seed)) for seed in range(3)]
    outs = [torch.empty(numel) for _ in range(3)]
    gathered = _filled(comm, torch.zeros(numel * num_ranks))
    _mine(gathered).copy_(_summand(comm.rank, numel, torch.float32, 10))
    time.sleep(0.02 * comm.rank)
    pendings = []
    for full, out in zip(fulls, outs):
        pendings.append(comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="sum"))
        comm.progress()
    pendings.append(comm.all_gather(gathered, _mine(gathered), what="all"))
    for index in (2, 3, 0, 1):
        pendings[index].wait()
    for seed, out in enumerate(outs):
        assert torch.equal(out, _mine(_average(numel * num_ranks, torch.float32, torch.float32, seed))), seed
    wanted = torch.cat([_summand(rank, numel, torch.float32, 10) for rank in range(num_ranks)])
    assert torch.equal(gathered, wanted)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_collectives_under_way_do_not_disturb_one_another(num_ranks):
    run_ranks(_overlaps, num_ranks)


def _progresses() -> None:
    """A reduction is done without anybody waiting for it, once all ranks have begun it."""
    comm = _connect()
    full, out = _filled(comm, torch.full((8,), float(comm.rank))), torch.zeros(4)
    pending = comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="sum")
    dist.barrier()
    comm.progress()
    assert out.tolist() == [0.5] * 4
    pending.wait()


def test_progress_does_what_can_be_done():
    run_ranks(_progresses, 2)


def _has_common_memory(rounds: int) -> None:
    comm = _connect()
    numbers = comm.shared_memory.common(4 * comm.num_ranks, torch.float32)
    assert not numbers.any()
    comm.shared_memory.barrier()
    for number in range(rounds):
        _mine(numbers).fill_(10 * number + comm.rank)
        comm.shared_memory.barrier()
        assert numbers.view(comm.num_ranks, 4)[:, 0].tolist() == [10.0 * number + r for r in range(comm.num_ranks)]
        comm.shared_memory.barrier()
    half = torch.empty(numbers.numel(), dtype=torch.bfloat16)
    comm.shared_memory.read(half, numbers, what="u")
    assert torch.equal(half, numbers.bfloat16())
    assert comm.counters.sent_nbytes == {"gather": 16 * (comm.num_ranks - 1)}
    assert comm.shared_memory.common(0, torch.float32).numel() == 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_common_memory_is_one_for_all_ranks(num_ranks):
    run_ranks(_has_common_memory, num_ranks, 200)


def _begins_more_than_a_socket_holds(count: int) -> None:
    comm = _connect()
    fulls = [_filled(comm, torch.full((2,), float(comm.rank + index))) for index in range(8)]
    outs = torch.zeros(count, 1)
    pendings = [
        comm.reduce_scatter(fulls[index % 8], outs[index], dtype=torch.float32, accumulate=False, what=f"{index}")
        for index in range(count)
    ]
    for pending in pendings:
        pending.wait()
    assert outs.flatten().tolist() == [0.5 + index % 8 for index in range(count)]


def test_more_collectives_than_a_socket_holds_messages():
    run_ranks(_begins_more_than_a_socket_holds, 2, 2000)


def _counts() -> None:
    comm = _connect()
    others = comm.num_ranks - 1
    full, shard = comm.empty(1000 * comm.num_ranks, torch.float32), comm.empty(1000, torch.float32)
    comm.all_gather(full, shard, what="counted").wait()
    half = comm.empty(1000 * comm.num_ranks, torch.bfloat16)
    comm.reduce_scatter(half, shard, dtype=torch.float32, accumulate=False, what="counted").wait()
    assert comm.counters.sent_nbytes == {"gather": 4000 * others, "reduce": 2000 * others}


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_what_others_read_is_counted_as_sent(num_ranks):
    run_ranks(_counts, num_ranks)


def _takes_memory_of_its_own() -> None:
    comm = _connect()
    out = torch.empty(2)
    comm.reduce_scatter(
        torch.full((4,), float(comm.rank)), out, dtype=torch.float32, accumulate=False, what="u"
    ).wait()
    gathered = torch.empty(4)
    comm.all_gather(gathered, out + comm.rank, what="u").wait()
    assert gathered.tolist() == [0.5, 0.5, 1.5, 1.5]


def test_what_does_not_lie_in_shared_memory_is_exchanged_pairwise():
    run_ranks(_takes_memory_of_its_own, 2)


def _one_stays_away() -> None:
    comm = _connect(timeout_seconds=2.0)
    full = comm.empty(32, torch.float32)
    if comm.rank:
        peers.PATIENCE_SECONDS, said = 0.5, []
        peers.logger.warning = lambda text, *values: said.append(text % values)
        try:
            comm.all_gather(full, _mine(full), what="layers.3").wait()
        finally:
            (line,) = said
            assert "gather of unit 'layers.3': has waited 0.5 s for rank 0 (" in line and "for up to 2 s" in line
    else:
        time.sleep(4.0)


def test_a_rank_that_stays_away_is_named_with_the_unit():
    with pytest.raises(RemoteError) as caught:
        run_ranks(_one_stays_away, 2)
    assert caught.value.kind == "CommError"
    for words in ("gather of unit 'layers.3'", "rank 0 (", "pid ", "does not answer within 2 s", "look at its log"):
        assert words in str(caught.value)


def _come_to_different_units() -> None:
    comm = _connect()
    full = comm.empty(32, torch.float32)
    with pytest.raises(CommError, match=r"gather of unit 'layers.\d': rank \d .* is at another unit"):
        comm.all_gather(full, _mine(full), what=f"layers.{comm.rank}").wait()


@pytest.mark.quick
def test_ranks_at_different_units_are_told_at_once():
    begin = time.monotonic()
    run_ranks(_come_to_different_units, 2)
    assert time.monotonic() - begin < 30.0


class _Connection:
    """Of a socket pair the first, whose `send` fails first as the kernel's does when it has no memory."""

    def __init__(self, error: OSError):
        self._socket, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = [error]
        self.fileno = self._socket.fileno

    def send(self, message: bytes) -> None:
        if self._errors:
            raise self._errors.pop()
        self._socket.send(message)


def test_a_message_that_the_kernel_has_no_room_for_is_sent_again_and_not_lost():
    connection = _Connection(OSError(errno.ENOBUFS, "no buffer space"))
    peer = Peer(1, connection)
    assert not peer.send(Kind.DONE)
    assert peer.send(Kind.DONE) and connection.other.recv(64)
    with pytest.raises(OSError, match="too many references"):
        Peer(1, _Connection(OSError(errno.ETOOMANYREFS, "too many references"))).send(Kind.DONE)
    assert Peer(1, _Connection(BrokenPipeError())).send(Kind.DONE), "who listens hears that it has ended"


def _holds_no_open_files() -> None:
    comm = _connect()
    before = len(os.listdir("/proc/self/fd"))
    memory = [comm.empty(100, torch.float32) for _ in range(20)] + [comm.shared_memory.common(100, torch.float32)]
    comm.shared_memory.barrier()
    assert len(os.listdir("/proc/self/fd")) == before, f"{len(memory)} parts of memory"


def test_shared_memory_keeps_no_files_open():
    run_ranks(_holds_no_open_files, 2)


def _has_no_file_left() -> None:
    comm = _connect()
    if comm.rank:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            with pytest.raises(CommError, match="rank 0 .* too many open files"):
                comm.shared_memory.common(10, torch.float32)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    else:
        comm.shared_memory.common(10, torch.float32)
    dist.barrier()


def test_memory_that_cannot_be_taken_for_want_of_open_files_is_told():
    run_ranks(_has_no_file_left, 2)


def _one_is_killed() -> None:
    comm = _connect()
    full = comm.empty(32, torch.float32)
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        comm.all_gather(full, _mine(full), what="layers.3").wait()
    finally:
        assert time.monotonic() - begin < 20.0, "the end of a rank was not noticed"


def test_a_rank_that_is_killed_is_noticed_at_once_and_leaves_nothing():
    def names() -> set[str]:  # other programs, and other tests that run meanwhile, may keep files there
        return {name for name in os.listdir("/dev/shm") if "hf_zero" in name}

    before = names()
    with pytest.raises(RemoteError) as caught:
        run_ranks(_one_is_killed, 2)
    assert caught.value.kind in ("Died", "CommError")
    assert names() <= before


def _gives_back() -> int:
    def held() -> tuple[int, int]:
        while gc.collect():
            pass
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:hf_zero" in line for line in maps)

    before = held()
    comm = _connect()
    memory, common = comm.empty(1000, torch.float32), comm.shared_memory.common(1000, torch.float32)
    comm.shared_memory.barrier()
    assert held()[1] >= before[1] + 3  # the peer's too
    del memory, common, comm
    dist.barrier()
    assert held() == before


@pytest.mark.quick
def test_memory_and_sockets_are_given_back():
    run_ranks(_gives_back, 2)


def _hosts_differ() -> None:
    real, rank = ranks.this_host, dist.get_rank()
    ranks.exchange_addresses(dist.group.WORLD)  # the real ones: later tests find them in the same processes
    try:
        ranks.this_host = lambda: f"host {rank}"
        assert type(connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20)) is PairwiseComm
        ranks.this_host = lambda: None if rank else real()
        assert type(connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20)) is PairwiseComm
    finally:
        ranks.this_host = real
    assert type(connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20, shared_memory=False)) is PairwiseComm


def _cannot_connect() -> None:
    """One rank cannot reach another, as in containers of their own: all go the other way."""
    real, seconds = rendezvous._connected, rendezvous.RENDEZVOUS_SECONDS
    try:
        rendezvous.RENDEZVOUS_SECONDS = 3.0
        if dist.get_rank() == 1:
            rendezvous._connected = lambda *_: (_ for _ in ()).throw(ConnectionRefusedError("refused"))
        comm = connect(CPU, timeout_seconds=3.0, bucket_nbytes=2**20)
    finally:
        rendezvous._connected, rendezvous.RENDEZVOUS_SECONDS = real, seconds
    assert type(comm) is PairwiseComm


def test_hosts_apart_exchange_pairwise():
    run_ranks(_hosts_differ, 2)
    run_ranks(_cannot_connect, 2)


def _serves_a_part() -> None:
    """Only ranks 0 and 2 of three form the group: its own numbering is not the world's."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    comm = connect(CPU, group=group, timeout_seconds=60.0, bucket_nbytes=2**20)
    assert isinstance(comm, SharedComm) and (comm.num_ranks, comm.rank) == (2, dist.get_rank() // 2)
    full, out = _filled(comm, torch.full((4,), float(dist.get_rank() + 1))), torch.empty(2)
    comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="part").wait()
    assert out.tolist() == [2.0, 2.0]


def test_a_group_of_some_ranks_numbers_them_itself():
    run_ranks(_serves_a_part, 3)
