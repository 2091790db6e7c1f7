"""Whatever a rank is waited for, those that wait say which one has ended, or does not answer."""

import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hf_zero.comm import connect, distributed
from hf_zero.comm import shared as shared_memory
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.comm.base import Comm
from hf_zero.comm.distributed import DistributedComm, NativeComm
from hf_zero.comm.ranks import (
    _is_closed,
    failure,
    is_gloo,
    is_of_transport,
    take_timeout,
    timeout_of,
    transport_errors,
)
from hf_zero.engine import engine_of
from hf_zero.errors import CommError
from hf_zero.trainer import ZeroTrainingArguments
from hf_zero.trainer import trainer as trainer_module
from tests import models
from tests.comm.test_collectives import CPU
from tests.distributed import RemoteError, forget_ranks, ranks, run_ranks
from tests.output import logged
from tests.tiers import in_core, more
from tests.trainer.harness import Rows, make, reset_accelerate


VICTIM = 1
NUMEL = 1024


@pytest.fixture(autouse=True, scope="module")
def new_ranks() -> None:
    """Other tests have made groups of parts of the world, and ranks have then another number of them."""
    forget_ranks()


def _reduce(comm: Comm) -> None:
    full, out = comm.empty(NUMEL * comm.num_ranks, torch.float32), torch.empty(NUMEL)
    comm.reduce_scatter(full, out, dtype=torch.float32, accumulate=False, what="layers.3").wait()


def _gather(comm: Comm) -> None:
    full = comm.empty(NUMEL * comm.num_ranks, torch.float32)
    comm.all_gather(full, full.chunk(comm.num_ranks)[comm.rank], what="layers.3").wait()


def _exchange(comm: Comm) -> None:
    values = [torch.empty(NUMEL) for _ in range(comm.num_ranks)]
    others = [rank for rank in range(comm.num_ranks) if rank != comm.rank]
    sends, receives = [(torch.ones(NUMEL), rank) for rank in others], [(values[rank], rank) for rank in others]
    comm.exchange(sends, receives, what="layers.3").wait()


COLLECTIVES = {
    "gather": _gather,
    "reduce": _reduce,
    "exchange": _exchange,
    "memory barrier": lambda comm: comm.shared_memory.barrier(),
    "barrier": lambda comm: comm.barrier(),
    "vector": lambda comm: comm.all_gather_vector(torch.ones(3)),
    "object": lambda comm: comm.all_gather_object({"rank": comm.rank}),
    "broadcast": lambda comm: comm.broadcast_(torch.ones(3)),
    "broadcast object": lambda comm: comm.broadcast_object("all"),
    "receive": lambda comm: comm.receive(torch.ones(3), VICTIM),
    "agreement": lambda comm: run_on_all_ranks(comm, "saving", lambda: None),
    "side group": lambda comm: comm.side_group("files").all_gather_object(comm.rank),
}
# Without shared memory a memory barrier is nothing.
CASES = [(kind, name) for kind in ("shared", "messages", "native") for name in COLLECTIVES]
CASES = [(kind, name) for kind, name in CASES if kind == "shared" or name != "memory barrier"]
CASES += [("many", name) for name in ("barrier", "object", "side group")]
# Each of these is waited for in a way of its own.
IN_CORE = [("shared", name) for name in ("gather", "reduce", "memory barrier", "vector", "agreement", "side group")]


def _connected(kind: str, timeout_seconds: float = 60.0) -> Comm:
    group = dist.new_group()  # that of the other tests stays whole
    shared = kind == "shared"
    if kind == "many":  # too many to send small values in pairs; these processes are of no other test
        distributed.MAX_PAIRED_RANKS = 2
    comm = connect(CPU, group=group, timeout_seconds=timeout_seconds, bucket_nbytes=2**20, shared_memory=shared)
    return NativeComm(comm.group, CPU, timeout_seconds, 2**20) if kind == "native" else comm


def _lose_one(kind: str, name: str, folder: Path) -> None:
    """All collectives but the last go well; before that, a rank is killed."""
    comm = _connected(kind)
    comm.side_group("files")
    comm.barrier()
    _note_place(folder)
    comm.barrier()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        while True:  # what a rank has sent before its end still arrives
            COLLECTIVES[name](comm)
    assert time.monotonic() - begin < 20.0
    _end(folder, caught.value)


def _end(folder: Path, error: CommError) -> None:
    """As a process does that nobody catches the error in."""
    (folder / f"said{dist.get_rank()}").write_text(str(error), encoding="utf-8")
    os._exit(1)


def _note_place(folder: Path) -> None:
    place = f"rank {dist.get_rank()} ({socket.gethostname()}, pid {os.getpid()})"
    (folder / f"place{dist.get_rank()}").write_text(place, encoding="utf-8")


def _said(folder: Path) -> tuple[str, list[str]]:
    """The place of the victim, and what the other ranks said."""
    said = [(folder / f"said{rank}").read_text(encoding="utf-8") for rank in range(3) if rank != VICTIM]
    return (folder / f"place{VICTIM}").read_text(encoding="utf-8"), said


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize("kind, name", in_core(IN_CORE, CASES))
def test_a_rank_that_is_killed_is_named_by_all_others(kind, name, tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_lose_one, 3, kind, name, tmp_path)
    victim, said = _said(tmp_path)
    for line in said:
        # a rank that heard of it first may have ended too when the next one looks
        assert victim in line and re.search(r" (has|have) ended; look at (its log|their logs) first$", line), line
        assert "\n" not in line


PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
HINT = ". This is typically caused by a remote worker hanging or bugs in your application."
# What gloo, torch's store and the system say, whether it is of the transport, and whether the other end has gone.
TEXTS = [
    (f"{PLACE}Read error [127.0.0.1]:31664: Connection reset by peer{HINT}", True, True),
    ("Read error [127.0.0.1]:31664: Connection reset by peer", True, True),
    ("Read error [127.0.0.1]:31664: Input/output error", True, False),
    (f"{PLACE}Connection closed by peer [127.0.0.1]:39577{HINT}", True, True),
    (f"{PLACE}writev [127.0.0.1]:39577: Broken pipe", True, True),
    (f"{PLACE}Socket closed [127.0.0.1]:39577", True, True),
    (f"{PLACE}Socket unexpectedly closed [127.0.0.1]:39577", True, True),
    (f"{PLACE}connect [127.0.0.1]:39577: Connection refused", True, True),
    ("Pair is not connected (3 -> 1)", True, True),
    ("Gloo connectFullMesh failed with [/pytorch/gloo.cc:1] no error", True, False),
    ("Application timeout caused pair closure", True, False),
    ("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms", True, False),
    ("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?", True, True),
    ("[Errno 32] Broken pipe", True, True),
    ("[Errno 103] Software caused connection abort", True, True),
    ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False, False),
    ("stack expects each tensor to be equal size, read error in row 3", False, False),
]


@pytest.mark.parametrize("text, of_transport, closed", TEXTS)
def test_what_says_that_a_rank_was_not_reached_is_known(text, of_transport, closed):
    assert is_of_transport(RuntimeError(text)) is of_transport
    assert _is_closed(RuntimeError(text)) is closed


@ranks(1)
def test_a_rank_that_has_gone_is_named_whoever_says_it_and_one_that_is_about_to_be_gone():
    gone = "rank 0.* has ended; look at its log first"
    with mock.patch("hf_zero.comm.ranks.closed_ranks", lambda group: {0}):
        with pytest.raises(CommError, match=f"^training: {gone}$"), transport_errors("training"):
            raise RuntimeError("Connection reset by peer")  # words that a download would use as well
    # a process that is ending closes its connections one after the other: the first look finds nobody gone
    found = iter([set(), set(), {0}])
    with mock.patch("hf_zero.comm.ranks.closed_ranks", lambda group: next(found)):
        error = failure("a barrier", dist.group.WORLD, "Connection reset by peer")
    assert re.fullmatch(f"a barrier: {gone}", str(error))


def _lose_one_in_training(folder: Path) -> None:
    """The next that the others do is a collective of Trainer's own."""
    rank = dist.get_rank()
    trainer = make(3, folder / "run", models.build("bert"), Rows("bert"))
    log = trainer._maybe_log_save_evaluate

    def log_or_die(*values, **named):
        if trainer.state.global_step == 2:
            _note_place(folder)
            engine_of(trainer.model).comm.barrier()
            if rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
        return log(*values, **named)

    trainer._maybe_log_save_evaluate = log_or_die
    with pytest.raises(CommError) as caught:
        trainer.train()
    _end(folder, caught.value)


def test_a_rank_that_is_killed_is_named_where_trainer_communicates(tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_lose_one_in_training, 3, tmp_path)
    victim, said = _said(tmp_path)
    assert all(victim in line and line.startswith("training: ") for line in said), said


def _one_stays_away(kind: str, name: str) -> tuple[str, list[str]]:
    comm = _connected(kind, timeout_seconds=1.0)
    comm.side_group("files")
    if comm.rank == VICTIM:
        time.sleep(2.0)
        return "", []
    with pytest.MonkeyPatch.context() as patch, logged("hf_zero.comm.shared") as said:
        patch.setattr(shared_memory, "PATIENCE_SECONDS", 0.5)
        with pytest.raises(CommError) as caught:
            COLLECTIVES[name](comm)
    return str(caught.value), said


@pytest.mark.parametrize(
    "kind, name",
    [
        *[("messages", "gather"), ("shared", "gather"), ("shared", "barrier"), ("messages", "side group")],
        *more(*((kind, name) for kind in ("messages", "shared") for name in ("object", "vector", "agreement"))),
        *more(("messages", "barrier"), ("shared", "side group")),
    ],
)
def test_a_rank_that_does_not_answer_is_named(kind, name):
    what = "gather of unit 'layers.3'" if name == "gather" else ""
    for rank, (line, said) in enumerate(run_ranks(_one_stays_away, 3, kind, name)):
        if rank != VICTIM:
            reason = rf"rank {VICTIM} \(.*, pid \d+\) does not answer within 1 s; look at its log first; if it waits"
            assert re.search(f"{what}: {reason}", line), line
            if (kind, name) == ("shared", "gather"):
                assert re.search(rf"{what}: has waited 0.5 s for rank {VICTIM} \(.* for up to 1 s", said[0]), said


@pytest.mark.quick
@ranks(2)
def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="^out of memory$") as caught, transport_errors("training"):
        raise RuntimeError("out of memory")
    assert type(caught.value) is RuntimeError
    for text in ("dns error: Connection refused", "Socket closed", "Connection reset by peer"):  # of a download
        with pytest.raises(RuntimeError, match=f"^{text}$") as caught, transport_errors("training"):
            raise RuntimeError(text)
        assert type(caught.value) is RuntimeError
    with pytest.raises(ValueError), transport_errors("training"):
        raise ValueError("Connection reset by peer")
    first = CommError("saving: rank 1 has ended")
    with pytest.raises(CommError) as caught, transport_errors("training"):
        raise first
    assert caught.value is first


def _raises(error: Exception, by: str) -> type[Exception]:
    comm = DistributedComm(dist.group.WORLD, CPU, 60.0)
    comm._is_gloo = by == "gloo"
    with mock.patch.object(dist, "broadcast", side_effect=error), pytest.raises(RuntimeError) as caught:
        comm.broadcast_(torch.zeros(1))
    return caught.type


@ranks(1)
def test_what_is_wrong_with_the_device_is_not_taken_for_a_rank_that_is_gone():
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("device-side assert")):
        assert {_raises(error, by) for by in ("gloo", "nccl")} == {type(error)}
    assert _raises(RuntimeError("a kernel was not found"), "nccl") is RuntimeError
    for error in (dist.DistBackendError("NCCL error"), RuntimeError("Connection closed by peer")):
        assert {_raises(error, by) for by in ("gloo", "nccl")} == {CommError}
    assert _raises(RuntimeError("what gloo says"), "gloo") is CommError


def _lose_one_in_connecting(folder: Path) -> None:
    comm = _connected("messages")
    _note_place(folder)
    comm.barrier()
    if comm.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommError) as caught:
        patch.setattr(distributed, "CONNECTING_SECONDS", 3.0)
        comm.side_group("files")
    _end(folder, caught.value)


def test_a_rank_that_ends_while_the_others_connect_is_named(tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_lose_one_in_connecting, 3, tmp_path)
    victim, said = _said(tmp_path)
    assert all(line.startswith(f"connecting the ranks: {victim} has ended") for line in said), said


@ranks(1)
def test_a_rank_that_is_lost_while_a_checkpoint_is_looked_for_is_told(tmp_path):
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"))
    for given, name in ((True, "chosen"), (tmp_path, "fault_of")):
        with mock.patch.object(trainer_module, name, side_effect=error), pytest.raises(CommError, match="^training: "):
            trainer.train(given)


@pytest.mark.parametrize("options", [RuntimeError, NotImplementedError, AttributeError, None])
def test_a_backend_that_tells_no_limit_has_torchs(options):
    backend = type("Backend", (), {"options": mock.PropertyMock(side_effect=options, return_value=None)})
    group = mock.Mock(_get_backend=lambda device: backend())
    assert timeout_of(group, CPU) == default_pg_timeout.total_seconds()


@ranks(2)
def test_a_limit_that_was_chosen_for_a_group_stays():
    chosen = dist.new_group(timeout=timedelta(seconds=40))
    for group, wanted in ((dist.new_group(), 5), (chosen, 40)):
        assert is_gloo(group)
        take_timeout(group, 5.0)
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=wanted)


@ranks(2)
def test_without_a_limit_the_groups_own_is_kept():
    group = dist.new_group(timeout=timedelta(seconds=1))
    for shared in (True, False):
        comm = connect(CPU, group=group, bucket_nbytes=2**20, shared_memory=shared)
        if comm.rank == 0:
            with pytest.raises(CommError, match="rank 1 .* does not answer within 1 s"):
                comm.all_gather_vector(torch.ones(1))
        dist.barrier()


def _calls_a_collective_alone(folder: Path) -> None:
    reset_accelerate()
    backend = dist.group.WORLD._get_backend(CPU)
    backend._set_default_timeout(default_pg_timeout)  # as in a group that accelerate has made
    ZeroTrainingArguments(output_dir=str(folder), use_cpu=True, ddp_timeout=2, report_to=[])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        (folder / "said").write_text(str(caught.value), encoding="utf-8")
    else:
        time.sleep(5.0)
    os._exit(1)  # connections that have timed out are closed: other tests take new ranks


@pytest.mark.full("slow")
def test_ddp_timeout_limits_the_collectives_of_the_world(tmp_path):
    with pytest.raises(RemoteError):
        run_ranks(_calls_a_collective_alone, 2, tmp_path, timeout=30.0)
    assert "Timed out waiting 2000ms" in (tmp_path / "said").read_text(encoding="utf-8")
