"""Small, rare collectives, which all backends of `torch.distributed` share, and the errors when one fails."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

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
        self._small_device = ranks.CPU if self._has_gloo else device  # of objects, while they are exchanged
        self._peers = dist.get_process_group_ranks(group)
        self._side_groups: dict[str, DistributedComm] = {}  # by purpose, as far as they were asked for

    def exchange(
        self,
        sends: list[tuple[Tensor, int]],
        receives: list[tuple[Tensor, int]],
        *,
        what: str,
        verb: str = "exchange",
    ) -> Pending:
        group = self._group_of(verb)
        ops = [dist.P2POp(dist.irecv, bytes_of(tensor), self._peers[rank], group) for tensor, rank in receives]
        ops += [dist.P2POp(dist.isend, bytes_of(tensor), self._peers[rank], group) for tensor, rank in sends]
        self.counters.add(verb, sum(tensor.numel() * tensor.element_size() for tensor, _ in sends), what)
        with self._reaching(f"{verb} of unit {what!r}"):
            works = dist.batch_isend_irecv(ops) if ops else []

        def finish():
            with self._reaching(f"{verb} of unit {what!r}"):
                for work in works:
                    work.wait()

        return Pending(finish)

    def _group_of(self, verb: str) -> dist.ProcessGroup:
        """Returns the group, one of several of these ranks, through which messages of a kind go."""
        return self.group

    def all_gather_rows(self, vector: Tensor, *, what: str = "an exchange of numbers") -> Tensor:
        rows = self._gather_small(vector.detach().contiguous().view(-1), what)
        self.counters.add("scalar", vector.numel() * vector.element_size() * (self.num_ranks - 1))
        return rows

    def broadcast_(self, tensor: Tensor) -> None:
        with self._reaching("a broadcast", 0 if self.rank else None):
            dist.broadcast(bytes_of(tensor), self._peers[0], group=self.group)
        self.counters.add("broadcast", tensor.numel() * tensor.element_size() if self.rank == 0 else 0)

    def barrier(self) -> None:
        if self._has_gloo:
            self._gather_small(torch.zeros(1, dtype=torch.uint8), "a barrier")
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
        # each text is read once, however many ranks send the same: they share the object, and nobody writes to it
        device, read = self._small_device, cache(pickle.loads)
        own = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = self._gather_small(torch.tensor([own.numel()], device=device), what).view(-1).tolist()
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: own.numel()] = own
        texts = self._gather_small(padded, what).cpu().numpy().tobytes()
        return [read(texts[start : start + size]) for start, size in zip(range(0, len(texts), longest), sizes)]

    def _gather_small(self, own: Tensor, what: str) -> Tensor:
        """Returns the 1-D tensors of all ranks in rank order, as the rows of one."""
        rows = own.new_empty(self.num_ranks, own.numel())
        if self._has_gloo and own.is_cpu:
            receives = [(rows[rank], rank) for rank in reversed(self._other_ranks())]
            works = self._post(receives, [(own, rank) for rank in self._other_ranks()], SMALL_TAG, what)
            rows[self.rank].copy_(own)
            self._wait(works, what)
            return rows
        with self._reaching(what):
            if self._is_gloo:
                dist.all_gather(list(rows), own, group=self.group)
            else:
                ranks.gather_single(bytes_of(rows), bytes_of(own), group=self.group)
        return rows

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
