"""The tensor meter against allocations whose sizes are known."""

import gc
import os
import threading

import pytest
import torch

from tests.tensor_meter import TensorMeter


MIB = 2**20


def mebibytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def no_garbage():
    # A tensor of another test, freed while the meter runs, would count as a release.
    gc.collect()


@pytest.mark.quick
def test_held_bytes_and_peak_are_exact_whoever_allocates_and_however():
    held = []
    with TensorMeter() as meter:
        held.append(mebibytes(3))
        meter.mark("begin")
        second = mebibytes(5)
        del second
        thread = threading.Thread(target=lambda: held.append(mebibytes(2)))
        thread.start()
        thread.join()
        held.append(held[0].view(1024, -1).t())  # costs nothing
        meter.mark("end")
        held[0].untyped_storage().resize_(0)
        meter.mark("empty")
        os.write(2, b"a message\n")  # of somebody else, to where torch reports
        held[0].untyped_storage().resize_(6 * MIB)
        meter.mark("resized")
        held.clear()
    span = meter.span("begin", "end")
    assert (span.start_nbytes, span.peak_nbytes, span.end_nbytes) == (3 * MIB, 8 * MIB, 5 * MIB)
    assert (span.num_allocations, span.allocated_nbytes, span.num_large_allocations) == (2, 7 * MIB, 2)
    assert meter.span("end", "empty").end_nbytes == 2 * MIB and meter.span("empty", "resized").end_nbytes == 8 * MIB
    with pytest.raises(ValueError, match="'begin' .. 'over'"):
        meter.span("begin", "over")


def test_meter_agrees_with_the_profiler_on_a_training_step():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    batch = torch.randn(32, 64)
    model(batch).sum().backward()  # gradients exist from here on, so that nothing is freed that was not counted

    def step() -> None:
        model(batch).square().mean().backward()

    with TensorMeter() as meter:
        meter.mark("begin")
        step()
        meter.mark("end")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [sum(changes[: index + 1]) for index in range(len(changes))]
    span = meter.span("begin", "end")
    assert span.peak_nbytes - span.start_nbytes == max(held)
    assert span.num_allocations == sum(change > 0 for change in changes)
