"""Small, rare collectives, which all backends of `torch.distributed` share, and the errors when one fails."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import ranks
from hf_zero.comm.base import Comm, Pending
from hf_zero.errors import CommError, HfZeroError


# Of the messages of small collectives, which are all in one order.
SMALL_TAG = 0x3FFFFFFE


class DistributedComm(Comm):
    """The small, rare collectives, which are the same for all `torch.distributed` backends.

    [Note: who does not answer] Of a collective, a backend says at best that it failed. Where gloo serves the group,
    ranks send small values to one another instead, so that each waits for a rank that it knows.

    Args:
        group (`dist.ProcessGroup`): the data-parallel ranks.
        device (`torch.device`): where the tensors live.
        timeout_seconds (`float`): how long one exchange may take.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float):
        super().__init__(device, timeout_seconds)
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._has_gloo = ranks.is_gloo(group)
        self._is_gloo = ranks.is_gloo(group, device)
        self._peers = [dist.get_global_rank(group, peer) for peer in range(self.num_ranks)]
        self._side_groups: dict[str, DistributedComm] = {}  # by purpose, as far as they were asked for

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], *, what: str) -> Pending:
        ops = [dist.P2POp(dist.irecv, bytes_of(tensor), self._peers[rank], self.group) for tensor, rank in receives]
        ops += [dist.P2POp(dist.isend, bytes_of(tensor), self._peers[rank], self.group) for tensor, rank in sends]
        self.counters.add("exchange", sum(tensor.numel() * tensor.element_size() for tensor, _ in sends), what)
        with self._reaching(f"exchange of unit {what!r}"):
            works = dist.batch_isend_irecv(ops) if ops else []

        def finish():
            with self._reaching(f"exchange of unit {what!r}"):
                for work in works:
                    work.wait()

        return Pending(finish)

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        vector = vector.detach().contiguous()
        rows = [torch.empty_like(vector) for _ in range(self.num_ranks)]
        self._gather_small(vector, rows, what)
        self.counters.add("scalar", vector.numel() * vector.element_size() * (self.num_ranks - 1))
        return torch.stack(rows)

    def broadcast_(self, tensor: Tensor) -> None:
        with self._reaching("a broadcast", 0 if self.rank else None):
            dist.broadcast(bytes_of(tensor), self._peers[0], group=self.group)
        self.counters.add("broadcast", tensor.numel() * tensor.element_size() if self.rank == 0 else 0)

    def barrier(self) -> None:
        if self._has_gloo:
            rows = [torch.empty(1, dtype=torch.uint8) for _ in range(self.num_ranks)]
            self._gather_small(torch.zeros(1, dtype=torch.uint8), rows, "a barrier")
        else:
            with self._reaching("a barrier"):
                dist.barrier(self.group)

    def side_group(self, purpose: str) -> Comm:
        if purpose not in self._side_groups:
            with self._reaching("connecting the ranks"):
                members = dist.get_process_group_ranks(self.group)
                group = ranks.make_group(members, timeout=self._timeout, backend="gloo")
            ranks.same_ranks(group, self.group)
            self._side_groups[purpose] = DistributedComm(group, torch.device("cpu"), self.timeout_seconds)
        return self._side_groups[purpose]

    def send(self, tensor: Tensor, rank: int) -> None:
        with self._reaching("sending", rank):
            dist.send(bytes_of(tensor), self._peers[rank], group=self.group)
        self.counters.add("send", tensor.numel() * tensor.element_size())

    def receive(self, tensor: Tensor, rank: int) -> None:
        with self._reaching("receiving", rank):
            dist.recv(bytes_of(tensor), self._peers[rank], group=self.group)

    def broadcast_object(self, obj):
        box = [obj]
        with self._reaching("a broadcast", 0 if self.rank else None):
            dist.broadcast_object_list(box, src=self._peers[0], group=self.group)
        return box[0]

    def all_gather_object(self, obj, *, what: str = "an exchange of objects") -> list:
        if not self._has_gloo:
            box: list = [None] * self.num_ranks
            with self._reaching(what):
                dist.all_gather_object(box, obj, group=self.group)
            return box
        own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        self._gather_small(torch.tensor([own.numel()]), sizes, what)
        pickles = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        self._gather_small(own, pickles, what)
        return [pickle.loads(memoryview(each.numpy())) for each in pickles]

    def _gather_small(self, own: Tensor, everyones: list[Tensor], what: str) -> None:
        """Fills `everyones` with the tensors of all ranks, in rank order."""
        if not (self._has_gloo and own.is_cpu):
            with self._reaching(what):
                dist.all_gather(everyones, own, group=self.group)
            return
        receives = [(everyones[rank], rank) for rank in reversed(self._other_ranks())]
        works = self._post(receives, [(own, rank) for rank in self._other_ranks()], SMALL_TAG, what)
        everyones[self.rank].copy_(own)
        self._wait(works, what)

    def _other_ranks(self) -> list[int]:
        """Returns all other ranks, beginning with the one after this rank."""
        return [(self.rank + distance) % self.num_ranks for distance in range(1, self.num_ranks)]

    def _post(
        self, receives: list[tuple[Tensor, int]], sends: list[tuple[Tensor, int]], tag: int, what: str
    ) -> list[tuple[int, dist.Work]]:
        """Begins messages from and to other ranks, and returns them for `_wait`."""
        works = []
        for begin, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for tensor, peer in messages:
                with self._reaching(what, peer):
                    works.append((peer, begin(tensor, self._peers[peer], group=self.group, tag=tag)))
        return works

    def _wait(self, works: list[tuple[int, dist.Work]], what: str) -> None:
        for peer, work in works:
            with self._reaching(what, peer):
                work.wait(self._timeout)

    @contextmanager
    def _reaching(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Turns an error of the backend into a `CommError` that names the rank. An error of this rank's own device is
        raised as it is."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            is_known = isinstance(error, (HfZeroError, torch.OutOfMemoryError, torch.AcceleratorError))
            # not all of gloo's errors can be told from others, which those of other backends can
            if is_known or not (self._is_gloo or ranks.is_of_transport(error)):
                raise
            raise self._failed(what, peer, error) from error

    def _failed(self, what: str, peer: int | None, error: BaseException | str) -> CommError:
        gone = set().union(*(ranks.closed_ranks(side_group.group) for side_group in self._side_groups.values()))
        return ranks.failure(what, self.group, error, peer=peer, gone=gone, seconds=self.timeout_seconds)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes. Values that are moved and not summed go as bytes, since gloo
    and NCCL know some dtypes only."""
    return tensor.view(-1).view(torch.uint8)
