"""Exchange through shared memory, against the same arithmetic as the pairwise exchange, and how ranks meet for it."""

import errno
import fcntl
import gc
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import connect, peers
from hf_zero.comm import ranks as comm_ranks
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.peers import Kind, Peer
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
def test_more_collectives_than_a_pipe_holds_messages():
    comm, count = connected("shared memory"), 2000
    for pipe in comm._mapping_peers[0].pipes:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
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


def test_a_message_for_which_a_pipe_has_no_room_is_sent_again_and_not_lost():
    inbox = peers._inbox()
    descriptor = inbox.fileno()
    outbox = peers._outbox(os.getpid(), descriptor, os.fstat(descriptor).st_ino)
    peer = Peer(1, os.getpid(), inbox, outbox)  # this process is its own peer
    numbers = range(1, 10_000)
    num_sent = next(number for number in numbers if not peer.send(Kind.DONE, number, 0, 0)) - 1
    for number in range(1, num_sent + 1):
        assert peer.receive(0.0) and peer.num_done == number
    assert not peer.receive(0.0)
    assert peer.send(Kind.DONE, num_sent + 1, 0, 0) and peer.receive(0.0) and peer.num_done == num_sent + 1
    inbox.close()
    assert peer.send(Kind.DONE, 1, 0, 0), "who receives hears that it has ended"


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
    told = (
        "a barrier: rank 1 .* is at reduce of unit 'u'",
        "reduce of unit 'u': rank 0 .* is at a barrier",
    )
    with pytest.raises(CommError, match=f"^{told[comm.rank]}; the ranks do not run the same program"):
        if comm.rank == 1:
            pending = _reduces(comm)
            if not barrier_follows:
                pending.wait()
        comm.shared_memory.barrier()
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
    memory += [comm.empty(100, torch.float32) for _ in range(20)]
    _reduces(comm).wait()  # by then all ranks have mapped it
    # fewer if what an earlier test has left is collected meanwhile
    assert len(os.listdir("/proc/self/fd")) <= before, f"{len(memory)} parts of memory"


@ranks(2)
def test_memory_that_cannot_be_taken_for_want_of_open_files_is_told():
    comm = connect(CPU, timeout_seconds=1.0, bucket_nbytes=2**20)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        told = ("rank 1 .* does not answer", "rank 0 .* Too many open files")
        with pytest.raises(CommError, match=told[comm.rank]):
            comm.shared_memory.common(10, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    dist.barrier()


@pytest.mark.quick
@ranks(2)
def test_memory_and_pipes_are_given_back():
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


# How ranks of one host find one another's pipes and memory.


def _connect():
    return connect(CPU, group=dist.new_group(), timeout_seconds=60.0, bucket_nbytes=2**20)


def _one_is_killed_while_they_connect(folder: str) -> None:
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            monkeypatch.setattr(peers, "_outbox", killed)
        with pytest.raises(RuntimeError, match=r"^connecting the ranks: rank 1 \(.*\) has ended"):
            _connect()
    Path(folder, f"said{dist.get_rank()}").touch()


def test_a_rank_that_is_killed_while_they_connect_is_named(tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_one_is_killed_while_they_connect, 2, str(tmp_path))
    assert (tmp_path / "said0").exists()


def _one_is_killed_that_has_forked(folder: str) -> None:
    comm = connected("shared memory")
    comm.barrier()
    if comm.rank == 1:
        if (child := os.fork()) == 0:  # as a data loader does
            time.sleep(15.0)
            os._exit(0)
        Path(folder, "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError, match=r"^a barrier: rank 1 \(.*\) has ended"):
        comm.shared_memory.barrier()
    assert time.monotonic() - begin < 10.0
    Path(folder, "said").touch()


def test_a_rank_that_is_killed_is_named_though_its_workers_live_on(tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_one_is_killed_that_has_forked, 2, str(tmp_path))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert (tmp_path / "said").exists()


def _says_why(hinder) -> list[str]:
    with logged("hf_zero.comm.world") as said, pytest.MonkeyPatch.context() as monkeypatch:
        hinder(monkeypatch)
        assert type(_connect()) is PairwiseComm
    return said


def _cannot_open_pipes(monkeypatch) -> None:
    """As if the kernel did not let this rank look at the others."""
    if dist.get_rank() == 1:
        monkeypatch.setattr(peers, "_outbox", _refuse)


def _cannot_map_memory(monkeypatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.setattr(peers, "mapped", _refuse)


def _refuse(pid: int, descriptor: int, _) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", f"/proc/{pid}/fd/{descriptor}")


def _has_too_many_files(monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    if dist.get_rank() == 1:
        monkeypatch.setattr(os, "pipe2", refuse)


def _has_an_old_python(monkeypatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.delattr(os, "memfd_create")


def _sees_another_process(monkeypatch) -> None:
    """In a PID namespace of its own, a rank has the number of another process here."""
    if dist.get_rank() == 1:
        real = peers._outbox
        monkeypatch.setattr(peers, "_outbox", lambda pid, descriptor, inode: real(pid, descriptor, inode + 1))


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
        (_cannot_open_pipes, "rank 1 (", "Permission denied: '/proc/"),
        (_cannot_map_memory, "rank 1 (", "Permission denied: '/proc/"),
        (_has_too_many_files, "rank 1 (", "Too many open files"),
        (_has_an_old_python, "rank 1 (", "this Python was built without os.memfd_create"),
        (_sees_another_process, "rank 1 (", "the ranks run in separate PID namespaces"),
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
