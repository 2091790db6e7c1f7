"""The buffers of a model. They are replicated on every rank, with the values of rank 0."""

from itertools import accumulate

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm


LARGE_NBYTES = 2**20  # buffers of this size or more are broadcast in place; smaller ones are concatenated
ALIGNMENT = 16  # of the concatenated buffers, in bytes


def place(model: nn.Module, comm: Comm) -> None:
    """Moves the model's buffers to the engine's device and broadcasts the values of rank 0."""
    placed: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old buffers alive, so that ids stay unique
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # contiguous, because an expanded view cannot be written to; once, because modules may share a buffer
                placed.setdefault(id(buffer), (buffer, buffer.detach().to(comm.device).contiguous()))
                module._buffers[name] = placed[id(buffer)][1]
    for _, buffer in model.named_buffers():
        if buffer.numel():
            comm.broadcast_(buffer)


class SharedBuffers:
    """The persistent buffers of a model, such as running statistics and counters. Each rank computes its
    non-persistent buffers itself.

    All ranks exchange the same number of bytes, even if a forward replaces a buffer. A replacement with the same
    device, dtype, layout and shape becomes the buffer. Otherwise the previous buffer is exchanged, as in DDP."""

    def __init__(self, model: nn.Module, comm: Comm):
        self._comm = comm
        found: dict[int, tuple[dict[str, Tensor | None], str, Tensor]] = {}  # by id: modules may share a buffer
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                    found.setdefault(id(buffer), (module._buffers, name, buffer))
        self._places = [(buffers, name) for buffers, name, _ in found.values()]
        # detached tensors keep their memory if a forward assigns other `data` to a buffer
        self._tensors = [buffer.detach() for *_, buffer in found.values()]
        self._small = [index for index, buffer in enumerate(self._tensors) if buffer.nbytes < LARGE_NBYTES]
        small = [self._tensors[index] for index in self._small]
        starts = [0, *accumulate(-(-buffer.nbytes // ALIGNMENT) * ALIGNMENT for buffer in small)]
        self._joined = torch.empty(starts[-1], dtype=torch.uint8, device=comm.device)
        self._views = [
            self._joined[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(starts, small)
        ]

    @torch.no_grad()
    def share(self) -> None:
        """Broadcasts the values of rank 0 again, because each rank's forwards change its own buffers. All ranks must
        call it."""
        self._find()
        small = [self._tensors[index] for index in self._small]
        for buffer in self._tensors:
            if buffer.nbytes >= LARGE_NBYTES:
                self._comm.broadcast_(buffer)
        if not small:
            return
        if self._comm.rank == 0:
            torch._foreach_copy_(self._views, small)
        self._comm.broadcast_(self._joined)
        if self._comm.rank:
            torch._foreach_copy_(small, self._views)

    def _find(self) -> None:
        """Finds tensors with which forwards have replaced buffers or their `data`. Copies those that cannot be written
        to."""
        for index, ((buffers, name), last) in enumerate(zip(self._places, self._tensors, strict=True)):
            now = buffers.get(name)
            if now is None or _kind(now) != _kind(last):
                continue
            if now.is_inference() or not now.is_contiguous():
                now = buffers[name] = now.clone(memory_format=torch.contiguous_format)
            self._tensors[index] = now.detach()


def _kind(tensor: Tensor) -> tuple:
    return tensor.device, tensor.dtype, tensor.shape, tensor.layout
