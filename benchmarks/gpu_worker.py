"""What one process does for `benchmarks.gpu`."""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.worker import Stepper, synchronize


NUM_ROWS = 40  # of the table of operators and kernels of one step


def time_mode(spec: dict, rank: int) -> dict:
    """Seconds per step on the device and on the host, what the caching allocator did, and the profile of one step."""
    stepper = Stepper.of(spec, rank)
    mode, device, workload = stepper.mode, stepper.device, stepper.workload
    batches = [workload.micro_batches(rank, step, device)[0] for step in range(4)]

    def step(number: int) -> torch.Tensor:
        """The loss stays on the device, since reading it would wait for the queue."""
        with mode.micro_batch(last=True):
            loss = mode.forward(batches[number % len(batches)])
            mode.backward(loss)
        mode.update()
        return loss.detach()

    for number in range(spec["warmup"]):
        step(number)
    synchronize(device)
    before = _reset_memory(device)
    begin, moments, losses = time.perf_counter(), [_now(device)], []
    for number in range(spec["steps"]):
        losses.append(step(number))
        moments.append(_now(device))
    host = (time.perf_counter() - begin) / spec["steps"]
    synchronize(device)
    return {
        "step_seconds": [_seconds_between(*pair) for pair in pairwise(moments)],
        "host_seconds": host,  # until everything was queued; close to the step time wherever the host is slower
        "losses": [loss.item() for loss in losses],
        "memory": _memory_since(before, spec["steps"]) if before else {},
        **_profile(lambda: step(0), device),
    }


def _now(device: str):
    """A moment on the device: a CUDA event, so that timing never waits."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(first, last) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1e3


def _profile(step, device: str) -> dict:
    """Counts the kernels that one more step launches (on a CPU, its operators) and lists the slowest."""
    on_gpu = device == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as profiler:
        step()
        synchronize(device)
    events = [event for event in profiler.events() if (event.device_type != DeviceType.CPU) == on_gpu]
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return {"launches": len(events), "profile": profiler.key_averages().table(sort_by=order, row_limit=NUM_ROWS)}


def _reset_memory(device: str) -> dict:
    if device == "cpu":
        return {}
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()


def _memory_since(before: dict, steps: int) -> dict:
    after = torch.cuda.memory_stats()

    def grown(key: str) -> float:
        return after.get(key, 0) - before.get(key, 0)

    return {
        "rest_allocated_nbytes": torch.cuda.memory_allocated(),
        "peak_allocated_nbytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_nbytes": torch.cuda.max_memory_reserved(),
        "allocations_per_step": grown("allocation.all.allocated") / steps,
        "device_allocations": grown("num_device_alloc"),  # cudaMalloc calls: 0 in the steady state
        "retries": grown("num_alloc_retries"),
    }
