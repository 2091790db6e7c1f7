"""Memory is that of the table: at rest to the byte, and at its peak within what can be named.

Bytes are counted by torch's own CPU allocator from before the model is built, so nothing that somebody holds is
overlooked. [Note: what is counted] At rest, for P parameters over N ranks in fp32, where the master is the compute
copy, and in bf16 with fp32 masters:

    stage   fp32: parameter + gradient + two moments    bf16: compute copy + gradient + (master + two moments)
    0       4P + 4P + 8P                                2P + gP + gmP  + 12P
    1       4P + 4P + 8P/N                              2P + gP + gmP/N + 12P/N
    2       4P + (4P + 8P)/N                            2P + (rP + 12P)/N
    3       (4P + 4P + 8P)/N                            (rP + 12P)/N

A gradient that is replicated until it is reduced (stages 0, 1) is collected in bf16, g = 2. Reduced gradients rest in
the dtype of their sum: r = 2 with reduce_dtype bf16, and then they lie in the collected ones' memory, gm = 0, which is
the table of README.md; with fp32, the default, r = gm = 4, and a stage costs 2P/N or 4P/N more than that table.

Constant buffers, which do not grow with the number of layers:

    stage 3         prefetch_units + 1 slots of the largest block, and one of the root's size, in the compute dtype
    stages 2, 3     in backward: two slots of the largest block and one of the root's size, to collect gradients
    always          the staging bucket of the exchange, and its scratch of SUM_NBYTES

Two ranks need no staging bucket unless an average lies in the memory of its own summand: what the other one sends
arrives where the average goes. Ranks of one host that share memory have none; they keep the slots of gradients; and
at stage 3 they need no slots for parameters in the dtype of their masters. Shared memory does not come from the
allocator: what is mapped, over the number of ranks, is this rank's part of it, since all ranks make the same and each
maps all.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.pairwise import SUM_NBYTES
from hf_zero.engine import ZeroEngine
from tests import models
from tests.distributed import ranks
from tests.tensor_meter import TensorMeter
from tests.tiers import more
from tests.training import Sharded, adamw


pytestmark = pytest.mark.direct


BUCKET_NBYTES = 2**16
# Buffers of the model, Adam's step counts, one NaN per parameter: less than a hundred numbers of 4 or 8 bytes.
SMALL_NBYTES = 4096
PAGE_NBYTES = 4096


def _model(layers: int = 6):
    torch.manual_seed(0)
    # matrices of 8,000 elements and more: the padding, 16 elements per parameter and rank, is below 1 %
    return models.llama(hidden=128, layers=layers, vocab=256).train()


def _sharded(stage: int, layers: int = 6, shared_memory: bool = False, **settings) -> Sharded:
    settings["shared_memory"] = shared_memory

    def optimizer(model):
        return adamw(model, fused=True)  # makes no tensors on its way, unlike the loop over parameters

    return Sharded(_model(layers), optimizer, stage, bucket_nbytes=BUCKET_NBYTES, **settings)


def _step(subject: Sharded, seed: int = 0, num_micro: int = 1) -> None:
    _backward(subject, seed, num_micro)
    subject.optimizer.step()
    subject.optimizer.zero_grad()


def _backward(subject: Sharded, seed: int = 0, num_micro: int = 1) -> None:
    for micro in range(num_micro):
        subject(**models.batch("llama", seed=100 * seed + 10 * micro + dist.get_rank())).loss.backward()
    subject.clip_grad_norm_(0.1)


@contextmanager
def _counting() -> Iterator[TensorMeter]:
    """A meter that counts from here on: what earlier tests left behind is freed before."""
    _collect()
    with TensorMeter() as meter:
        meter.mark("begin")
        yield meter


def _collect() -> None:
    while gc.collect():  # tensors that take part in cycles go in the round after the one that finds them
        pass
    if not gc.get_freeze_count():
        gc.freeze()  # the modules of transformers, which would be walked through every time


def _mark(meter: TensorMeter, name: str) -> None:
    _collect()
    meter.mark(name)


def _numels(engine: ZeroEngine) -> list[int]:
    """Parameters of each unit, padding not counted; the root first."""
    return [sum(span.numel for flat in unit.flats for span in flat.layout.spans) for unit in engine.units]


def _classes(stage: int, num_ranks: int, compute: torch.dtype | None, reduce: torch.dtype) -> dict[str, float]:
    """Bytes per parameter of each class of tensors, see the note above."""
    own = 1 / num_ranks
    replicated = {"compute": stage < 3, "grad": stage < 2, "state": stage < 1}
    share = {name: 1 if whole else own for name, whole in replicated.items()}
    if compute is None:
        return {"compute": 4 * share["compute"], "grad": 4 * share["grad"], "state": 8 * share["state"]}
    reduced = reduce.itemsize
    if stage < 2:
        collected = 2 + (0 if reduced == 2 else reduced * share["state"])
    else:
        collected = reduced * own
    if stage < 3:
        return {"compute": 2, "grad": collected, "state": 12 * share["state"]}
    # the compute copy does not rest: it is cast from the master, the stored parameter, when it is gathered
    return {"compute": 4 * own, "grad": collected, "state": 8 * own}


def _buffers(engine: ZeroEngine, stage: int) -> int:
    """Bytes of the constant buffers, see the note above."""
    root, *blocks = _numels(engine)
    size = engine.units[0].flats[0].dtype.itemsize
    nbytes = SUM_NBYTES + sum(tensor.nbytes for flat in engine.flats for tensor in flat.sampling)
    if engine.comm.shared_memory is not None:
        nbytes += _buffers_of_backward(engine) if stage > 1 else 0
    elif engine.comm.num_ranks > 2 or any(gradient.is_reduced_once for gradient in engine.gradients):
        nbytes += BUCKET_NBYTES
    if any(unit.slot is not None for unit in engine.units):
        nbytes += ((engine.config.prefetch_units + 1) * max(blocks) + root) * size
    return nbytes


def _buffers_of_backward(engine: ZeroEngine) -> int:
    """Bytes of the buffers in which stages 2 and 3 collect gradients, see the note above."""
    root, *blocks = _numels(engine)
    return (2 * max(blocks) + root) * engine.units[0].flats[0].dtype.itemsize


def _mapped_nbytes() -> int:
    """Bytes of shared memory that this process maps, its own and others'."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if "memfd:hf_zero" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize(
    "num_ranks, compute, reduce",
    [
        (2, None, torch.float32),
        *more((4, None, torch.float32)),
        (2, torch.bfloat16, torch.float32),
        (4, torch.bfloat16, torch.bfloat16),
    ],
    ids=["fp32-2", "fp32-4", "bf16-reduce-fp32-2", "bf16-reduce-bf16-4"],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared"])
@pytest.mark.full("more cases", after=16)
@ranks("num_ranks")
def test_resting_bytes_are_those_of_the_table(num_ranks, compute, reduce, stage, shared_memory):
    _collect()
    mapped = _mapped_nbytes()
    with _counting() as meter:
        subject = _sharded(stage, compute_dtype=compute, reduce_dtype=reduce, shared_memory=shared_memory)
        for step in range(2):
            _step(subject, step)
        _backward(subject)  # between backward and step everything of the table is there
        _mark(meter, "rest")
    num_params = sum(_numels(subject.engine))
    wanted = _classes(stage, dist.get_world_size(), compute, reduce)
    told = hf_zero.ShardedModel(subject.model).memory()
    classes = {"compute": told.parameter_nbytes, "grad": told.gradient_nbytes, "state": told.optimizer_nbytes}
    for kind, nbytes in classes.items():
        table = wanted[kind] * num_params
        assert table <= nbytes <= 1.01 * table + SMALL_NBYTES, f"{kind}: {nbytes} bytes, the table says {table:.0f}"
    table = sum(wanted.values()) * num_params
    # the averages that are the last to be reduced rest in slots for parameters until the step
    last = [gradient for unit in subject.engine.units[:2] for gradient in unit.gradients]
    lent = sum(g.reduced.nbytes for g in last) if any(u.slot is not None for u in subject.engine.units) else 0
    extra = _buffers(subject.engine, stage) - lent
    shared = (_mapped_nbytes() - mapped) // dist.get_world_size()
    assert (shared > 0) is shared_memory
    held = meter.span("begin", "rest").end_nbytes + shared
    pages = (
        PAGE_NBYTES * len(subject.engine.units) * 2 if shared_memory else 0
    )  # half of one is lost in each, and more
    assert table + extra <= held <= 1.01 * (table + extra) + SMALL_NBYTES + pages, (
        f"{held} bytes at rest, table {table:.0f} + buffers {extra}"
    )
    sum_told = sum(classes.values()) + told.buffer_nbytes
    assert abs(held - sum_told) <= SMALL_NBYTES + pages, f"{held} bytes at rest, {told}"
    assert told.host_nbytes == told.disk_nbytes == 0
    assert told.ddp_optimizer_nbytes == 2 * told.ddp_parameter_nbytes == 8 * num_params


def _activations_of_plain_torch(layers: int) -> int:
    """Most bytes that forward and backward hold beyond the parameters, each gradient dropped once complete."""
    model = _model(layers)

    def drop(param):
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    batch = models.batch("llama", seed=dist.get_rank())
    with _counting() as meter:
        model(**batch).loss.backward()
        _mark(meter, "end")
    return meter.span("begin", "end").peak_nbytes


def _peak_of_a_step(stage: int, layers: int) -> tuple[int, ZeroEngine]:
    with _counting() as meter:
        subject = _sharded(stage, layers)
        _step(subject)
        _mark(meter, "rest")
        _step(subject)
        _mark(meter, "end")
    return meter.span("rest", "end").peak_nbytes, subject.engine


@pytest.mark.quick
@pytest.mark.parametrize("num_ranks, layers", [(2, 6), (4, 6), (4, 12)])
@pytest.mark.full("more cases", after=1)
@ranks("num_ranks")
def test_peak_of_stage_3_is_shards_buffers_and_activations(num_ranks, layers):
    """[Note: the bound] Parameters, moments (12 bytes per parameter over N ranks) and constant buffers stay. Forward
    and backward add activations as plain torch does, the gradient that autograd just made included; backward gives
    them back block by block while the shards of the gradients (4 bytes) come block by block, and collects in its
    buffers. So the two come to the larger of both, and to one block more of the smaller, since a block's gradients are
    there before its activations are gone. The fused optimizer and the norm add numbers."""
    peak_of_stage_0, _ = _peak_of_a_step(0, layers)
    peak, engine = _peak_of_a_step(3, layers)
    shards = 12 * sum(_numels(engine)) / dist.get_world_size()
    buffers = _buffers(engine, 3) + _buffers_of_backward(engine)
    activations, gradients = _activations_of_plain_torch(layers), shards / 3
    moving = max(activations, gradients) + min(activations, gradients) / layers
    bound = 1.01 * (shards + buffers) + moving + SMALL_NBYTES
    terms = f"shards {shards:.0f} + buffers {buffers} + activations {activations} or gradients {gradients:.0f}"
    assert peak <= bound, f"peak {peak} bytes, bound {bound:.0f}: {terms}"
    assert bound < peak_of_stage_0, (
        f"the bound says nothing: stage 0 peaks at {peak_of_stage_0}, bound {bound:.0f}: {terms}"
    )


@pytest.mark.parametrize("shared_memory", [False, True], ids=["messages", "shared"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.full("more cases", after=2)
@ranks(2)
def test_nothing_grows_from_step_to_step(stage, shared_memory):
    mapped = []
    with _counting() as meter:
        subject = _sharded(stage, layers=3, shared_memory=shared_memory)
        for step in range(6):
            _step(subject, step, num_micro=1 + step % 2)  # accumulation in some of them
            with torch.no_grad():
                subject(**models.batch("llama", seed=step))
            gc.collect()  # what former tests of this process left in cycles is not this model's
            _mark(meter, f"step-{step}")
            mapped.append(_mapped_nbytes())
    assert len(set(mapped[1:])) == 1, f"shared bytes at rest after each step: {mapped}"
    held = [meter.span("begin", f"step-{step}").end_nbytes for step in range(6)]
    assert len(set(held[1:])) == 1, f"bytes at rest after each step: {held}"


@ranks(2)
def test_each_prefetched_unit_costs_one_slot():
    held, counts = [], [0, 1, 3]
    for count in counts:
        with _counting() as meter:
            subject = _sharded(3, prefetch_units=count)
            _step(subject)
            _mark(meter, "rest")
        held.append(meter.span("begin", "rest").end_nbytes)
        block = 4 * max(sum(flat.layout.full_numel for flat in unit.flats) for unit in subject.engine.blocks)
        del subject
    assert [(nbytes - held[0]) / block for nbytes in held] == pytest.approx(counts, abs=1e-3)


@pytest.mark.parametrize(
    "stage, shared_memory, num_made",
    [(0, True, 0), (1, True, 0), (2, True, 0), (3, True, 0)]
    + [(0, False, 0), (1, False, 0), (2, False, 3), (3, False, 1)],
)
@pytest.mark.full("more cases", after=2)
@ranks(2)
def test_what_is_made_anew_in_each_step_is_known(stage, shared_memory, num_made):
    """In the steady state nothing but the shards of the gradients, which take the place of activations, and where
    ranks send messages the three buffers in which backward collects; two of the shards rest in slots at stage 3."""
    with _counting() as meter:
        subject = _sharded(stage, shared_memory=shared_memory)
        for step in range(5):
            _mark(meter, f"begin-{step}")
            _step(subject, step)
            _mark(meter, f"end-{step}")
    shards = sorted(4 * gradient.flat.layout.shard_numel for gradient in subject.engine.gradients)
    # what is at least as large as one of them, in steps 3 to 5
    made = [meter.allocations(f"begin-{step}", f"end-{step}") for step in (2, 3, 4)]
    first, *others = [sorted(size for size in of_step if size >= shards[0]) for of_step in made]
    assert others == [first, first]
    wanted = shards if stage > 1 else []
    assert len(first) == len(wanted) + num_made, (first, shards)
    assert num_made or first == wanted
