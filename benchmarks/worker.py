"""What one rank does: build a mode, then either time its steps or count its bytes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks import counters
from benchmarks.modes import Plain, build_mode, parse_mode
from benchmarks.workload import Workload
from tests.tensor_meter import MeterError, TensorMeter


class Stepper:
    """Runs the steps of one mode and keeps losses and the seconds of each phase."""

    def __init__(self, mode: Plain, rank: int, *, first_step: int = 0, device: str = "cpu") -> None:
        self.mode, self.workload, self.rank, self.device = mode, mode.workload, rank, device
        self.first_step = first_step  # of the job: which data come first
        self.losses: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.host_nbytes: int | None = None  # of the last step, when they were asked for

    @classmethod
    def build(cls, name: str, workload: Workload, rank: int, device: str = "cpu") -> Stepper:
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        if parse_mode(name).checkpointing:
            workload = replace(workload, recompute=True)
        return cls(build_mode(name, workload.build_model(device), workload), rank, device=device)

    @classmethod
    def of(cls, spec: dict, rank: int) -> Stepper:
        """What the starting process asks for; with as many threads, which its environment said too early."""
        torch.set_num_threads(spec.get("threads", torch.get_num_threads()))
        return cls.build(spec["mode"], Workload(**spec["workload"]), rank, spec.get("device", "cpu"))

    def run(self, steps: int) -> list[float]:
        """Seconds of each step, from the end of the one before: work that a mode leaves to the next step is in it."""
        synchronize(self.device)
        seconds, before = [], time.perf_counter()
        for _ in range(steps):
            self.step()
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        return seconds

    def step(self, *, look: bool = False) -> None:
        """One step.

        Args:
            look: also notes the host's bytes, between backward and update.
        """
        rank = self.rank // self.mode.num_sharing
        batches = self.workload.micro_batches(rank, self.first_step + len(self.losses), self.device)
        phase = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        total = 0.0
        for index, batch in enumerate(batches):
            with self.mode.micro_batch(last=index == len(batches) - 1):
                start = time.perf_counter()
                loss = self.mode.forward(batch)
                synchronize(self.device)
                middle = time.perf_counter()
                self.mode.backward(loss)
                synchronize(self.device)
                end = time.perf_counter()
            total += loss.item() / len(batches)
            del loss
            phase["forward"] += middle - start
            phase["backward"] += end - middle
        if look:
            self.host_nbytes = self.mode.host_nbytes()
        start = time.perf_counter()
        self.mode.update()
        phase["optimizer"] = time.perf_counter() - start
        self.losses.append(total)
        self.phases.append(phase)


def synchronize(device: str) -> None:
    """Returns when the device has done what it was given: each phase has its own work. Does nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(spec: dict, rank: int) -> dict:
    """The timed pass: warm-up, then the steps that count, with nothing else switched on."""
    stepper = Stepper.of(spec, rank)
    stepper.run(spec["warmup"])
    counters.reset_resident_peak()
    dist.barrier()
    cpu = counters.cpu_seconds()
    seconds = stepper.run(spec["steps"])
    cpu = (counters.cpu_seconds() - cpu) / spec["steps"]
    return {
        "step_seconds": seconds,
        "cpu_seconds": cpu,
        "phases": stepper.phases[-spec["steps"] :],
        "losses": stepper.losses,
        "resident_peak_nbytes": counters.resident_peak_nbytes(),
    }


def count_bytes(spec: dict, rank: int) -> dict:
    """The untimed pass: tensor bytes of one step, then bytes on the wire of `spec["wire_steps"]` steps."""
    with optional_meter() as meter:
        stepper = Stepper.of(spec, rank)
        stepper.run(spec["warmup"])
        device_peak = _metered_step(stepper, meter)
    span = meter.span("begin", "end").to_dict() if meter else None
    wire = _wire(stepper, spec["wire_steps"])
    return {
        "tensors": span,
        "shared_nbytes": counters.shared_nbytes(),
        "host_nbytes": stepper.host_nbytes,
        "mapped_nbytes": stepper.mode.mapped_nbytes(),
        "device_peak_nbytes": device_peak,
        **wire,
    }


@contextlib.contextmanager
def optional_meter() -> Iterator[TensorMeter | None]:
    """Counts tensor bytes; None (with a message) where torch cannot log them."""
    meter = TensorMeter()
    try:
        meter.start()
    except MeterError as error:
        print(f"tensor bytes are not counted: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield meter
    finally:
        meter.stop()


def _metered_step(stepper: Stepper, meter: TensorMeter | None) -> int | None:
    """Returns what the device's own allocator held at the peak, where there is one."""
    on_gpu = stepper.device == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if meter:
        meter.mark("begin")
    stepper.step(look=True)
    dist.barrier()
    if meter:
        meter.mark("end")
    return torch.cuda.max_memory_allocated() if on_gpu else None


def _wire(stepper: Stepper, steps: int) -> dict:
    """Bytes sent per step by this rank's process, and those that the engine counted in the same steps."""
    _wait_for_sends()
    written, left, own = counters.written_nbytes(), counters.interfaces_nbytes(), stepper.mode.counters()
    seconds = stepper.run(steps)
    _wait_for_sends()
    after = stepper.mode.counters()
    return {
        "written_nbytes": (counters.written_nbytes() - written) / steps,
        "left_host_nbytes": (counters.interfaces_nbytes() - left) / steps,
        "wire_step_seconds": seconds,
        "engine_counters": {name: (value - own.get(name, 0)) / steps for name, value in after.items()},
    }


def _wait_for_sends() -> None:
    """Lets sends that are still under way, on any connection, end before a counter is read."""
    dist.barrier()
    time.sleep(0.05)
