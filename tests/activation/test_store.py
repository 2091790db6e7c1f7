"""The store of checkpointed inputs by itself: what comes back, when, and what is held meanwhile."""

import gc
import weakref

import pytest
import torch

from hf_zero.activation.store import Store
from hf_zero.comm import Bus, Counters


pytestmark = pytest.mark.quick


NBYTES = 4 * 30


def _store(chunk_nbytes: int = 4096) -> tuple[Store, Counters]:
    counters = Counters()
    return Store(Bus(torch.device("cpu"), counters), None, chunk_nbytes), counters


def _forward(store: Store, count: int, seed: int = 0) -> tuple[list, list]:
    torch.manual_seed(seed)
    tensors, tickets = [torch.randn(5, 6) for _ in range(count)], []
    for tensor in tensors:
        store.begin_call()
        tickets.append(store.save(tensor))
    return [tensor.clone() for tensor in tensors], tickets


def _backward(store: Store, tensors: list, tickets: list) -> None:
    while tickets:
        assert torch.equal(store.take(tickets[-1]).view(5, 6), tensors.pop())
        tickets.pop()


def test_from_the_second_pass_on_the_last_stays_and_one_more_is_brought_ahead():
    store, counters = _store()
    _backward(store, *_forward(store, 4))
    assert counters.sent_nbytes == {"down": 4 * NBYTES, "up": 4 * NBYTES}
    tensors, tickets = _forward(store, 4, seed=1)
    assert (store.device_nbytes, store.arena.used_nbytes) == (NBYTES, 3 * 128), "at multiples of 64"
    assert counters.sent_nbytes["down"] == 7 * NBYTES
    store.take(tickets[3])
    assert store.device_nbytes == 2 * NBYTES, "the last, and the one before it on its way"
    _backward(store, tensors, tickets)
    assert (store.device_nbytes, store.arena.used_nbytes, store.arena.capacity_nbytes) == (0, 0, 4096)


def test_a_forward_after_another_sends_its_own_last_only():
    store, counters = _store()
    for seed in range(2):
        counters.sent_nbytes.clear()
        first, second = _forward(store, 3, seed), _forward(store, 3, seed + 10)
        _backward(store, *second)
        _backward(store, *first)
    assert counters.sent_nbytes["down"] == 5 * NBYTES, "the first forward's last block is far from its backward"


def test_a_call_of_several_tensors_is_brought_as_one():
    store, counters = _store()
    calls = []
    for _ in range(3):
        store.begin_call()
        calls.append([store.save(torch.randn(5, 6)) for _ in range(2)])
    store.take(calls[1][0])
    assert counters.sent_nbytes["up"] == 4 * NBYTES, "its own two, and those of the call before"
    store.take(calls[1][1])
    store.take(calls[0][0])
    assert counters.sent_nbytes["up"] == 4 * NBYTES


def test_what_is_taken_twice_comes_twice_and_what_nobody_takes_is_given_up():
    store, _ = _store()
    tensors, tickets = _forward(store, 3)
    for _ in range(2):
        assert torch.equal(store.take(tickets[1]).view(5, 6), tensors[1])
    del tickets  # a forward that failed
    assert (store.device_nbytes, store.arena.used_nbytes) == (0, 0)


def test_the_values_are_those_at_the_time_they_were_saved():
    store, _ = _store()
    tensor = torch.ones(5, 6)
    store.begin_call()
    ticket = store.save(tensor)
    tensor.zero_()
    assert bool((store.take(ticket) == 1).all())


def test_what_several_blocks_are_given_is_sent_once_at_most():
    store, counters = _store()
    for step in range(2):
        counters.sent_nbytes.clear()
        shared, tickets = torch.randn(5, 6), []
        for _ in range(3):
            store.begin_call()
            tickets += [store.save(torch.randn(5, 6)), store.save(shared)]
        # in the first pass nobody knows that the tensor comes again
        assert counters.sent_nbytes["down"] == (4 if step == 0 else 2) * NBYTES
        assert all(torch.equal(store.take(ticket).view(5, 6), shared) for ticket in tickets[1::2])
        del tickets, shared
    sent = []
    for _ in range(2):
        counters.sent_nbytes.clear()
        _forward(store, 6)
        sent.append(counters.sent_nbytes["down"])
    assert sent == [2 * NBYTES, 5 * NBYTES], "another kind of forward is found out once it is over"


def test_memory_that_is_not_one_stretch_stays_and_a_transposed_one_comes_back_as_it_lay():
    store, counters = _store()
    store.begin_call()
    whole = torch.randn(5, 8)
    sliced, turned = whole[:, :6], torch.randn(6, 5).t()
    tickets = [store.save(sliced), store.save(turned)]
    assert counters.sent_nbytes["down"] == NBYTES
    assert torch.equal(store.take(tickets[0]), sliced)
    assert torch.equal(store.take(tickets[1]).as_strided(turned.shape, turned.stride()), turned)


class Flight:
    """A copy under way: memory that it reads may be given up once it has been waited for."""

    def __init__(self, is_done: bool):
        self.events = []
        self.is_done = lambda: is_done  # as far as the host knows

    def wait(self) -> None:
        self.events.append("wait")


class SlowBus(Bus):
    """Its copies to the host are under way until they are waited for."""

    def __init__(self, is_done: bool):
        super().__init__(torch.device("cpu"), Counters())
        self.flights, self._is_done = [], is_done

    def down(self, out, values):
        super().down(out, values)
        flight = Flight(self._is_done)
        weakref.finalize(values, flight.events.append, "freed")
        self.flights.append(flight)
        return flight


@pytest.mark.parametrize("is_given_up", [False, True])
def test_memory_that_a_copy_reads_is_given_up_after_the_copy(is_given_up):
    bus = SlowBus(is_done=not is_given_up)
    store = Store(bus, None, 4096)
    tickets = _forward(store, 4)[1]
    assert len(bus.flights) >= 3
    if is_given_up:
        del tickets  # a forward that failed
        gc.collect()
    assert [flight.events for flight in bus.flights] == [["wait", "freed"]] * len(bus.flights)
