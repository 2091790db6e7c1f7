"""Streams, events and waits are those of the model's device, whichever device the thread has.

A thread starts with device 0, and so does one that a user trains in. `_no_reports` looks for races.
"""

import contextlib
import copy
import threading
from collections.abc import Callable

import pytest
import torch

import hf_zero
from hf_zero.activation import offload
from hf_zero.comm.streams import Streams
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.check import Trained, make_inner, random_batch, tiny_llama, train_sharded
from tests.device.backend import take_reports
from tests.gpu.late import assert_same, run_ranks_late, start


ALONE = {
    "stage 3": dict(stage=3),
    "optimizer": dict(stage=2, offload="optimizer"),
    "parameters": dict(stage=3, offload="params"),
    "activations": dict(stage=3, offload_activations=True),
}


@pytest.fixture(autouse=True)
def _all_activations_go(monkeypatch):
    monkeypatch.setattr(offload, "MIN_NBYTES", 1)


def _prepare(device: torch.device, settings: dict) -> Callable[[], Trained]:
    model = tiny_llama().to(device)
    hf_zero.shard(model, strict=True, **settings)
    optimizer = ShardedOptimizer(model, make_inner("sgd", model.parameters()))
    return lambda: train_sharded(model, optimizer, 0, device, range(2), clips=False)


def _in_thread(act: Callable[[], Trained]) -> Trained:
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(params=ALONE)
def settings(request) -> dict:
    return ALONE[request.param]


@pytest.fixture
def wanted(settings) -> list[Trained]:
    return [_prepare(torch.device("toy", 0), settings)()]


def test_a_thread_of_the_user_trains(settings, wanted):
    train = _prepare(torch.device("toy", 1), settings)
    assert_same([_in_thread(train)], wanted, "in a thread")


def test_models_on_two_devices_train(settings, wanted):
    first, second = (_prepare(torch.device("toy", index), settings) for index in range(2))
    assert_same([first()], wanted, "device 0, while device 1 is the current one")
    assert_same([second()], wanted, "device 1")


def test_the_current_device_is_another_since(settings, wanted):
    train = _prepare(torch.device("toy", 1), settings)
    torch.accelerator.set_device_index(0)
    assert_same([train()], wanted, "after set_device")


@pytest.mark.parametrize("method", ["wait", "behind"])
def test_a_wait_that_is_left_out_is_reported(method, monkeypatch):
    left_out = {"wait": lambda streams, event: None, "behind": Streams.on}
    monkeypatch.setattr(Streams, method, left_out[method])
    _prepare(torch.device("toy", 0), ALONE["parameters"])()
    assert take_reports()


def test_an_update_on_the_host_waits_for_what_reads_the_copies_on_the_users_stream():
    """An evaluation between backward and step reads the copies that the step overwrites."""

    def train(stream: torch.Stream | None) -> torch.Tensor:
        with contextlib.nullcontext() if stream is None else streams.behind(stream):
            model = tiny_llama().to(device)
            hf_zero.shard(model, strict=True, stage=3, offload="optimizer", compute_dtype=torch.bfloat16)
            optimizer = ShardedOptimizer(model, make_inner("sgd", model.parameters()))
            batch = random_batch(0, 0, device)
            model(**batch).loss.backward()
            with torch.no_grad():
                evaluated = model(**batch).loss
            optimizer.step()
            return torch.stack([evaluated, model(**batch).loss.detach()]).cpu()

    device = torch.device("toy", 0)
    streams = Streams(device)
    assert torch.equal(train(streams.new()), train(None))


@pytest.mark.parametrize("settings", [dict(stage=2), dict(stage=2, shard_size=1), dict(stage=3)], ids=str)
def test_ranks_reduce_while_the_current_device_is_another(settings):
    """Through the reductions of `NativeComm` and `Average`."""

    device, model = torch.device("toy", 1), tiny_llama()

    def train(current: int) -> list[Trained]:
        def play(comm) -> Trained:
            engine = start(comm, copy.deepcopy(model).to(device), compute_dtype=torch.bfloat16, **settings)
            optimizer = ShardedOptimizer(engine, make_inner("adamw", engine.model.parameters()))
            torch.accelerator.set_device_index(current)
            return train_sharded(engine.model, optimizer, comm.rank, device, range(2), clips=True)

        return run_ranks_late(device, play)

    assert_same(train(0), train(1), "after set_device")
