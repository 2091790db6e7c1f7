"""How many operators a step issues to a device depends on the blocks and not on their size."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.engine import direct
from hf_zero.errors import LifecycleError
from tests import models
from tests.distributed import ranks
from tests.simulated import accelerator
from tests.simulated.accelerator import DEVICE, Accelerator
from tests.simulated.training import BF16
from tests.tiers import in_core
from tests.training import Sharded, adamw, loss_of


NARROW, WIDE = 64, 384  # some flat buffers of the wide model have more than 2 MiB


class Count(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def _fused(model) -> torch.optim.AdamW:
    return adamw(model, fused=True)


def _step(subject: Sharded, seed: int) -> None:
    batch = {name: value.to(DEVICE) for name, value in models.batch("llama", seed=seed).items()}
    loss_of(subject(**batch)).backward()
    subject.clip_grad_norm_(0.1)
    subject.optimizer.step()
    subject.optimizer.zero_grad()


def _operators(hidden: int, stage: int, dtype: torch.dtype | None) -> Counter[str]:
    torch.manual_seed(0)
    with Accelerator().installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "MIN_NUMEL", 0)  # smaller weights take another way
        patch.setattr(accelerator, "BUCKET_NBYTES", 2**26)  # as on a device: a block is reduced in one piece
        subject = Sharded(models.llama(hidden=hidden, layers=2).train(), _fused, stage, compute_dtype=dtype)
        for seed in range(2):  # the first step makes what lives on, and compares the order of the blocks
            with Count() as count:
                _step(subject, seed)
        return count.operators


CORE = [(2, BF16, 2), (3, BF16, 2)]
CASES = [(stage, dtype, num_ranks) for stage in range(4) for dtype in (BF16, None) for num_ranks in (1, 2)]


@pytest.mark.parametrize("stage, dtype, num_ranks", in_core(CORE, CASES))
@ranks("num_ranks")
def test_the_number_of_operators_does_not_depend_on_the_width(stage, dtype, num_ranks):
    narrow, wide = (_operators(hidden, stage, dtype) for hidden in (NARROW, WIDE))
    assert narrow == wide, f"narrow {narrow - wide}, wide {wide - narrow}"


@pytest.mark.parametrize("num_ranks", in_core([2], [1, 2]))
@ranks("num_ranks")
def test_a_tensor_that_is_written_counts_or_is_refused(num_ranks):
    for stage in (0, 1, 2):
        with Accelerator().installed():
            subject = Sharded(models.build("llama"), _fused, stage, compute_dtype=BF16)
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
