"""The time line of a step on the simulated accelerator.

python -m tests.simulated.timeline [--stage 3]

What happened before what is known of every operation (`clocks`). With a model of what each costs, it follows when each
would begin and end: as soon as all that is ordered before it has ended. The host issues in no time. What a step takes
beyond what the default stream computes is exposed: it waits for collectives and copies.

Gathers and reductions share one communicator, as they do by default, and so follow one another.
"""

import argparse
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.comm.distributed import NativeComm
from hf_zero.engine import partition
from tests.distributed import run_ranks
from tests.simulated.accelerator import DEVICE, TIMEOUT_SECONDS, Accelerator
from tests.simulated.clocks import HOST_THREAD
from tests.training import Sharded, adamw, loss_of


COMPUTE = "default stream"
FREE = ("", 0.0)
# Large: each piece of a bucket takes the simulation long, and the model nothing.
BUCKET_NBYTES = 2**20
VOCABULARY, BATCH = 1024, (4, 64)
WAYS = {
    "stage 0": dict(stage=0),
    "stage 1": dict(stage=1),
    "stage 1, bf16": dict(stage=1, compute_dtype=torch.bfloat16),
    "stage 2": dict(stage=2),
    "stage 3": dict(stage=3),
    "stage 3, bf16": dict(stage=3, compute_dtype=torch.bfloat16),
    "stage 2, optimizer on the host": dict(stage=2, offload="optimizer"),
    "stage 3, optimizer on the host": dict(stage=3, offload="optimizer"),
}


@dataclass(frozen=True)
class Costs:
    """What operations take. The defaults give the small model below the proportions of a large one: gathering a block
    in fp32 takes two thirds of its forward, and operations other than matrix products take next to nothing.

    Args:
        flops (`float`): floating-point operations of matrix products, per second.
        memory (`float`): bytes of other operations, per second.
        link (`float`): bytes of collectives, per second.
        bus (`float`): bytes between device and host, per second.
    """

    flops: float = 3.4e11
    memory: float = 1e12
    link: float = 4e9
    bus: float = 4e9

    def seconds(self, operation: str, reads: list[Tensor], writes: list[Tensor]) -> float:
        """Returns how long an operation of the device takes."""
        if operation in ("all-gather", "reduce-scatter"):
            return max(sum(each.nbytes for each in tensors) for tensors in (reads, writes)) / self.link
        matrices = [each for each in reads if each.dim() > 1]
        if operation in ("mm", "addmm", "bmm") and len(matrices) > 1:
            return 2 * matrices[-2].numel() * matrices[-1].shape[-1] / self.flops
        return sum(each.nbytes for each in [*reads, *writes]) / self.memory


@dataclass(frozen=True)
class Operation:
    """One operation, with its times in seconds.

    Args:
        stream (`str`): that it was issued to.
        what (`str`): its name.
        unit (`str`): whose turn it was.
        start, stop (`float`): when it begins and ends.
    """

    stream: str
    what: str
    unit: str
    start: float
    stop: float


class Timed(Accelerator):
    """An accelerator that notes when each operation begins and ends, in the order in which they are issued."""

    def __init__(self, costs: Costs):
        super().__init__()
        self.costs = costs
        self.operations: list[Operation] = []
        self._ends: defaultdict[str, list[float]] = defaultdict(list)  # by actor, of its operations in their order
        self._next = threading.local()

    def _connect(self, device: torch.device, **_):
        return NativeComm(dist.group.WORLD, DEVICE, TIMEOUT_SECONDS, BUCKET_NBYTES)

    def note(self, operation: str, reads: list[Tensor], writes: list[Tensor], non_blocking: bool) -> None:
        on_host = [self.is_on_host(each) for each in [*reads, *writes]]
        seconds = self.costs.seconds(operation, reads, writes)
        if any(on_host) and not all(on_host):
            seconds = sum(each.nbytes for each in writes) / self.costs.bus
        self._next.cost = operation, seconds
        super().note(operation, reads, writes, non_blocking)

    def collective(self, communicator: str, what: str, do: Callable, reads: list[Tensor], writes: list[Tensor]):
        self._next.cost = what, self.costs.seconds(what, reads, writes)
        return super().collective("collectives", what, do, reads, writes)

    def issue(self, actor: str) -> None:
        super().issue(actor)
        (what, seconds), self._next.cost = getattr(self._next, "cost", FREE), FREE
        ends = self._ends
        before = [ends[other][tick - 1] for other, tick in self.history.clocks[actor].items() if other != actor]
        start = max([*before, *ends[actor][-1:]], default=0.0)
        is_host = actor.startswith(HOST_THREAD)
        stop = start if is_host else start + seconds
        ends[actor].append(stop)
        if not is_host:
            unit = getattr(self.history.turn, "unit", "")
            self.operations.append(Operation(actor, what, unit, start, stop))


@dataclass
class Step:
    """The operations of one step, in the order in which they were issued."""

    operations: list[Operation]

    @property
    def start(self) -> float:
        return min(each.start for each in self.operations)

    @property
    def seconds(self) -> float:
        return max(each.stop for each in self.operations) - self.start

    def busy(self, computes: bool) -> float:
        """Returns how long the default stream is busy, or any of the others."""
        total, last = 0.0, float("-inf")
        for each in sorted(self.operations, key=lambda each: each.start):
            if (each.stream == COMPUTE) is computes:
                total += max(0.0, each.stop - max(each.start, last))
                last = max(last, each.stop)
        return total

    @property
    def exposed(self) -> float:
        """How long the step takes beyond what is computed."""
        return self.seconds - self.busy(computes=True)


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def timed_step(settings: dict, costs: Costs) -> Step:
    """Returns the time line of the third step on this rank."""
    accelerator = Timed(costs)
    with accelerator.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "VOCABULARY_NUMEL", 0)  # as a large model's would be
        subject = Sharded(_model(), lambda model: adamw(model, fused=True), **settings)
        for _ in range(3):
            first = len(accelerator.operations)
            tokens = torch.randint(VOCABULARY, BATCH).to(DEVICE)
            loss = loss_of(subject(input_ids=tokens, labels=tokens))
            with subject.engine.reducing_this_backward(loss):  # as accelerate tells it
                loss.backward()
            subject.clip_grad_norm_(1.0)
            subject.optimizer.step()
            subject.optimizer.zero_grad()
        subject.engine.finish_updates()
    return Step(accelerator.operations[first:])


def timed(way: str, costs: Costs | None = None) -> Step:
    """Returns the time line of a step on the first of two ranks."""
    return run_ranks(timed_step, 2, WAYS[way], costs or Costs())[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.timeline")
    parser.add_argument("--stage", type=int, choices=range(4), help="only the ways of this stage")
    arguments = parser.parse_args()
    ways = [way for way, each in WAYS.items() if arguments.stage in (None, each["stage"])]
    steps = {way: timed(way) for way in ways}
    print("| ms of the model | step | computes | collectives and copies | exposed |\n|---|--:|--:|--:|--:|")
    for way, step in steps.items():
        numbers = (step.seconds, step.busy(computes=True), step.busy(computes=False), step.exposed)
        print(f"| {way} | " + " | ".join(f"{1e3 * number:.2f}" for number in numbers) + " |")


if __name__ == "__main__":
    main()
