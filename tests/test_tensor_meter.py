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
def test_held_bytes_and_peak_are_exact_when_tensors_are_freed_inside():
    with TensorMeter() as meter:
        first = mebibytes(3)
        meter.mark("begin")
        second = mebibytes(5)
        del second
        third = mebibytes(2)
        meter.mark("end")
        del first, third
    span = meter.span("begin", "end")
    assert span.start_nbytes == 3 * MIB
    assert span.peak_nbytes == 8 * MIB
    assert span.end_nbytes == 5 * MIB
    assert (span.num_allocations, span.allocated_nbytes, span.num_large_allocations) == (2, 7 * MIB, 2)


def test_resized_storages_count():
    with TensorMeter() as meter:
        tensor = mebibytes(4)
        meter.mark("begin")
        tensor.untyped_storage().resize_(0)
        meter.mark("empty")
        tensor.untyped_storage().resize_(6 * MIB)
        meter.mark("end")
        del tensor
    assert meter.span("begin", "empty").end_nbytes == 0
    assert meter.span("empty", "end").end_nbytes == 6 * MIB


def test_views_cost_nothing_and_temporaries_of_an_operation_count():
    with TensorMeter() as meter:
        tensor = torch.zeros(MIB, dtype=torch.float32)
        meter.mark("begin")
        view = tensor.view(1024, 1024).t()
        meter.mark("viewed")
        copied = view.contiguous() + 1  # the contiguous copy is freed again
        meter.mark("end")
        del copied, view
    assert meter.span("begin", "viewed").num_allocations == 0
    span = meter.span("viewed", "end")
    assert span.end_nbytes - span.start_nbytes == 4 * MIB
    # Two results of 4 MiB live at once; the scalar operand may take a few bytes more.
    assert 8 * MIB <= span.peak_nbytes - span.start_nbytes <= 8 * MIB + 64


def test_other_threads_count():
    held = []
    with TensorMeter() as meter:
        meter.mark("begin")
        thread = threading.Thread(target=lambda: held.append(mebibytes(7)))
        thread.start()
        thread.join()
        meter.mark("end")
        held.clear()
    assert meter.span("begin", "end").end_nbytes == 7 * MIB


def test_meter_can_be_used_again_and_leaves_stderr_alone(capfd):
    for _ in range(2):
        with TensorMeter() as meter:
            meter.mark("begin")
            tensor = mebibytes(1)
            os.write(2, b"a message\n")
            meter.mark("end")
        assert meter.span("begin", "end").peak_nbytes == MIB
        del tensor
    mebibytes(1)
    assert capfd.readouterr().err == "a message\n" * 2


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


def test_marks_that_are_not_there_are_refused():
    with TensorMeter() as meter:
        meter.mark("begin")
    with pytest.raises(ValueError, match="'begin' .. 'end'"):
        meter.span("begin", "end")
