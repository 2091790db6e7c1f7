"""What one process does for `benchmarks.gpu`: time a mode, or train on two ranks that share a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.modes import HFZero, build_mode
from benchmarks.report import worst
from benchmarks.workload import Workload


NUM_ROWS = 40  # of the table of operators and kernels of one step


class Clock:
    """Moments on the device: CUDA events, so that timing never waits; `perf_counter` on a CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first, last) -> float:
        return first.elapsed_time(last) / 1e3 if self.cuda else last - first

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def time_mode(spec: dict, rank: int) -> dict:
    """Seconds per step and phase on the device, host seconds, and what the caching allocator did."""
    device, workload = spec["device"], Workload(**spec["workload"])
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    clock = Clock(device)
    mode = build_mode(spec["mode"], workload.build_model(device), workload)
    batches = [workload.micro_batches(rank, step, device)[0] for step in range(4)]
    for step in range(spec["warmup"]):
        _step(mode, batches[step % len(batches)], clock)
    clock.synchronize()
    before = _memory_start(device)
    host = time.perf_counter()
    moments, losses = [clock.now()], []
    phases = []
    for step in range(spec["steps"]):
        loss, stamps = _step(mode, batches[step % len(batches)], clock)
        losses.append(loss)
        phases.append(stamps)
        moments.append(clock.now())
    host = (time.perf_counter() - host) / spec["steps"]
    clock.synchronize()
    names = ("forward", "backward", "optimizer")
    return {
        "step_seconds": [clock.seconds(*pair) for pair in zip(moments, moments[1:], strict=False)],
        "phases": [
            {name: clock.seconds(stamps[i], stamps[i + 1]) for i, name in enumerate(names)} for stamps in phases
        ],
        # Time until everything was queued; close to the step time wherever the host is the slower side.
        "host_seconds": host,
        "losses": [loss.item() for loss in losses],
        "memory": _memory_end(device, before, spec["steps"]),
        **_profile(lambda: _step(mode, batches[0], clock), clock),
    }


def _profile(step: Callable[[], object], clock: Clock) -> dict:
    """Counts the kernels that one more step launches, on a CPU its operators, and lists those that take longest."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if clock.cuda else [])]
    with profile(activities=kinds) as profiler:
        step()
        clock.synchronize()
    events = [event for event in profiler.events() if (event.device_type != DeviceType.CPU) == clock.cuda]
    order = "self_device_time_total" if clock.cuda else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=NUM_ROWS)
    return {"launches": len(events), "profile": table}


def _step(mode, batch: dict, clock: Clock) -> tuple[torch.Tensor, list]:
    """One step; the loss stays on the device, since reading it would wait for the queue."""
    stamps = [clock.now()]
    with mode.micro_batch(last=True):
        loss = mode.forward(batch)
        stamps.append(clock.now())
        mode.backward(loss)
    stamps.append(clock.now())
    mode.update()
    stamps.append(clock.now())
    return loss.detach(), stamps


def _memory_start(device: str) -> dict:
    if device != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()


def _memory_end(device: str, before: dict, steps: int) -> dict:
    if device != "cuda":
        return {}
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


def train_reference(spec: dict, rank: int) -> dict:
    """The job of all ranks in one process on the CPU, in fp32: the gradient is the mean over the ranks' batches."""
    workload, ranks = Workload(**spec["workload"]), spec["num_ranks"]
    model = workload.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=True)
    losses, norms = [], []
    for step in range(spec["steps"]):
        losses.append([])
        for other in range(ranks):
            loss = model(**workload.micro_batches(other, step)[0]).loss
            (loss / ranks).backward()
            losses[-1].append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), workload.max_grad_norm)))
        optimizer.step()
        optimizer.zero_grad()
    torch.save([parameter.detach() for parameter in model.parameters()], spec["weights"])
    return {"losses": losses, "norms": norms}


def train_rank(spec: dict, rank: int) -> dict:
    """The same job on this rank of hf_zero; final weights are compared with the reference's."""
    import hf_zero

    os.environ["LOCAL_RANK"] = "0"  # both ranks use the first device
    workload, device = Workload(**spec["workload"]), spec["device"]
    mode = HFZero(workload.build_model(device), workload, stage=spec["stage"])
    losses, norms = [], []
    for step in range(spec["steps"]):
        loss = mode.forward(workload.micro_batches(rank, step, device)[0])
        mode.backward(loss)
        losses.append(loss.item())
        norms.append(float(mode.optimizer.clip_grad_norm_(workload.max_grad_norm)))
        mode.optimizer.step()
        mode.optimizer.zero_grad()
    wanted = torch.load(spec["weights"])
    parameters = list(mode.model.parameters())
    with hf_zero.gathered(parameters), torch.no_grad():
        pairs = zip(parameters, wanted, strict=True)
        difference = worst((mine.cpu().float() - theirs).abs().max().item() for mine, theirs in pairs)
    return {"losses": losses, "norms": norms, "weight_difference": difference}
