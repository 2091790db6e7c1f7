"""In a step the host waits for nothing that the device does, and asks as much of it whatever the size of the blocks;
what it refuses, it refuses when it has learned of it."""

from collections import Counter
from collections.abc import Callable
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, TrainingArguments

import hf_zero
from hf_zero.engine import direct
from hf_zero.errors import LifecycleError, NonFiniteError, UnsupportedError
from tests import models
from tests.distributed import ranks, run_ranks
from tests.simulated import accelerator as simulation
from tests.simulated.accelerator import DEVICE, Accelerator, Event
from tests.simulated.training import BF16, batch_on_device, fused
from tests.tiers import in_core, more
from tests.trainer import harness
from tests.training import Sharded, loss_of


def _backward(subject: Sharded, seed: int, scale: Callable = lambda loss: loss) -> None:
    rank = 0 if subject.engine.config.sequence_parallel > 1 else dist.get_rank()
    for micro in range(2):
        scale(loss_of(subject(**batch_on_device("llama", 20 * seed + 10 * micro + rank)))).backward()


def _step(subject: Sharded, seed: int) -> None:
    _backward(subject, seed)
    subject.clip_grad_norm_(0.1)
    subject.optimizer.step()
    subject.optimizer.zero_grad()


def _own(accelerator: Accelerator) -> dict[str, int]:
    """The waits of the package. The copy of a batch is not its own, nor what a model looks at in its forward."""
    others = ("outside of the package", "ForwardGuard.__call__")
    return {place: count for place, count in accelerator.host_waits.items() if not place.endswith(others)}


HALF, BITS = {"compute_dtype": BF16}, {"gather_dtype": torch.int8, "reduce_dtype": torch.int8}
# Stage, number of ranks, whether activations are checkpointed, and settings.
CORE = [(1, 2, False, HALF), (3, 2, False, HALF), (3, 2, True, {**HALF, "offload_activations": True})]
CORE.append((3, 2, False, {"sequence_parallel": 2}))
MORE = [
    *[(stage, num_ranks, False, {}) for stage, num_ranks in ((0, 2), (2, 2), (0, 1), (2, 1))],
    *[(stage, 1, False, HALF) for stage in (1, 3)],
    *[(3, 2, False, {**HALF, **each}) for each in ({"chunked_loss": "on"}, {"tiled_mlp": 4}, {"shard_size": 1}, BITS)],
    (3, 2, False, {**HALF, "offload_activations": True}),
    *[(3, 2, True, {**HALF, **each}) for each in ({}, {"tiled_mlp": 4})],
]


@pytest.mark.parametrize("stage, num_ranks, checkpoints, settings", [*CORE, *more(*MORE)])
@ranks("num_ranks")
def test_the_host_waits_for_nothing_in_a_step(stage, num_ranks, checkpoints, settings):
    accelerator, model = Accelerator(), models.build("llama")
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with accelerator.installed():
        subject = Sharded(model, fused, stage, **settings)
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


class _Steps(TrainerCallback):
    """Notes the places where the host waits from the beginning of one step to that of the next."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self.waits: list[dict[str, int]] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.waits.append(dict(self._accelerator.host_waits))
        self._accelerator.host_waits.clear()


def _under_trainer(filters: bool) -> list[Counter]:
    """Returns how often the host waits in each step behind the first, which compares the order of the blocks, by the
    method of the package that is on the stack."""
    accelerator = Accelerator()
    with accelerator.installed(), pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(TrainingArguments, "device", property(lambda args: DEVICE if args._setup_devices else None))
        settings = dict(optim="adamw_torch_fused", logging_nan_inf_filter=filters, logging_steps=100, max_steps=4)
        settings |= dict(zero_chunked_loss="on", gradient_checkpointing=True, gradient_accumulation_steps=2)
        trainer = harness.make(3, folder, models.build("llama"), harness.Rows("llama", count=48), **settings)
        steps = _Steps(accelerator)
        trainer.add_callback(steps)
        trainer.train()
    assert not accelerator.history.races, accelerator.history.races
    of_model = "ForwardGuard.__call__"  # what a model looks at in its forward
    return [
        Counter({place.rpartition(" ")[2]: n for place, n in waits.items() if not place.endswith(of_model)})
        for waits in steps.waits[2:]
    ]


@pytest.mark.parametrize("filters", [False, *more(True)])
def test_under_zero_trainer_the_host_waits_for_what_trainer_does_alone(filters):
    """Trainer copies the three tensors of each batch. By default it looks for a NaN in each loss, and for an infinity:
    `logging_nan_inf_filter`."""
    wanted = Counter({"ZeroTrainerMixin.get_batch_samples": 2 * 3})
    if filters:
        wanted["ZeroTrainerMixin._run_epoch"] = 2 * 2
    for waits in run_ranks(_under_trainer, 2, filters):
        assert waits == [wanted] * len(waits) and waits


def _learns_late(stage: int) -> None:
    """Rank 1 has a gradient that is not finite. Only rank 0 learns of it, and all raise."""
    with Accelerator().installed(), pytest.MonkeyPatch.context() as patch:
        subject = Sharded(models.build("llama"), fused, stage)
        _step(subject, 0)
        for when, num_bad in (("at the next step", 1), ("when parameters are read", 2)):
            before = subject.weights()
            for _ in range(num_bad):
                _backward(subject, 1, lambda loss: loss * float("nan") if dist.get_rank() == 1 else loss)
                subject.optimizer.step()
            what = "after 1 optimizer steps: the gradient is not finite, first in unit .*; no step was taken on it"
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
        subject = Sharded(models.build("llama"), fused, stage)
        _backward(subject, 0)
        with pytest.raises(LifecycleError, match="use the same arguments on all ranks"):
            subject.clip_grad_norm_(0.1 * (1 + dist.get_rank()))
        subject.optimizer.zero_grad()
        if stage < 3:
            next(subject.model.parameters()).data.add_(dist.get_rank())
            _step(subject, 1)
            with pytest.raises(LifecycleError, match="its values on rank 1 are not those on rank 0"):
                subject.weights()


def _other_stream_is_refused(stage: int) -> None:
    """Autograd's nodes that accumulate keep the stream on which they were made, and others take that of their forward:
    here both are the thread's own, which does for what is refused."""
    accelerator = Accelerator()
    with accelerator.installed():
        subject = Sharded(models.build("llama"), fused, stage)
        with accelerator.on_stream(accelerator.module.Stream()):
            with pytest.raises(UnsupportedError, match="another stream of the device than the one on which the model"):
                _backward(subject, 0)
        subject.optimizer.zero_grad()
        _step(subject, 0)


@pytest.mark.parametrize("stage", in_core([3], [3, 1]))
@ranks(2)
def test_what_the_device_finds_out_is_refused_on_all_ranks_when_one_has_learned_of_it(stage):
    _learns_late(stage)
    _refuses(stage)
    _other_stream_is_refused(stage)
    _momentum_is_refused_at_once()


# How many operators a step issues to a device depends on the blocks and not on their size.


NARROW, WIDE = 64, 384  # some flat buffers of the wide model have more than 2 MiB


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def _operators(hidden: int, stage: int, dtype: torch.dtype | None) -> Counter[str]:
    torch.manual_seed(0)
    with Accelerator().installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "MIN_NUMEL", 0)  # smaller weights take another way
        patch.setattr(simulation, "BUCKET_NBYTES", 2**26)  # as on a device: a block is reduced in one piece
        subject = Sharded(models.llama(hidden=hidden, layers=2).train(), fused, stage, compute_dtype=dtype)
        for seed in range(2):  # the first step makes what lives on, and compares the order of the blocks
            with Count() as count:
                _step(subject, seed)
        return count.operators


WIDTHS = [(2, BF16, 2), (3, BF16, 2)]
CASES = [(stage, dtype, num_ranks) for stage in range(4) for dtype in (BF16, None) for num_ranks in (1, 2)]


@pytest.mark.parametrize("stage, dtype, num_ranks", in_core(WIDTHS, CASES))
@ranks("num_ranks")
def test_the_number_of_operators_does_not_depend_on_the_width(stage, dtype, num_ranks):
    narrow, wide = (_operators(hidden, stage, dtype) for hidden in (NARROW, WIDE))
    assert narrow == wide, f"narrow {narrow - wide}, wide {wide - narrow}"


@pytest.mark.parametrize("num_ranks", in_core([2], [1, 2]))
@ranks("num_ranks")
def test_a_tensor_that_is_written_counts_or_is_refused(num_ranks):
    for stage in (0, 1, 2):
        with Accelerator().installed():
            subject = Sharded(models.build("llama"), fused, stage, compute_dtype=BF16)
            name, param = list(subject.model.named_parameters())[-1]
            _step(subject, 0)
            for group in subject.optimizer.param_groups:
                group["lr"] = 0.0
            with torch.no_grad():
                param.fill_(0.25)
            _step(subject, 1)
            assert (subject.weights()[name] == 0.25).all(), f"stage {stage}"
            param.data.fill_(0.5)  # which the device alone can see
            with pytest.raises(
                LifecycleError, match="rank 0 wrote to its memory without the optimizer, through p.data"
            ):
                _step(subject, 2)  # or later: when the device has told it
                subject.weights()
            assert all((shard.tensor == 0.25).all() for shard in subject.engine.named_shards() if shard.name == name)
            assert (subject.weights()[name] == 0.25).all(), f"stage {stage}"
            dist.barrier()
