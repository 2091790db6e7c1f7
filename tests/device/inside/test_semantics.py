"""The device itself: it computes as the CPU does, and reports what would go wrong on a GPU."""

import os
import signal

import pytest
import torch

from tests.device.backend import take_launches, take_reports


TOY = torch.device("toy", 0)


def _ramp() -> torch.Tensor:
    return torch.arange(8.0, device=TOY)


def test_it_computes_as_the_cpu_does():
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 3)
    given = torch.randn(2, 4)
    inner(given).sum().backward()
    outer = torch.nn.Linear(4, 3).to(TOY)
    outer.load_state_dict(inner.state_dict())
    outer(given.to(TOY)).sum().backward()
    assert torch.equal(outer.weight.grad.cpu(), inner.weight.grad)
    assert outer.weight.device == TOY


def test_two_streams_race_unless_one_waits_for_the_other():
    values, side = _ramp(), torch.Stream(TOY)
    with side:
        values.add_(1)
    reports = " ".join(take_reports())
    assert "race: write after write: add at tests/device/inside/test_semantics.py" in reports
    values = _ramp()
    side.wait_stream(torch.accelerator.current_stream(TOY))
    with side:
        values.add_(1)
    torch.accelerator.current_stream(TOY).wait_stream(side)
    assert values.sum().item() == 36


def test_streams_belong_to_one_device():
    values = _ramp()
    torch.accelerator.set_device_index(1)
    try:
        side = torch.Stream(TOY)
        side.wait_stream(torch.accelerator.current_stream())  # of the other device
        with side:
            values.add_(1)
        assert any("write after write" in report for report in take_reports())
    finally:
        torch.accelerator.set_device_index(0)


def test_memory_is_not_freed_while_another_stream_uses_it():
    def use(is_recorded: bool) -> None:
        values, side = _ramp(), torch.Stream(TOY)
        side.wait_stream(torch.accelerator.current_stream(TOY))
        with side:
            values.sum()
        if is_recorded:
            values.record_stream(side)
        del values
        torch.empty(8, device=TOY)

    use(is_recorded=True)
    assert not take_reports()
    use(is_recorded=False)
    (report,) = take_reports()
    assert "freed early" in report


def test_memory_that_nobody_has_written_is_nan():
    assert torch.empty(8, device=TOY).isnan().all()


def test_a_copy_to_the_host_arrives_when_the_host_has_waited():
    values, host = _ramp(), torch.zeros(8)
    host.copy_(values, non_blocking=True)
    event = torch.Event(TOY)
    event.record(torch.accelerator.current_stream(TOY))
    assert host.isnan().all()
    assert [event.query() for _ in range(3)] == [False, False, True]
    assert host.sum() == 28


def test_the_source_of_a_copy_to_the_device_stays_as_it_is_until_the_host_has_waited():
    host, values = torch.ones(8), torch.zeros(8, device=TOY)
    values.copy_(host, non_blocking=True)
    host.zero_()
    (report,) = take_reports()
    assert "the source of a copy to the device was written" in report


def test_kernels_are_counted():
    values = _ramp()
    take_launches()
    values.add_(1).mul_(2)
    assert take_launches() == {"add": 1, "mul": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_host_faults_where_it_follows_an_address_of_the_device():
    import ctypes

    address = _ramp().data_ptr()
    if not (child := os.fork()):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
