"""Predictions against what others have published: model states, peaks of memory, and throughput.

Nothing of ours is fitted here but the utilization of matrix products, on other rows than those that are compared.
"""

import statistics

import pytest
import torch
from torch import nn

from hf_zero.config import MemoryTier
from hf_zero.planner import TensorClass, device_named
from tests.planner.published import FITTED, TITAN_A100, TITAN_H100, Row, predicted, tokens_per_second, utilization_of
from tests.planner.subjects import predict


# Table 1 of ZeRO (arXiv 1910.02054): GB of model states per device with Adam in mixed precision. By billions of
# parameters, then by the number of devices, for Pos, Pos+g and Pos+g+p, which are stages 1 to 3.
ZERO_TABLE = {
    7.5: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


class _Stack(nn.Module):
    def __init__(self, num_parameters: int, num_blocks: int = 4):
        super().__init__()
        side = round((num_parameters / num_blocks) ** 0.5)
        rows = num_parameters // num_blocks // side
        self.blocks = nn.ModuleList(nn.Linear(side, rows, bias=False) for _ in range(num_blocks))


def _states(classes: list[TensorClass], tier: MemoryTier = MemoryTier.DEVICE) -> int:
    return sum(each.nbytes for each in classes if each.tier is tier and not each.name.endswith("buffers"))


@pytest.mark.full("slow")
@pytest.mark.parametrize("billions", ZERO_TABLE)
def test_model_states_are_those_of_the_zero_paper(billions):
    num_parameters = round(billions * 1e9)
    with torch.device("meta"):
        model = _Stack(num_parameters)
    for num_ranks, published in ZERO_TABLE[billions].items():
        for stage, gigabytes in enumerate(published, start=1):
            told = predict(
                model, num_ranks=num_ranks, stage=stage, compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            )
            # at stage 3 no bf16 copy rests beside the masters here, which is 2 of the paper's 16 bytes
            copy = 2 * num_parameters / num_ranks if stage == 3 and num_ranks > 1 else 0
            # 1 %, and half of the last digit that the paper prints
            digit = 10.0 ** -len(str(gigabytes).partition(".")[2])
            near = pytest.approx(gigabytes, rel=0.01, abs=0.51 * digit)
            assert (_states(told.classes) + copy) / 1e9 == near, (num_ranks, stage)


def _near(row: Row) -> None:
    told = predicted(row)
    assert tokens_per_second(row, told) == pytest.approx(row.tokens, rel=0.2)
    if row.peak_gib is not None:
        # FSDP2 keeps what its allocator has reserved, and gathers more than one block ahead
        assert 0.8 * row.peak_gib <= told.peak_nbytes / 2**30 <= 1.1 * row.peak_gib


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("row", [*TITAN_H100, *TITAN_A100], ids=str)
def test_throughput_and_peak_are_what_was_published(row, monkeypatch):
    # FSDP2 gathers each module into memory of its own; here embedding and head would share some
    monkeypatch.setattr("hf_zero.engine.partition.VOCABULARY_NUMEL", float("inf"))
    _near(row)


@pytest.mark.full("slow")
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_the_utilization_is_the_median_of_other_rows(device):
    found = [utilization_of(row) for row in FITTED if row.device == device]
    assert device_named(device).utilization == pytest.approx(statistics.median(found), abs=0.011)
    assert statistics.quantiles(found, n=4)[2] - statistics.quantiles(found, n=4)[0] < 0.15  # the spread of the rows
