"""Whether a model can be trained with so much memory, told beforehand; and the search for the largest that can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workload import Workload


STATE_NBYTES = 16  # per parameter: fp32 master, gradient and two moments of Adam, wherever they are
_COPY_NBYTES = 2  # the bf16 copy that computes
_COLLECTED_NBYTES = 2  # the bf16 gradients, where all of them exist at once
_STAGING_NBYTES = 3 * 2**29  # page-locked buffers, and what the libraries take
_HOST_SHARE, _DEVICE_SHARE = 0.94, 0.9  # of what is free: of the rest, allocators waste some


@dataclass(frozen=True)
class Plan:
    """What is predicted of a trial.

    Args:
        fraction: how much of the model is offloaded.
        device_nbytes: what it takes of the device, activations included.
        host_nbytes: what it takes of main memory.
        refusal: why it is not tried; None where it is.
    """

    fraction: float
    device_nbytes: int
    host_nbytes: int
    refusal: str | None = None


def activation_nbytes(workload: Workload) -> int:
    """Rough, from above: inputs of recomputed blocks, one block's inside, logits and their gradients."""
    shape, tokens = workload.shape, workload.seq * workload.batch
    inside = tokens * (24 * shape.hidden + 10 * shape.intermediate)
    kept = 2 * tokens * shape.hidden * shape.layers if workload.recompute else inside * shape.layers
    return kept + inside + 18 * tokens * shape.vocab


def plan(kind: str, workload: Workload, *, device_nbytes: int, host_nbytes: int) -> Plan:
    """Predicts a trial in bf16 by one process.

    Args:
        kind: "device" for all on the device, "part" for as much of masters, gradients and state on the host as the
            device has no place for, "whole" for all of these on the host, "all" for the parameters too.
        workload: the model.
        device_nbytes: what the device has free.
        host_nbytes: what main memory has free.
    """
    num, active = workload.shape.num_parameters, activation_nbytes(workload)
    fraction = {"device": 0.0, "whole": 1.0, "all": 1.0}.get(kind)
    if fraction is None:
        left = device_nbytes * _DEVICE_SHARE - active - _gathered(workload) - _COPY_NBYTES * num
        # whole blocks are offloaded: one more than enough
        fraction = min(1.0, max(0.0, 1 - left / (STATE_NBYTES * num)) + 1 / workload.shape.layers)
    here = {"device": _COPY_NBYTES + _COLLECTED_NBYTES + STATE_NBYTES, "all": 0}.get(kind, _COPY_NBYTES)
    resting = here * num if kind == "device" else here * num + STATE_NBYTES * num * (1 - fraction)
    on_device = int(resting + active + (0 if kind == "device" else _gathered(workload)))
    on_host = int(STATE_NBYTES * num * fraction) + (_STAGING_NBYTES if fraction else 0)
    refusal = None  # of the host alone: where it runs full, everything on the machine suffers
    if on_host > host_nbytes * _HOST_SHARE:
        most = host_nbytes * _HOST_SHARE / 2**30
        refusal = f"{on_host / 2**30:.2f} GiB of main memory are needed, and {most:.2f} may be taken"
    return Plan(fraction, on_device, on_host, refusal)


def _gathered(workload: Workload) -> int:
    """Buffers in which two blocks and the root have their gradients, or their parameters."""
    shape = workload.shape
    return 4 * (2 * shape.num_block_parameters + shape.vocab * shape.hidden)


def most_layers(fits: Callable[[int], bool], limit: int = 4096) -> int:
    """The largest number of layers for which a prediction holds, which holds for all smaller ones too; 0: none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def search(works: Callable[[int], bool | None], first: int, *, grain: int, growth: float = 1.25) -> int:
    """The largest number of layers with which a trial works: growing from the first as long as it does, then halving
    the interval.

    Args:
        works: tries so many layers; None when no further trial may be made.
        first: where to begin.
        grain: how wide the interval may stay.
        growth: by what the number grows.

    Returns:
        The largest that worked, 0 when none did.
    """
    low, high, layers = 0, None, max(1, first)
    while high is None or high - low > grain:
        worked = works(layers)
        if worked is None:
            break
        low, high = (layers, high) if worked else (low, layers)
        layers = max(low + grain, int(low * growth)) if high is None else (low + high) // 2
        if layers == low:
            break
    return low
