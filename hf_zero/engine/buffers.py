"""The buffers of a model: each rank has them whole, with the values of rank 0."""

from itertools import accumulate

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm


LARGE_NBYTES = 2**20  # of a buffer that is sent from where it lies; smaller ones go together
ALIGNMENT = 16  # bytes, at which each of these begins


def place(model: nn.Module, comm: Comm) -> None:
    """Moves the model's buffers to the engine's device with rank 0's values."""
    placed: dict[int, tuple[Tensor, Tensor]] = {}  # the old ones live on, so that no id comes twice
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # contiguous: an expanded view could not be written; once: modules may share a buffer
                placed.setdefault(id(buffer), (buffer, buffer.detach().to(comm.device).contiguous()))
                module._buffers[name] = placed[id(buffer)][1]
    for _, buffer in model.named_buffers():
        if buffer.numel():
            comm.broadcast_(buffer)


class SharedBuffers:
    """The buffers that are saved with the model: running statistics, counters. Others are what a rank computes for
    itself. All ranks exchange the same bytes, whatever their forwards put in a buffer's place: what has its device,
    dtype and shape is the buffer from then on, and beside anything else the one before is exchanged, as DDP does."""

    def __init__(self, model: nn.Module, comm: Comm):
        self._comm = comm
        found: dict[int, tuple[dict[str, Tensor | None], str, Tensor]] = {}  # once: modules may share a buffer
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set:
                    found.setdefault(id(buffer), (module._buffers, name, buffer))
        self._places = [(buffers, name) for buffers, name, _ in found.values()]
        # tensors of their own on the same memory: they keep it where a forward gives a buffer other data
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
        """Gives buffers rank 0's values once more, since each rank's forwards have written its own. All ranks call
        it."""
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
        """Finds the tensors that forwards have put in place of buffers, or their data; those that could not be written
        are copied."""
        for index, ((buffers, name), last) in enumerate(zip(self._places, self._tensors, strict=True)):
            now = buffers.get(name)
            if now is None or _kind(now) != _kind(last):
                continue
            if now.is_inference() or not now.is_contiguous():
                now = buffers[name] = now.clone(memory_format=torch.contiguous_format)
            self._tensors[index] = now.detach()


def _kind(tensor: Tensor) -> tuple:
    return tensor.device, tensor.dtype, tensor.shape, tensor.layout
