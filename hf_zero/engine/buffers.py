"""The buffers of a model: each rank has them whole, with the values of rank 0."""

import torch
from torch import Tensor, nn

from hf_zero.comm import Comm


LARGE_NBYTES = 2**20  # of a buffer that is sent from where it lies; smaller ones go together


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


def saved(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str]]:
    """Finds the buffers that are saved with the model: running statistics, counters. Each is given by the dict of its
    module and its key there. Others are what a rank computes for itself."""
    return [
        (module._buffers, name)
        for module in model.modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


@torch.no_grad()
def share(places: list[tuple[dict[str, Tensor | None], str]], comm: Comm) -> None:
    """Gives buffers rank 0's values once more, since each rank's forwards have written its own. All ranks call it."""
    named = [buffers.get(name) for buffers, name in places]
    found = {id(buffer): buffer for buffer in named if buffer is not None and buffer.numel()}.values()
    small = []
    for buffer in found:
        if buffer.nbytes >= LARGE_NBYTES and buffer.is_contiguous():
            comm.broadcast_(buffer)
        else:
            small.append(buffer)
    if not small:
        return
    parts = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in small]
    joined = torch.cat(parts)
    comm.broadcast_(joined)
    for buffer, own in zip(small, joined.split([part.numel() for part in parts]), strict=True):
        if comm.rank:
            buffer.copy_(own.clone().view(buffer.dtype).view(buffer.shape))  # a clone is aligned
