"""Memory of the device and of the host: slots that stay, and pages that are locked as long as they are used."""

import gc
import random

import pytest
import torch

from hf_zero import ShardedModel
from hf_zero.comm import Bus, Counters
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import make_inner, tiny_llama, train_sharded
from tests.gpu.late import run_ranks_late, slowed, start
from tests.loopback import run_loopback


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("device", ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)], indirect=True)
def test_slots_stay_and_gradients_leave_no_memory_behind(device):
    def play(comm) -> list[set[int]]:
        engine = start(comm, tiny_llama().to(device), stage=3, compute_dtype=torch.bfloat16)
        sharded = ShardedOptimizer(engine, make_inner("adamw", engine.model.parameters()))
        places = []
        for step in (range(1), range(1, 4)):
            train_sharded(engine.model, sharded, comm.rank, device, step, clips=True)
            places.append({unit.slot.buffer.data_ptr() for unit in engine.units if unit.slot is not None})
            assert all(gradient.reduced is None for gradient in engine.gradients)
        return places

    for first, last in run_ranks_late(device, play):
        assert first == last


def test_memory_is_given_back_when_the_model_is_unsharded(device):
    model = tiny_llama().to(device)
    nbytes = sum(param.nbytes for param in model.parameters())
    taken = []

    def play(comm) -> None:
        for _ in range(3):
            engine = start(comm, model, stage=3, strict=True)
            sharded = ShardedOptimizer(engine, make_inner("adamw", model.parameters()))
            train_sharded(model, sharded, comm.rank, device, range(2), clips=True)
            ShardedModel(model).unshard()
            del engine, sharded
            model.zero_grad()
            gc.collect()
            taken.append(_nbytes_in_use(device))

    run_loopback(1, play, device)
    assert max(taken) - min(taken) < nbytes, taken


def _nbytes_in_use(device: torch.device) -> int:
    """The bytes of all tensors that are alive; of a CPU those that Python knows of."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def test_host_memory_is_locked_and_copies_are_ordered(device, delays):
    bus, length = Bus(device, Counters()), 2**18

    def round_trip(delay: str) -> None:
        engine = type("Engine", (), {"bus": bus, "model": torch.nn.Identity()})()
        host, back = (bus.empty(length, torch.float32) for _ in range(2))
        assert device.type != "cuda" or host.is_pinned()
        here, wanted = torch.zeros(length, device=device), torch.arange(float(length))
        host.copy_(wanted)
        with slowed(engine, delay, random.Random(delay)):
            for _ in range(10):
                up = bus.up(here, host)
                up.wait()
                here.add_(1.0)  # on the current stream, behind the copy
                down = bus.down(back, here)
                up.synchronize()
                host.zero_()  # it was read
                down.wait()
                here.zero_()  # it was read
                down.synchronize()
                assert torch.equal(back, wanted + 1), delay
                host.copy_(wanted)

    for delay in delays:
        round_trip(delay)
        gc.collect()
        assert bus.host_nbytes == 0  # its pages can be locked again
