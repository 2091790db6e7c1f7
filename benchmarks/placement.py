"""Which bytes are the host's and which the device's: the only place that says so.

Host bytes are those of the tensors that a mode's offload puts into main memory, whatever the device is: masters,
optimizer state, gradients between backward and update, parameters, and the page-locked buffers on the way there.
Each storage counts once. They are looked at between backward and update, when all of them exist. Device bytes are
everything else: on a GPU what its allocator held at the peak; where the device is the CPU itself, the peak of all
tensors less the host's bytes. That favours modes which give gradients back between steps: their peak may fall at a
moment at which not all of the host's tensors are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from benchmarks import counters


def storage_nbytes(tensors: Iterable) -> int:
    """Bytes of the storages behind some tensors, each once; what is no tensor of main memory counts nothing."""
    storages = {}
    for tensor in tensors:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if torch.is_tensor(tensor) and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def hf_zero_host_nbytes(engine, optimizer) -> int:
    """What was written of what the engine's bus has handed out, and the optimizer state of what rests away."""
    state = [optimizer.state.get(run.param, {}) for run in optimizer.slices if run.unit.is_away]
    written = counters.resident_nbytes_at(engine.bus._memory)
    return written + storage_nbytes(value for values in state for value in values.values())


def fsdp2_host_nbytes(model, optimizer) -> int:
    """Shards of parameters and of gradients, and the state."""
    params = list(model.parameters())
    return storage_nbytes([*params, *(param.grad for param in params), *_state(optimizer)])


def deepspeed_host_nbytes(model, optimizer) -> int:
    """Masters, gradients, state, and at stage 3 the shards of parameters: as DeepSpeed's optimizers name them."""
    masters = [
        *getattr(optimizer, "single_partition_of_fp32_groups", ()),
        *getattr(optimizer, "fp32_partitioned_groups_flat", ()),
    ]
    shards = [getattr(param, "ds_tensor", None) for param in model.parameters()]
    gradients = [*(master.grad for master in masters), getattr(optimizer, "grad_partitions_flat_buffer", None)]
    return storage_nbytes([*masters, *shards, *gradients, *_state(optimizer.optimizer)])


def _state(optimizer) -> Iterator:
    for values in optimizer.state.values():
        yield from values.values()


def device_peak_nbytes(ranks: list[dict]) -> int | None:
    """The rank's that has most, of what `worker.count_bytes` found; `None` where tensors could not be counted."""
    peaks = [_device_peak(rank) for rank in ranks]
    return None if None in peaks else max(peaks)


def _device_peak(rank: dict) -> int | None:
    if rank.get("device_peak_nbytes") is not None:
        return rank["device_peak_nbytes"]
    if rank["tensors"] is None:
        return None
    # shared memory holds what was written of the bus's, too
    return max(0, rank["tensors"]["peak_nbytes"] + rank["shared_nbytes"] - rank["host_nbytes"])
