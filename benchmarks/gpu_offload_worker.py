"""What one process does for `benchmarks.gpu --offload`: train a model of some size, or time a part of that alone."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import torch

from benchmarks.machine import available_nbytes
from benchmarks.placement import device_peak_nbytes
from benchmarks.worker import Stepper, synchronize
from benchmarks.workload import Workload
from tests.tensor_meter import TensorMeter


_OUT_OF_HOST = 77  # exit code of a process that ended itself before the host ran out of memory


class HostGuard:
    """Ends this process while there is still some main memory left, so that nothing else on the machine suffers.

    Args:
        floor_nbytes: what must stay free.
    """

    def __init__(self, floor_nbytes: int) -> None:
        Path("/proc/self/oom_score_adj").write_text("1000")  # should it come to that, this process and no other
        self.least = available_nbytes()
        self._floor = floor_nbytes
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.least = min(self.least, available_nbytes())
            if self.least < self._floor:
                os._exit(_OUT_OF_HOST)
            time.sleep(0.05)


def train(spec: dict, rank: int) -> dict:
    """Some steps of one mode. Raises where the device's budget is exceeded, on a CPU by what was counted."""
    device, budget = spec["device"], spec["device_nbytes"]
    before = available_nbytes()
    guard = HostGuard(spec["host_floor_nbytes"])
    _limit_device(device, budget)
    meter = TensorMeter() if device == "cpu" else None
    if meter:
        meter.start()
    try:
        workload = Workload(**spec["workload"])
        torch.set_num_threads(spec["threads"])
        begin = time.perf_counter()
        stepper = Stepper.build(spec["mode"], workload, rank, device)
        gc.collect()
        build_seconds = time.perf_counter() - begin
        stepper.run(spec["warmup"])
        peak = _looked_at(stepper, meter)
    finally:
        if meter:
            meter.stop()
    peak = _counted(meter, stepper) if meter else peak
    if budget and peak > budget:
        raise MemoryError(f"{peak} bytes of the device, and {budget} may be used")
    counters = stepper.mode.counters()
    seconds = stepper.run(spec["steps"])
    after = stepper.mode.counters()
    return {
        "step_seconds": seconds,
        "phases": stepper.phases[-spec["steps"] :] if spec["steps"] else [],
        "losses": stepper.losses,
        "build_seconds": build_seconds,
        "device_peak_nbytes": peak,
        "host_nbytes": stepper.host_nbytes,
        "host_taken_nbytes": before - guard.least,
        "bus_nbytes": {way: (after.get(way, 0) - counters.get(way, 0)) / max(1, spec["steps"]) for way in after},
    }


def _limit_device(device: str, budget: int | None) -> None:
    if device == "cuda" and budget:
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / torch.cuda.mem_get_info()[1]))


def _looked_at(stepper: Stepper, meter: TensorMeter | None) -> int | None:
    if meter:
        meter.mark("begin")
    else:
        torch.cuda.reset_peak_memory_stats()
    stepper.step(look=True)
    synchronize(stepper.device)
    if meter:
        meter.mark("end")
        return None
    return torch.cuda.max_memory_allocated()


def _counted(meter: TensorMeter, stepper: Stepper) -> int:
    """Where the device is the CPU: as `benchmarks.placement` divides it."""
    from benchmarks import counters

    span = meter.span("begin", "end").to_dict()
    rank = {"tensors": span, "shared_nbytes": counters.shared_nbytes(), "host_nbytes": stepper.host_nbytes}
    return device_peak_nbytes([rank])


def time_compute(spec: dict, rank: int) -> dict:
    """Seconds of forward and backward alone: of a bf16 model whose gradients are dropped as they come."""
    device, workload = spec["device"], Workload(**spec["workload"])
    torch.set_num_threads(spec["threads"])
    model = workload.build_model(device).to(torch.bfloat16)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    seconds = []
    for step in range(spec["warmup"] + spec["steps"]):
        (batch,) = workload.micro_batches(rank, step, device)
        synchronize(device)
        begin = time.perf_counter()
        model(**batch).loss.backward()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds[spec["warmup"] :]}


def _drop(param: torch.Tensor) -> None:
    param.grad = None


def measure_rates(spec: dict, rank: int) -> dict:
    """What the machine can do by itself: bytes per second over the bus each way and both ways, elements per second of
    casts and of AdamW on the host. Of memory as the engine takes it."""
    from hf_zero.comm import Bus, Comm

    torch.set_num_threads(spec["threads"])
    device = torch.device(spec["device"], 0) if spec["device"] == "cuda" else torch.device("cpu")
    bus = Bus(device, Comm(device, 60.0).counters)
    numel, times = spec["numel"], spec["times"]
    low = [bus.empty(numel, torch.bfloat16) for _ in range(2)]
    here = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2)]
    master, grad = (bus.empty(numel, torch.float32, locked=False) for _ in range(2))
    master.requires_grad_(True)
    master.grad = grad
    optimizer = torch.optim.AdamW([master], lr=1e-4, fused=True)

    def both() -> None:
        bus.up(here[0], low[0])
        bus.down(low[1], here[1])

    with torch.no_grad():
        nbytes = 2 * numel
        return {
            "up_nbytes_per_second": nbytes / _seconds(lambda: bus.up(here[0], low[0]), times, bus),
            "down_nbytes_per_second": nbytes / _seconds(lambda: bus.down(low[1], here[1]), times, bus),
            "both_nbytes_per_second": 2 * nbytes / _seconds(both, times, bus),
            "adamw_per_second": numel / _seconds(optimizer.step, times, bus),
            "to_fp32_per_second": numel / _seconds(lambda: grad.copy_(low[1]), times, bus),
            "to_bf16_per_second": numel / _seconds(lambda: low[0].copy_(master), times, bus),
        }


def _seconds(work, times: int, bus) -> float:
    """The fastest of several times: what the machine can do, whoever else is using it."""
    found = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        work()
        bus.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])
