"""Is offload exact: the same bits as without it, whatever is late?

Two comparisons, of every loss and of all masters after some steps:

- with SGD whose rate is a power of two, against the same run without offload. Every product by the rate is exact and
  every update one rounding, so a GPU and a CPU must agree to the bit. Accumulation in fp32 is left out: there a run
  without offload adds inside of the matmul.
- with AdamW, whose divisions and roots differ between a GPU and a CPU by a last bit, and for what was left out,
  against a run with offload in which every copy is waited for and nothing runs on another thread.

In the runs that are compared something is slowed down at random: the stream that computes, the streams that copy, or
the threads of the host. A race that exists then shows as a wrong bit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.report import markdown
from benchmarks.workload import Workload
from hf_zero.engine import engine_of


DELAYS = ("none", "compute", "copy", "host")
_NUM_STEPS = 4
_SLEEP_CYCLES = 3_000_000  # at most: some 2 ms
_SLEEP_SECONDS = 0.003


@dataclass(frozen=True)
class Case:
    """One way to offload.

    Args:
        settings: of `hf_zero.shard`.
        accumulate: micro-batches.
        in_backward: the update is made in backward.
    """

    settings: dict = field(default_factory=dict)
    accumulate: int = 1
    in_backward: bool = False


_OPTIMIZER, _PARAMS = {"stage": 2, "offload": "optimizer"}, {"stage": 3, "offload": "params"}
CASES = {
    "optimizer": Case(_OPTIMIZER),
    "optimizer-accumulate": Case(_OPTIMIZER, accumulate=2),
    "optimizer-in_backward": Case(_OPTIMIZER, in_backward=True),
    "half": Case(_OPTIMIZER | {"offload_fraction": 0.5}),
    "half-in_backward-accumulate": Case(_OPTIMIZER | {"offload_fraction": 0.5}, accumulate=2, in_backward=True),
    "params": Case(_PARAMS),
    "params-accumulate": Case(_PARAMS, accumulate=2),
    "params-in_backward": Case(_PARAMS, in_backward=True),
}


@dataclass(frozen=True)
class Run:
    """Losses of all steps, and all masters afterwards."""

    losses: list[float]
    masters: list[torch.Tensor]

    def equals(self, other: Run) -> bool:
        pairs = zip(self.masters, other.masters, strict=True)
        return self.losses == other.losses and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def check(spec: dict, rank: int) -> dict:
    """All cases, in one process per rank; ranks share the first device."""
    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(spec["threads"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    on_gpu, results = spec["device"] == "cuda", []
    delays = [name for name in spec["delays"] if on_gpu or name in ("none", "host")]
    for dtype in spec["dtypes"]:
        for seed in range(spec["seeds"]):
            for name in spec["cases"]:
                results += list(_check_case(name, dtype, seed, delays, spec, rank))
    return {"cases": results, "repeats": _repeats(spec, rank)}


def _check_case(name: str, dtype: str, seed: int, delays: list[str], spec: dict, rank: int) -> Iterator[dict]:
    case = CASES[name]
    shape = spec["workload"] | {"dtype": dtype, "seed": seed, "accumulate": case.accumulate}

    def train(kind: str, here: Case, slow: Callable) -> Run:
        return _train(Workload(**shape), here, kind, spec["device"], rank, slow)

    plain = Case({"stage": case.settings["stage"]}, case.accumulate)
    is_same_sum = case.accumulate == 1 or dtype == "bf16"
    wanted = {
        "sgd": train("sgd", plain, _as_it_is) if is_same_sum else train("sgd", case, _waiting),
        "adamw": train("adamw", case, _waiting),
    }
    for delay in delays:
        for kind, reference in wanted.items():
            source = random.Random(f"{name} {seed} {delay} {kind}")
            found = train(kind, case, lambda engine, source=source, delay=delay: slowed(engine, delay, source))
            loss = max(abs(mine - theirs) for mine, theirs in zip(found.losses, reference.losses, strict=True))
            weight = max((mine - theirs).abs().max().item() for mine, theirs in zip(found.masters, reference.masters))
            entry = {"case": name, "dtype": dtype, "seed": seed, "delay": delay, "optimizer": kind}
            yield entry | {"equal": found.equals(reference), "loss": loss, "weight": weight}


def _repeats(spec: dict, rank: int) -> bool:
    """Whether the device itself repeats a run without offload to the bit; where not, nothing here can be equal."""
    workload = Workload(**spec["workload"])
    runs = [_train(workload, Case({"stage": 2}), "sgd", spec["device"], rank, _as_it_is) for _ in range(2)]
    return runs[0].equals(runs[1])


def _train(workload: Workload, case: Case, kind: str, device: str, rank: int, slow: Callable) -> Run:
    import hf_zero

    dtype = torch.bfloat16 if workload.dtype == "bf16" else None
    engine = engine_of(hf_zero.shard(workload.build_model(device), compute_dtype=dtype, **case.settings))
    if kind == "sgd":
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.SGD, lr=2.0**-6)
    else:
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=2.0**-10, fused=True)
    losses = []
    with slow(engine):
        for step in range(_NUM_STEPS):
            total = 0.0
            for index, batch in enumerate(workload.micro_batches(rank, step, device)):
                is_last = index == workload.accumulate - 1
                with optimizer.in_backward() if case.in_backward and is_last else contextlib.nullcontext():
                    loss = engine.model(**batch).loss
                    (loss / workload.accumulate).backward()
                total += loss.item()
            if not case.in_backward:
                optimizer.clip_grad_norm_(1e30)  # measured, and never applied: norms of two devices differ
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    engine.bus.synchronize()
    masters = [flat.master.detach().to("cpu", copy=True) for unit in engine.units for flat in unit.flats]
    del engine, optimizer, loss
    gc.collect()  # page-locked memory is scarce
    return Run(losses, masters)


@contextlib.contextmanager
def _as_it_is(engine) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _waiting(engine) -> Iterator[None]:
    """Every copy is waited for, and work of other threads is done at once: nothing can be late."""
    from hf_zero.comm import Pending

    bus, copy = engine.bus, engine.bus._copy

    def copied(*arguments):
        _synchronize(bus)
        transfer = copy(*arguments)
        _synchronize(bus)
        return transfer

    def now(work: Callable[[], None], lane: str = "arrivals", **settings) -> Pending:
        with torch.no_grad():
            work()
        return Pending()

    bus._copy, bus.later = copied, now
    yield
    del bus._copy, bus.later


def _synchronize(bus) -> None:
    if bus.device.type == "cuda":
        torch.cuda.synchronize(bus.device)


@contextlib.contextmanager
def slowed(engine, delay: str, source: random.Random) -> Iterator[None]:
    """Something is late, at random: a third of the time."""
    bus, handles = engine.bus, []
    copy, do = bus._copy, bus._do
    is_slow = lambda: source.random() < 1 / 3  # noqa: E731

    def sleep(*_) -> None:
        if is_slow():
            torch.cuda._sleep(source.randrange(_SLEEP_CYCLES))

    def copied(way: str, target, origin):
        with bus.on_side_stream(way):
            sleep()
        return copy(way, target, origin)

    def done(work: Callable[[], None], *settings) -> None:
        if is_slow():
            time.sleep(source.random() * _SLEEP_SECONDS)
        do(work, *settings)

    if delay == "copy":
        bus._copy = copied
    elif delay == "host":
        bus._do = done
    elif delay == "compute":
        handles = [handle for module in _inner_modules(engine.model) for handle in _hooks(module, sleep)]
    try:
        yield
        bus.wait_for_jobs()
    finally:
        for handle in handles:
            handle.remove()
        for name in {"copy": ("_copy",), "host": ("_do",)}.get(delay, ()):
            delattr(bus, name)


def _inner_modules(model) -> list:
    return [module for name, module in model.named_modules() if name.endswith(("self_attn", "mlp"))]


def _hooks(module, sleep: Callable) -> Iterator:
    """Before its forward and, by the gradient of its output, before its backward."""

    def note(_, __, output):
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda grad: sleep())

    yield module.register_forward_pre_hook(lambda *_: sleep())
    yield module.register_forward_hook(note)


def print_exact(checks: dict) -> None:
    print(f"\n## Offload against none, to the bit; the device repeats itself: {checks['repeats']}\n")
    rows = {}
    for entry in checks["cases"]:
        key = (entry["case"], entry["dtype"], entry["optimizer"])
        row = rows.setdefault(key, {"runs": 0, "equal": 0, "loss": 0.0, "weight": 0.0})
        row["runs"] += 1
        row["equal"] += entry["equal"]
        row["loss"], row["weight"] = (max(row[name], entry[name]) for name in ("loss", "weight"))
    cells = [
        [*key, str(row["runs"]), str(row["equal"]), f"{row['loss']:.1e}", f"{row['weight']:.1e}"]
        for key, row in rows.items()
    ]
    print(markdown(["case", "dtype", "optimizer", "runs", "equal", "loss diff", "weight diff"], cells))
