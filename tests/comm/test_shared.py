"""Exchange through shared memory, against the same arithmetic as the pairwise exchange, and how ranks meet for it."""

import errno
import gc
import os
import resource
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import connect, rendezvous
from hf_zero.comm import ranks as comm_ranks
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.peers import Kind, Peer
from hf_zero.comm.shared import SharedComm
from hf_zero.errors import CommError
from tests.comm.test_collectives import CPU, connected, filled, own_part
from tests.distributed import RemoteError, ranks, run_ranks
from tests.output import logged


@ranks(2)
def test_progress_does_what_can_be_done():
    """A reduction is done without anybody waiting for it, once all ranks have begun it."""
    comm = connected("shared memory")
    full, out = filled(comm, torch.full((8,), float(comm.rank))), torch.zeros(4)
    pending = comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="sum")
    dist.barrier()
    comm.progress()
    assert out.tolist() == [0.5] * 4
    pending.wait()


@pytest.mark.parametrize("num_ranks", [2, 3])
@ranks("num_ranks")
def test_common_memory_is_one_for_all_ranks(num_ranks):
    comm = connected("shared memory")
    numbers = comm.shared_memory.common(4 * comm.num_ranks, torch.float32)
    assert not numbers.any()
    comm.shared_memory.barrier()
    for number in range(200):
        own_part(comm, numbers).fill_(10 * number + comm.rank)
        comm.shared_memory.barrier()
        assert numbers.view(comm.num_ranks, 4)[:, 0].tolist() == [10.0 * number + r for r in range(comm.num_ranks)]
        comm.shared_memory.barrier()
    half = torch.empty(numbers.numel(), dtype=torch.bfloat16)
    comm.shared_memory.read(half, numbers, what="u")
    assert torch.equal(half, numbers.bfloat16())
    assert comm.counters.sent_nbytes == {"gather": 16 * (comm.num_ranks - 1)}
    assert comm.shared_memory.common(0, torch.float32).numel() == 0


@ranks(2)
def test_more_collectives_than_a_socket_holds_messages():
    comm, count = connected("shared memory"), 2000
    fulls = [filled(comm, torch.full((2,), float(comm.rank + index))) for index in range(8)]
    outs = torch.zeros(count, 1)
    pendings = [
        comm.reduce_scatter(fulls[index % 8], outs[index], dtype=torch.float32, accumulate=False, what=f"{index}")
        for index in range(count)
    ]
    for pending in pendings:
        pending.wait()
    assert outs.flatten().tolist() == [0.5 + index % 8 for index in range(count)]


@ranks(2)
def test_what_does_not_lie_in_shared_memory_is_exchanged_pairwise():
    comm = connected("shared memory")
    out = torch.empty(2)
    comm.reduce_scatter(
        torch.full((4,), float(comm.rank)), out, dtype=torch.float32, accumulate=False, what="u"
    ).wait()
    gathered = torch.empty(4)
    comm.all_gather(gathered, out + comm.rank, what="u").wait()
    assert gathered.tolist() == [0.5, 0.5, 1.5, 1.5]


@pytest.mark.quick
@ranks(2)
def test_ranks_at_different_units_are_told_at_once():
    begin = time.monotonic()
    comm = connected("shared memory")
    full = comm.empty(32, torch.float32)
    with pytest.raises(CommError, match=r"gather of unit 'layers.\d': rank \d .* is at another unit"):
        comm.all_gather(full, own_part(comm, full), what=f"layers.{comm.rank}").wait()
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


def _reduces(comm):
    full, out = comm.empty(8, torch.float32), torch.zeros(4)
    return comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="u")


@pytest.mark.quick
@pytest.mark.parametrize("barrier_follows", [False, True])
@ranks(2)
def test_ranks_out_of_step_at_a_memory_barrier_are_named_at_once(barrier_follows):
    comm = connected("shared memory")
    _reduces(comm).wait()
    comm.shared_memory.barrier()
    if comm.rank == 0:
        told, waits = "^a memory barrier: rank 1 .* is at reduce of unit 'u'", comm.shared_memory.barrier
    else:
        told, waits = "^reduce of unit 'u': rank 0 .* is at a memory barrier", _reduces(comm).wait
        if barrier_follows:
            told, waits = "rank 0 .* is at this barrier after different collectives", comm.shared_memory.barrier
    with pytest.raises(CommError, match=f"{told}; the ranks do not run the same program"):
        waits()
    dist.barrier()


@pytest.mark.quick
@ranks(2)
def test_a_rank_that_is_ahead_at_a_memory_barrier_is_in_step():
    comm = connected("shared memory")
    for ahead in (0, 1):
        pending = _reduces(comm)
        dist.barrier()
        if comm.rank != ahead:
            comm.progress()
            time.sleep(0.1)  # the other one comes to the barrier
        pending.wait()
        comm.shared_memory.barrier()


@ranks(2)
def test_shared_memory_keeps_no_files_open():
    comm = connected("shared memory")
    before = len(os.listdir("/proc/self/fd"))
    memory = [comm.empty(100, torch.float32) for _ in range(20)] + [comm.shared_memory.common(100, torch.float32)]
    comm.shared_memory.barrier()
    # fewer if what an earlier test has left is collected meanwhile
    assert len(os.listdir("/proc/self/fd")) <= before, f"{len(memory)} parts of memory"


@ranks(2)
def test_memory_that_cannot_be_taken_for_want_of_open_files_is_told():
    comm = connected("shared memory")
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


@pytest.mark.quick
@ranks(2)
def test_memory_and_sockets_are_given_back():
    def held() -> tuple[int, int]:
        while gc.collect():
            pass
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:hf_zero" in line for line in maps)

    before = held()
    comm = connected("shared memory")
    memory, common = comm.empty(1000, torch.float32), comm.shared_memory.common(1000, torch.float32)
    comm.shared_memory.barrier()
    assert held()[1] >= before[1] + 3  # the peer's too
    del memory, common, comm
    dist.barrier()
    assert held() == before


# Ranks of one host connect by sockets that nothing names in a file system, whoever else connects.


def _connect():
    return connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20)


def _knocks_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank first connects to every rank as another process of this user: silent, with a wrong greeting, or
    gone at once."""
    real = rendezvous._connect

    def knocking(listener, addresses, rank, connections):
        strangers = []
        for address in addresses:
            for said in (None, b"?", None):
                strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                strangers[-1].connect(address.name)
                if said is not None:
                    strangers[-1].send(said)
            strangers.pop(0).close()
        real(listener, addresses, rank, connections)

    monkeypatch.setattr(rendezvous, "_connect", knocking)
    monkeypatch.setattr(rendezvous, "GREETING_SECONDS", 0.1)


@ranks(3)
def test_strangers_do_not_keep_ranks_from_sharing_memory():
    with pytest.MonkeyPatch.context() as monkeypatch:
        _knocks_before_it_connects(monkeypatch)
        comm = _connect()
    assert type(comm) is SharedComm
    comm.shared_memory.barrier()


@ranks(2)
def test_another_users_connection_is_closed_and_the_next_one_heard():
    """The kernel's word counts: whose first connection is another user's is answered at the next."""
    real, seen = rendezvous._user_of, []

    def user_of(connection) -> int:
        seen.append(connection)
        return -1 if connection.getsockname() and len(seen) == 1 else real(connection)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 0:
            monkeypatch.setattr(rendezvous, "_user_of", user_of)
        else:
            _knocks_before_it_connects(monkeypatch)
        assert type(_connect()) is SharedComm


def _one_is_killed_while_they_meet(folder: str) -> None:
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 3.0)
        if dist.get_rank() == 1:
            monkeypatch.setattr(rendezvous, "_connect", killed)
        with pytest.raises(RuntimeError, match=r"^connecting the ranks: rank 1 \(.*\) has ended"):
            _connect()
    Path(folder, f"said{dist.get_rank()}").touch()


def test_a_rank_that_is_killed_while_they_connect_is_named(tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_one_is_killed_while_they_meet, 2, str(tmp_path))
    assert (tmp_path / "said0").exists()


def _says_why(hinder) -> list[str]:
    with logged("hf_zero.comm.world") as said, pytest.MonkeyPatch.context() as monkeypatch:
        hinder(monkeypatch)
        assert type(_connect()) is PairwiseComm
    return said


def _refused(monkeypatch) -> None:
    def refuse(*_):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 3.0)
    if dist.get_rank() == 1:
        monkeypatch.setattr(rendezvous, "_connect", refuse)


def _cannot_listen(monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    if dist.get_rank() == 1:
        monkeypatch.setattr(rendezvous.secrets, "token_hex", refuse)


def _apart(monkeypatch) -> None:
    name = f"a network of rank {dist.get_rank()}"
    monkeypatch.setattr(comm_ranks, "this_host", lambda: name)


def _several_hosts(monkeypatch) -> None:
    _apart(monkeypatch)
    name = f"the boot of rank {dist.get_rank()}"
    monkeypatch.setattr(comm_ranks, "boot_id", lambda: name)


@pytest.mark.parametrize(
    "hinder, who, why",
    [
        (_refused, "rank 1 (", "refused"),
        (_cannot_listen, "rank 1 (", "Too many open files"),
        (_apart, "", "the ranks run in separate network namespaces"),
        (_several_hosts, None, None),  # memory could not be shared
    ],
)
def test_rank_0_says_once_why_ranks_of_one_host_share_no_memory(hinder, who, why):
    first, second = run_ranks(_says_why, 2, hinder)
    assert second == [] and len(first) == (who is not None)
    for line in first:
        assert line.startswith(f"hf_zero: ranks of one host send messages instead of sharing memory: {who}")
        assert why in line
