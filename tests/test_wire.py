"""Bytes on the wire are those of the table: counted where they are sent, and the counter checked against the kernel.

[Note: what a step sends] Where ranks send messages, each sends every other its part of each unit, so to gather or
reduce n elements (a multiple of the number of ranks N) costs n (N-1)/N elements. A step at stages 0, 1 and 2 reduces
and gathers everything once. At stage 3 it gathers every unit for forward, reduces every unit, and gathers for backward
what forward did not leave behind: the root stays in its own slot, and the last blocks stay in the slots, of which
there are prefetch_units + 1. The optimizer step empties them all, for the values have changed.
On top come the numbers that ranks agree by: one norm (8 bytes) and a byte per parameter, to every other rank.

Ranks of one host that share memory send nothing. What they copy from one another's memory is counted instead: the same
as above at stages 0 to 2; at stage 3 parameters in the dtype of their masters are used where they lie, others are cast
from all masters.
"""

import pytest
import torch

from hf_zero.engine import ZeroEngine
from tests import models
from tests.distributed import ranks
from tests.tiers import more
from tests.training import Sharded, adamw


pytestmark = pytest.mark.direct


LAYERS = 5


def _subject(stage: int, shared_memory: bool = False, **settings) -> Sharded:
    # large enough that the padding, less than 16 elements per parameter and rank, stays below 1 %
    torch.manual_seed(0)
    model = models.llama(hidden=48, layers=LAYERS).train()
    return Sharded(model, adamw, stage, shared_memory=shared_memory, **settings)


def _numels(engine: ZeroEngine) -> tuple[int, list[int]]:
    """Elements of the root and of the blocks, without padding."""
    numels = [sum(span.numel for flat in unit.flats for span in flat.layout.spans) for unit in engine.units]
    return numels[0], numels[1:]


def _padded(engine: ZeroEngine) -> tuple[int, list[int]]:
    numels = [sum(flat.layout.full_numel for flat in unit.flats) for unit in engine.units]
    return numels[0], numels[1:]


@pytest.mark.parametrize("kept, num_slots", [(1, 3), (9, LAYERS), ("auto", LAYERS)])
@ranks(2)
def test_blocks_that_stay_gathered_are_not_gathered_again(kept, num_slots):
    subject = _subject(3, keep_gathered=kept)
    engine = subject.engine
    exact = _elements(*_padded(engine), 3, engine.comm.num_ranks, num_slots - 1)
    for _ in range(3):
        before = engine.comm.counters.sent_nbytes.get("gather", 0)
        _step(subject)
        assert engine.comm.counters.sent_nbytes["gather"] - before == 4 * exact["gather"]


def _elements(root: int, blocks: list[int], stage: int, num_ranks: int, prefetch_units: int) -> dict[str, int]:
    """Elements that a rank sends in one step, by verb, see the note above."""
    everything = root + sum(blocks)
    gathered = everything
    if stage == 3:
        num_slots = min(prefetch_units + 1, len(blocks))
        gathered += sum(blocks[: len(blocks) - num_slots])
    return {"reduce": everything * (num_ranks - 1) // num_ranks, "gather": gathered * (num_ranks - 1) // num_ranks}


def _step(subject: Sharded) -> None:
    """One step, without reading the weights afterwards, which would gather them."""
    batch = models.batch("llama", seed=3)
    subject(**batch).loss.backward()
    subject.clip_grad_norm_(0.1)
    subject.optimizer.step()
    subject.optimizer.zero_grad()


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("num_ranks", [2, *more(4)])
@pytest.mark.parametrize(
    "stage, prefetch_units, dtype",
    [(0, 1, None), (1, 1, None), (2, 1, None), (3, 1, None), (3, 0, None), (3, 2, None), (3, 9, None)]
    + [(stage, 1, torch.bfloat16) for stage in range(4)],
)
@ranks("num_ranks")
def test_a_step_sends_what_the_table_says(num_ranks, stage, prefetch_units, dtype):
    settings = {"compute_dtype": dtype} if dtype else {}
    subject = _subject(stage, prefetch_units=prefetch_units, **settings)
    engine = subject.engine
    itemsize = dtype.itemsize if dtype else 4
    num_ranks = engine.comm.num_ranks
    table = _elements(*_numels(engine), stage, num_ranks, prefetch_units)
    exact = _elements(*_padded(engine), stage, num_ranks, prefetch_units)
    # the norm, to what it is clipped, and the numbers of backwards, run and dropped, 40 bytes; which parameters were
    # used, a byte each; where parameters rest whole, for each flat buffer the checksum of a sample and
    # the last one known, and a byte that says whether the rank can go on
    num_flats = sum(not flat.is_sharded for unit in engine.units for flat in unit.flats)
    scalar_nbytes = 40 + len(engine.param_infos()) + (8 * 2 * num_flats + 1 if num_flats else 0)
    for number in range(3):
        before, units_before = dict(engine.comm.counters.sent_nbytes), dict(engine.comm.counters.unit_nbytes)
        _step(subject)
        sent = {verb: nbytes - before.get(verb, 0) for verb, nbytes in engine.comm.counters.sent_nbytes.items()}
        by_unit = {name: n - units_before.get(name, 0) for name, n in engine.comm.counters.unit_nbytes.items()}
        assert set(by_unit) == {unit.name for unit in engine.units}
        assert sum(by_unit.values()) == sent["reduce"] + sent["gather"]
        # stage 0 gathers averaged gradients, which rest in the dtype of their sum; the others gather compute copies
        sizes = {"reduce": itemsize, "gather": 4 if stage == 0 else itemsize}
        for verb, size in sizes.items():
            assert sent[verb] == exact[verb] * size, (
                f"step {number}: {verb} sent {sent[verb]}, wanted {exact[verb] * size}"
            )
            assert sent[verb] <= table[verb] * size * 1.01, f"padding: {verb} {sent[verb]} for {table[verb] * size}"
        assert sent.get("scalar", 0) == scalar_nbytes * (num_ranks - 1), f"step {number}: {sent}"
        assert sent.get("broadcast", 0) == 0, "only building the engine broadcasts"


def _written_nbytes() -> int:
    """Bytes that this process has written so far, to anything."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar:"))


@pytest.mark.quick(cases=4)
@pytest.mark.parametrize("stage, shared_memory", [(3, False), (0, True), (1, True), (3, True), (1, False)])
@ranks(2)
def test_the_counter_agrees_with_the_kernel(stage, shared_memory):
    """Ranks that share memory send next to nothing: what they copy is counted."""
    torch.manual_seed(0)
    # 2 M parameters, so that gloo's headers, some 50 bytes a message, disappear
    subject = Sharded(models.llama(hidden=192, layers=4).train(), adamw, stage, shared_memory=shared_memory)
    _step(subject)
    engine = subject.engine
    engine.comm.barrier()
    counted, written = engine.comm.counters.total_sent_nbytes, _written_nbytes()
    for _ in range(2):
        _step(subject)
    counted, written = engine.comm.counters.total_sent_nbytes - counted, _written_nbytes() - written
    engine.comm.barrier()
    what = f"counted {counted}, the process wrote {written}"
    assert counted > 10**6, what
    assert written < 0.01 * counted if shared_memory else abs(written - counted) <= 0.01 * counted, what


@pytest.mark.parametrize("num_ranks", [2, *more(4)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks("num_ranks")
def test_ranks_that_share_memory_copy_what_the_note_says(num_ranks, stage, dtype):
    subject = _subject(stage, shared_memory=True, compute_dtype=dtype)
    engine, num_ranks, itemsize = subject.engine, subject.engine.comm.num_ranks, dtype.itemsize if dtype else 4
    exact = _elements(*_padded(engine), stage, num_ranks, 1)
    gathered = {0: 4, 1: itemsize, 2: itemsize, 3: 4 if dtype else 0}[stage]
    for number in range(3):
        before = dict(engine.comm.counters.sent_nbytes)
        _step(subject)
        copied = {verb: nbytes - before.get(verb, 0) for verb, nbytes in engine.comm.counters.sent_nbytes.items()}
        assert copied["reduce"] == exact["reduce"] * itemsize, f"step {number}: {copied}"
        assert copied.get("gather", 0) == exact["gather"] * gathered, f"step {number}: {copied}"
