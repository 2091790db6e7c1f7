"""Trains one process on one device with offload, and compares losses and masters bit for bit.

With SGD and a learning rate that is a power of two, the reference is a run without offload: products by the rate are
exact and each update rounds once, so a GPU and a CPU agree. This excludes accumulation in fp32, where a run without
offload adds inside the matmul. There, and with AdamW, whose divisions and roots differ in the last bit, the reference
is a run with offload that waits for every copy and runs nothing on another thread.
"""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

import hf_zero
from benchmarks.workload import Workload
from hf_zero.comm import Pending
from hf_zero.engine import ZeroEngine, engine_of
from tests.gpu.late import slowed


_NUM_STEPS = 4


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        settings: of `hf_zero.shard`.
        accumulate: number of micro-batches.
        in_backward: whether the update happens in backward.
    """

    settings: dict
    accumulate: int = 1
    in_backward: bool = False


_OPTIMIZER, _PARAMS = {"stage": 2, "offload": "optimizer"}, {"stage": 3, "offload": "params"}
_HALF = _OPTIMIZER | {"offload_fraction": 0.5}
CASES = {
    "optimizer": Case(_OPTIMIZER),
    "optimizer-accumulate": Case(_OPTIMIZER, accumulate=2),
    "optimizer-in_backward": Case(_OPTIMIZER, in_backward=True),
    "half": Case(_HALF),
    "half-in_backward-accumulate": Case(_HALF, accumulate=2, in_backward=True),
    "params": Case(_PARAMS),
    "params-accumulate": Case(_PARAMS, accumulate=2),
    "params-in_backward": Case(_PARAMS, in_backward=True),
}


@dataclass(frozen=True)
class Run:
    """Losses of all steps, and all masters afterwards."""

    losses: list[float]
    masters: list[torch.Tensor]

    def equals(self, other: "Run") -> bool:
        pairs = zip(self.masters, other.masters, strict=True)
        return self.losses == other.losses and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def wrong_runs(name: str, dtype: str, device: torch.device, delays: tuple[str, ...]) -> list[str]:
    """Trains one case while each of `delays` is late, and returns the runs that differ from their reference."""
    case, wrong = CASES[name], []
    plain = Case({"stage": case.settings["stage"]}, case.accumulate)
    adds_alike = case.accumulate == 1 or dtype == "bf16"
    references = {"sgd": (plain, undisturbed) if adds_alike else (case, waiting), "adamw": (case, waiting)}
    for optimizer, (reference, slow) in references.items():
        wanted = train(reference, dtype, optimizer, device, slow)
        for delay in delays:
            late = partial(slowed, delay=delay, source=random.Random(f"{name} {delay} {optimizer}"))
            if not train(case, dtype, optimizer, device, late).equals(wanted):
                wrong.append(f"{name}, {dtype}, {optimizer}, {delay} late")
    return wrong


def train(case: Case, dtype: str, optimizer: str, device: torch.device, slow: Callable) -> Run:
    """Trains a tiny Llama inside of `slow(engine)`."""
    workload = Workload(size="smoke", seq=16, dtype=dtype, accumulate=case.accumulate)
    compute_dtype = torch.bfloat16 if dtype == "bf16" else None
    engine = engine_of(hf_zero.shard(workload.build_model(device.type), compute_dtype=compute_dtype, **case.settings))
    if optimizer == "sgd":
        sharded = hf_zero.ShardedOptimizer(engine, torch.optim.SGD, lr=2.0**-6)
    else:
        sharded = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=2.0**-10, fused=True)
    losses = []
    with slow(engine):
        for step in range(_NUM_STEPS):
            losses.append(0.0)
            for index, batch in enumerate(workload.micro_batches(0, step, device.type)):
                updates = case.in_backward and index == workload.accumulate - 1
                with sharded.in_backward() if updates else contextlib.nullcontext():
                    loss = engine.model(**batch).loss
                    (loss / workload.accumulate).backward()
                losses[-1] += loss.item()
            if not case.in_backward:
                sharded.clip_grad_norm_(1e30)  # measured, never applied: norms of two devices differ
            sharded.step()
            sharded.zero_grad()
    engine.bus.synchronize()
    masters = [flat.master.detach().to("cpu", copy=True) for unit in engine.units for flat in unit.flats]
    del engine, sharded, loss
    gc.collect()  # page-locked memory is scarce
    return Run(losses, masters)


@contextlib.contextmanager
def undisturbed(engine: ZeroEngine) -> Iterator[None]:
    yield


@contextlib.contextmanager
def waiting(engine: ZeroEngine) -> Iterator[None]:
    """Waits for every copy, and does the work of other threads at once: nothing can be late."""
    bus, copy = engine.bus, engine.bus._copy

    def synchronize() -> None:
        if bus.device.type == "cuda":
            torch.cuda.synchronize(bus.device)

    def copied(*arguments):
        synchronize()
        transfer = copy(*arguments)
        synchronize()
        return transfer

    def now(work: Callable[[], None], lane: str = "arrivals", **settings) -> Pending:
        with torch.no_grad():
            work()
        return Pending()

    bus._copy, bus.later = copied, now
    yield
    del bus._copy, bus.later
