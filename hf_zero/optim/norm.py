"""The norm of all gradients, from the shards."""

import torch
from torch import Tensor

from hf_zero.comm import Comm
from hf_zero.engine.gradient import Gradient


# torch's fp32 norm of a long CPU tensor is off by 1e-5 at 1 M elements and 3e-4 at 10 M; by rows of so many elements,
# which are then added in fp64, it is exact to 4e-9, and no slower.
ROW_NUMEL = 1024
WHAT = "the gradient norm"


def global_norm(
    gradients: list[Gradient], comm: Comm, norm_type: float = 2.0, *, divided_over: Comm | None = None
) -> Tensor:
    """Returns the norm over all parameters and ranks of the averaged gradients, by one exchange of one number.

    Every rank measures the ranges that it owns, at every stage the same ones: the result does not depend on the stage.

    Args:
        gradients (`list[Gradient]`): the reduced gradients, in the same order on every rank.
        comm (`Comm`): the ranks.
        norm_type (`float`): order of the norm, `inf` included.
        divided_over (`Comm`, *optional*): tensor-parallel ranks. Gradients of what they divide are measured by each,
            those of what is whole on all of them by the first alone, so that all of them see one norm.

    Returns:
        `Tensor`: 0-d fp32 on the CPU.
    """
    whole = _measure([gradient for gradient in gradients if not gradient.flat.is_divided], comm, norm_type)
    add = torch.Tensor.amax if norm_type == float("inf") else torch.Tensor.sum
    if divided_over is None:
        total = add(comm.all_gather_vector(whole, what=WHAT), dim=0)
    else:
        divided = _measure([gradient for gradient in gradients if gradient.flat.is_divided], comm, norm_type)
        rows = comm.all_gather_vector(torch.cat([whole, divided]), what=WHAT)
        rows = divided_over.all_gather_vector(add(rows, dim=0).to(comm.device), what=WHAT)
        total = add(torch.stack([rows[0, 0], add(rows[:, 1], dim=0)]), dim=0)
    total = total.reshape(())
    return (total if norm_type == float("inf") else total.pow(1.0 / norm_type)).float()


def _measure(gradients: list[Gradient], comm: Comm, norm_type: float) -> Tensor:
    """Returns what this rank's ranges add to the norm, before the root is taken: one number, fp64."""
    owned = [part for gradient in gradients for part in _rows(gradient.owned_range())]
    if owned:
        parts = [_row_norms(part, norm_type) for part in owned]
        if len({part.device for part in parts}) > 1:  # some gradients rest on the host
            parts = [part.cpu() for part in parts]
        norms = torch.cat(parts).double()
    else:
        norms = torch.zeros(1, dtype=torch.float64, device=comm.device)
    return (norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()).reshape(1)


def _row_norms(rows: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)  # a norm of bf16 numbers would be rounded to bf16
    return torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)


def _rows(flat: Tensor) -> list[Tensor]:
    """Returns a 1-D tensor as rows, and what is left over as one more."""
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    return [part for part in (flat[:whole].view(-1, ROW_NUMEL), flat[whole:].view(1, -1)) if part.numel()]
