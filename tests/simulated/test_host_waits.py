"""In a step the host waits for nothing that the device does; what it refuses, it refuses when it has learned of it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero
from hf_zero.errors import LifecycleError, NonFiniteError
from tests import models
from tests.distributed import run_ranks
from tests.simulated.accelerator import DEVICE, Accelerator, Event
from tests.simulated.training import BF16
from tests.tiers import in_core
from tests.training import Sharded, adamw, loss_of


def _fused(model) -> torch.optim.AdamW:
    return adamw(model, fused=True)


def _batch(seed: int, rank: int | None = None) -> dict:
    batch = models.batch("llama", seed=10 * seed + (dist.get_rank() if rank is None else rank))
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _backward(subject: Sharded, seed: int, scale: Callable = lambda loss: loss) -> None:
    for micro in range(2):
        scale(loss_of(subject(**_batch(2 * seed + micro)))).backward()


def _step(subject: Sharded, seed: int) -> None:
    _backward(subject, seed)
    subject.clip_grad_norm_(0.1)
    subject.optimizer.step()
    subject.optimizer.zero_grad()


def _own(accelerator: Accelerator) -> dict[str, int]:
    """The waits of the package. The copy of a batch is not its own, nor what a model looks at in its forward."""
    others = ("outside of the package", "ForwardGuard.__call__")
    return {place: count for place, count in accelerator.host_waits.items() if not place.endswith(others)}


def _on_shared_sequences() -> None:
    """The batches of a group are compared behind each forward: the device has its work when the host waits."""
    accelerator = Accelerator()
    with accelerator.installed():
        subject = Sharded(models.build("llama"), _fused, 3, sequence_parallel=2)
        for seed in range(2):
            loss = loss_of(subject(**_batch(seed, rank=0)))
            loss.backward()
            subject.clip_grad_norm_(0.1)
            subject.optimizer.step()
            subject.optimizer.zero_grad()
            accelerator.host_waits.clear() if seed == 0 else None
        waits = _own(accelerator)
        assert [(place.rpartition(" ")[2], count) for place, count in waits.items()] == [("Transfer.synchronize", 1)]


def test_on_shared_sequences_the_host_waits_for_nothing_but_what_tells_batches_apart():
    run_ranks(_on_shared_sequences, 2)


def _counted(stage: int, settings: dict) -> None:
    accelerator = Accelerator()
    with accelerator.installed():
        subject = Sharded(models.build("llama"), _fused, stage, **settings)
        for seed in range(2):  # the first step compares the order of the blocks
            accelerator.host_waits.clear()
            _step(subject, seed)
        assert not _own(accelerator), f"stage {stage}, {settings}: {_own(accelerator)}"
        scaler = hf_zero.ZeroGradScaler(device="cpu", init_scale=4.0)
        scaler.scale(torch.zeros((), device=DEVICE))  # makes its tensors
        _backward(subject, 2, scaler.scale)
        accelerator.host_waits.clear()
        scaler.unscale_(subject.optimizer)
        subject.clip_grad_norm_(0.1)
        assert not _own(accelerator), f"loss scale: {_own(accelerator)}"
        subject.optimizer.step()
        subject.weights()
    assert not accelerator.history.races, accelerator.history.races


CORE = [(1, BF16, 2), (3, BF16, 2)]
WAYS = [
    {"chunked_loss": "on"},
    {"tiled_mlp": 4},
    {"shard_size": 1},
    {"gather_dtype": torch.int8, "reduce_dtype": torch.int8},
    {"separate_reductions": True},
]
CASES = [*CORE, (0, None, 2), (2, None, 2), (0, None, 1), (1, BF16, 1), (2, None, 1), (3, BF16, 1)]


@pytest.mark.parametrize("stage, dtype, num_ranks", in_core(CORE, CASES))
def test_the_host_waits_for_nothing_in_a_step(stage, dtype, num_ranks):
    run_ranks(_counted, num_ranks, stage, {"compute_dtype": dtype})


@pytest.mark.full("more cases")
@pytest.mark.parametrize("settings", WAYS, ids=["-".join(settings) for settings in WAYS])
def test_nor_does_it_with(settings):
    run_ranks(_counted, 2, 3, {"compute_dtype": BF16, **settings})


def _learns_late(stage: int) -> None:
    """Rank 1 has a gradient that is not finite. Only rank 0 learns of it, and all raise."""
    with Accelerator().installed(), pytest.MonkeyPatch.context() as patch:
        subject = Sharded(models.build("llama"), _fused, stage)
        _step(subject, 0)
        for when, num_bad in (("at the next step", 1), ("when parameters are read", 2)):
            before = subject.weights()
            for _ in range(num_bad):
                _backward(subject, 1, lambda loss: loss * float("nan") if dist.get_rank() == 1 else loss)
                subject.optimizer.step()
            what = "after 1 optimizer steps: the gradient of rank 1, first in unit .*; no step was taken on it"
            with pytest.raises(NonFiniteError, match=what):
                if when == "at the next step":
                    patch.setattr(Event, "query", lambda event: dist.get_rank() == 0)
                    _step(subject, 2)
                else:
                    subject.weights()
            patch.setattr(Event, "query", lambda event: False)
            subject.optimizer.zero_grad()
            after = subject.weights()
            assert all(torch.equal(before[name], after[name]) for name in before), when
            assert subject.optimizer.num_steps == 1
        _step(subject, 3)
        assert subject.optimizer.num_steps == 2
        after = subject.weights()
        assert any(not torch.equal(before[name], after[name]) for name in before)


def _momentum_is_refused_at_once() -> None:
    """torch's fused SGD keeps momentum that it has not written, of a first step that it leaves out."""
    with Accelerator().installed():
        subject = Sharded(
            models.build("llama"),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
            1,
        )
        _backward(subject, 0, lambda loss: loss * float("nan"))
        with pytest.raises(NonFiniteError, match="after 0 optimizer steps"):
            subject.optimizer.step()


def _refuses(stage: int) -> None:
    with Accelerator().installed():
        subject = Sharded(models.build("llama"), _fused, stage)
        _backward(subject, 0)
        with pytest.raises(LifecycleError, match="call it on all ranks alike"):
            subject.clip_grad_norm_(0.1 * (1 + dist.get_rank()))
        subject.optimizer.zero_grad()
        if stage < 3:
            next(subject.model.parameters()).data.add_(dist.get_rank())
            _step(subject, 1)
            with pytest.raises(LifecycleError, match="its values on rank 1 are not those on rank 0"):
                subject.weights()


def _all_refused(stage: int) -> None:
    _learns_late(stage)
    _refuses(stage)
    _momentum_is_refused_at_once()


@pytest.mark.parametrize("stage", in_core([3], [3, 1]))
def test_what_the_device_finds_out_is_refused_on_all_ranks_when_one_has_learned_of_it(stage):
    run_ranks(_all_refused, 2, stage)
