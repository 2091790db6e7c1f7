"""Ranks of one host connect by sockets that nothing names in a file system, whoever else connects."""

import errno
import logging
import os
import signal
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_zero.comm import connect, rendezvous
from hf_zero.comm import ranks as comm_ranks
from hf_zero.comm.pairwise import PairwiseComm
from hf_zero.comm.shared import SharedComm
from tests.comm.test_collectives import CPU
from tests.distributed import RemoteError, ranks, run_ranks


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
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("hf_zero.comm.world")
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            hinder(monkeypatch)
            assert type(_connect()) is PairwiseComm
    finally:
        logger.removeHandler(handler)
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
