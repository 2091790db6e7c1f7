"""Trainings in which something is late: what is computed, what is copied, or the threads of the host."""

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.engine import ZeroEngine
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import Trained, make_inner, random_batch, tiny_llama, train_sharded
from tests.compare import assert_equal
from tests.loopback import LoopbackComm, run_loopback, shard_on_loopback


# Of losses and norms where values are rounded to 8 bits: a rounding is 2^-8 of the largest of 256 values, and sums of
# many such errors, of either sign, are smaller.
BITS_ROUNDING = 1e-2
# One rounding to bf16 is 2^-8 of a value. Kernels that sum in another order round differently.
BF16_ROUNDING = 2e-2
NUM_RANKS = 2
BUCKET_NBYTES = 4096  # small, so that buckets are filled again and again
SLEEP_CYCLES = 1_000_000  # about half a millisecond
LONGEST_SLEEP_CYCLES = 3_000_000  # about 2 ms
LONGEST_SLEEP_SECONDS = 0.003


def run_ranks_late(device: torch.device, act: Callable[[LoopbackComm], object], num_ranks: int = NUM_RANKS) -> list:
    """Calls a function for each rank of a loop-back, whose collectives are late."""
    if device.type == "cuda":
        delay = partial(torch.cuda._sleep, SLEEP_CYCLES)
    else:
        delay = partial(time.sleep, 0.0005)
    return run_loopback(num_ranks, act, device, bucket_nbytes=BUCKET_NBYTES, delay=delay)


def start(comm: LoopbackComm, model: nn.Module, **settings) -> ZeroEngine:
    """The engine of a model on this rank; the model is on the device."""
    return shard_on_loopback(comm, model, ZeroConfig(**settings))


def train_late(
    device: torch.device,
    delay: str = "none",
    *,
    optimizer: str = "adamw",
    num_ranks: int = NUM_RANKS,
    checkpoints: bool = False,
    num_micro: int = 1,
    in_backward: bool = False,
    **settings,
) -> list[Trained]:
    """What each rank of a loop-back trains while `delay` is late. The ranks of a sequence group have one batch.

    Args:
        num_micro (`int`): micro-batches of a step.
        in_backward (`bool`): whether units are updated in backward, where nothing is clipped.
    """
    model = tiny_llama()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def play(comm: LoopbackComm) -> Trained:
        engine = start(comm, copy.deepcopy(model).to(device), **settings)
        sharded = ShardedOptimizer(engine, make_inner(optimizer, engine.model.parameters()))
        batch_of, clips = comm.rank // settings.get("sequence_parallel", 1), optimizer == "adamw" and not in_backward
        losses = []
        with slowed(engine, delay, random.Random(f"{delay} {comm.rank}")):
            if num_micro == 1 and not in_backward:
                return train_sharded(engine.model, sharded, batch_of, device, range(3), clips=clips)
            for step in range(3):
                for micro in range(num_micro):
                    updates = in_backward and micro == num_micro - 1
                    with sharded.in_backward() if updates else contextlib.nullcontext():
                        loss = engine.model(**random_batch(batch_of, num_micro * step + micro, device)).loss
                        (loss / num_micro).backward()
                    losses.append(loss.detach())
                if clips:
                    sharded.clip_grad_norm_(0.1)
                sharded.step()
                sharded.zero_grad()
            trained = train_sharded(engine.model, sharded, batch_of, device, range(0), clips=False)
        return Trained(torch.stack(losses).float().cpu(), torch.zeros(0), trained.weights)

    return run_ranks_late(device, play, num_ranks)


def assert_same(trained: list[Trained], wanted: list[Trained], what: str) -> None:
    """Bit for bit, on each rank."""
    for rank, (one, other) in enumerate(zip(trained, wanted, strict=True)):
        assert_equal(one, other, f"{what}, rank {rank}")


@contextlib.contextmanager
def slowed(engine: ZeroEngine, delay: str, source: random.Random) -> Iterator[None]:
    """Delays one kind of work at random, a third of the time.

    Args:
        delay: "compute" (the stream that computes), "copy" (the streams that copy), "host" (the threads of the host),
            or "none".
    """
    bus, handles = engine.bus, []
    copy, do = bus._copy, bus._do
    is_slow = lambda: source.random() < 1 / 3  # noqa: E731

    def sleep(*_) -> None:
        if is_slow():
            torch.cuda._sleep(source.randrange(LONGEST_SLEEP_CYCLES))

    def copied(way: str, target, origin):
        with bus.on_side_stream(way):
            sleep()
        return copy(way, target, origin)

    def done(work: Callable[[], None], *settings) -> None:
        if is_slow():
            time.sleep(source.random() * LONGEST_SLEEP_SECONDS)
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
