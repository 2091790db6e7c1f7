"""Ranks of several hosts: those of one host share memory, so what leaves a host leaves it once, and no bit changes."""

import logging
import tempfile

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import connect
from hf_zero.comm.blockwise import packed_nbytes
from hf_zero.comm.shared import SharedComm
from hf_zero.comm.two_levels import TwoLevelComm
from tests.comm.test_pairwise import CPU
from tests.distributed import run_new_ranks, run_ranks
from tests.hosts.network import Network, missing


pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")

NUMEL = 4000  # of a rank's range: several pieces of the bucket, and no multiple of a row of the scratch
HALF, SINGLE = torch.bfloat16, torch.float32


def _exchanges(kind: type, shared_memory: bool = True) -> list[torch.Tensor]:
    """All kinds of exchange, two of each under way at once under one name, waited for in another order."""
    comm = connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**14, shared_memory=shared_memory)
    assert type(comm) is kind, type(comm)
    generator, found = torch.Generator().manual_seed(comm.rank), []
    for dtype, sum_dtype, accumulate in ((SINGLE, SINGLE, False), (HALF, SINGLE, True), (HALF, HALF, False)):
        summands = [comm.empty(NUMEL * comm.num_ranks, dtype) for _ in range(2)]
        wholes = [comm.empty(NUMEL * comm.num_ranks, dtype).zero_() for _ in range(2)]
        outs = [torch.ones(NUMEL, dtype=SINGLE), torch.ones(NUMEL, dtype=SINGLE)]
        if not accumulate:
            outs[1] = summands[1].chunk(comm.num_ranks)[comm.rank]
        for _ in range(2):
            for tensor in summands:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            own = [whole.chunk(comm.num_ranks)[comm.rank].normal_(generator=generator) for whole in wholes]
            settings = {"dtype": sum_dtype, "accumulate": accumulate, "what": "unit"}
            pending = [
                comm.all_gather(wholes[0], own[0], what="unit"),
                comm.all_gather(wholes[1], own[1], what="unit"),
            ]
            pending += [comm.reduce_scatter(full, out, **settings) for full, out in zip(summands, outs)]
            comm.progress()
            for each in (pending[2], pending[0], pending[3], pending[1]):
                each.wait()
            found += [tensor.clone() for tensor in (*wholes, *outs)]
    return found


@pytest.mark.parametrize("num_hosts, num_local", [(2, 2), (3, 2), (2, 3)])
@pytest.mark.full("more cases", after=1)
def test_the_values_are_those_of_one_host(num_hosts, num_local):
    num_ranks = num_hosts * num_local
    with Network(num_hosts) as network:
        apart = run_new_ranks(_exchanges, num_ranks, TwoLevelComm, hosts=network.hosts)
    together = run_ranks(_exchanges, num_ranks, SharedComm)
    for ours, theirs in zip(apart, together, strict=True):
        for index, (tensor, expected) in enumerate(zip(ours, theirs, strict=True)):
            if num_local == 2:
                assert torch.equal(tensor, expected)
            else:  # (0 + 1 + 2) + (3 + 4 + 5) is no part of the tree over all: two sums of bf16 are rounded otherwise
                atol = 2 * 2**-8 * 4 if index // 8 == 2 else 1e-5
                torch.testing.assert_close(tensor, expected, rtol=0, atol=atol)


def _sends(shared_memory: bool, bits: int | None = None) -> int:
    """Returns the bytes of a gather and a reduction that this rank counts, whichever way they go."""
    comm = connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20, shared_memory=shared_memory)
    full = comm.empty(2**20, SINGLE)
    own = full.chunk(comm.num_ranks)[comm.rank]
    for _ in range(4):
        comm.all_gather(full, own, what="unit").wait()
        comm.reduce_scatter(full, own, dtype=SINGLE, accumulate=False, what="unit", bits=bits).wait()
    return comm.counters.total_sent_nbytes


@pytest.mark.full("slow")
def test_what_leaves_a_host_leaves_it_once():
    """Of 4 MiB, with 2 hosts of 2 ranks, a host sends half to the other in a gather and in a reduction; by messages
    each of its ranks does."""
    expected, sent, counted = 4 * 2 * 2**21, {}, {}
    for shared_memory in (True, False):
        with Network(2) as network:
            counted[shared_memory] = run_new_ranks(_sends, 4, shared_memory, hosts=network.hosts)
            sent[shared_memory] = [host.sent_nbytes() for host in network.hosts]
    for nbytes in sent[True]:
        assert expected <= nbytes < 1.1 * expected  # headers, acknowledgements, the rendezvous
    for nbytes in sent[False]:
        assert 2 * expected <= nbytes < 2.2 * expected
    assert counted[True] == counted[False]
    with Network(2) as network:
        run_new_ranks(_sends, 4, True, 8, hosts=network.hosts)
        in_8_bits = [host.sent_nbytes() for host in network.hosts]
    expected = 4 * (2**21 + 2 * packed_nbytes(2**18, 8))  # 1.25 of 2 parts
    for nbytes in in_8_bits:
        assert expected <= nbytes < 1.1 * expected


def _kind(folder: str | None = None) -> tuple[str, list[str]]:
    tempfile.tempdir, said = folder, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("hf_zero.comm.world")
    logger.addHandler(handler)
    comm = connect(CPU, timeout_seconds=60.0, bucket_nbytes=2**20)
    values = comm.all_gather_vector(torch.tensor([dist.get_rank()])).flatten().tolist()
    logger.removeHandler(handler)
    assert values == list(range(comm.num_ranks))
    return type(comm).__name__, said


@pytest.mark.full("slow")
def test_hosts_of_one_name_are_told_apart_and_unlike_hosts_send_messages():
    with Network(2, name="node") as network:
        kinds = run_new_ranks(_kind, 4, hosts=network.hosts)
        assert kinds == [("TwoLevelComm", [])] * 4
        first, second = network.hosts
        uneven = run_new_ranks(_kind, 3, hosts=[first, second, second])
    assert [name for name, _ in uneven] == ["PairwiseComm"] * 3
    assert "hosts have unlike numbers of ranks: 1, 2" in uneven[0][1][0]


@pytest.mark.full("slow")
def test_containers_of_one_network_that_see_other_files_send_messages(tmp_path):
    """Two containers of one pod: one network, and temporary folders of their own."""
    with Network(1) as network:
        (host,) = network.hosts
        with network.container(host, hidden=tmp_path) as other:
            kinds = run_new_ranks(_kind, 2, str(tmp_path), hosts=[host, other])
    assert [name for name, _ in kinds] == ["PairwiseComm"] * 2
    assert len(kinds[0][1]) == 1 and "No such file or directory" in kinds[0][1][0]
