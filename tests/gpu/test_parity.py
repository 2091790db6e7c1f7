"""All stages and all that is offloaded, while streams are late, against plain torch on the same device."""

import subprocess
import sys

import pytest
import torch

from hf_zero.activation import offload
from hf_zero.comm import Bus
from hf_zero.recipes.check import ROUNDING, tiny_llama, train_plain
from tests.gpu.late import BF16_ROUNDING, NUM_RANKS, assert_same, train_late


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("writes", ["copied", pytest.param("direct", marks=pytest.mark.direct)])
def test_stages_are_bit_equal_and_agree_with_plain_torch(device, delays, dtype, writes):
    first = train_late(device, stage=0, compute_dtype=dtype)
    plain = train_plain(tiny_llama().to(device), NUM_RANKS, device)
    for one, other in zip(first, plain, strict=True):
        found = one.differences(other)
        assert found["losses"] < (ROUNDING if dtype is None else BF16_ROUNDING), found
        assert dtype is not None or max(found.values()) < ROUNDING, found
    for stage in range(4):
        for delay in delays:
            trained = train_late(device, delay, stage=stage, compute_dtype=dtype)
            assert_same(trained, first, f"stage {stage} while {delay} is late")


# One process with one device is the most common setup.
ALONE = dict(num_ranks=1)
ACCUMULATES = dict(num_micro=2, compute_dtype=torch.bfloat16)  # in fp32, sums without offload are added in the matmul
OFFLOADED = [
    dict(stage=2, offload="optimizer"),
    dict(stage=3, offload="optimizer"),
    dict(stage=3, offload="params"),
    dict(stage=3, offload="params", compute_dtype=torch.bfloat16),
    dict(stage=3, offload="params", offload_fraction=0.5),
    dict(stage=3, offload="params", offload_dir="disk"),
    dict(stage=3, offload_activations=True, checkpoints=True),
    dict(stage=3, offload_activations=True),
    dict(stage=2, offload="optimizer", in_backward=True, **ALONE),
    dict(stage=2, offload="optimizer", **ACCUMULATES, **ALONE),
    dict(stage=2, offload="optimizer", offload_fraction=0.5, in_backward=True, **ACCUMULATES, **ALONE),
    dict(stage=3, offload="params", in_backward=True, **ALONE),
    dict(stage=3, offload="params", **ACCUMULATES, **ALONE),
]


@pytest.mark.parametrize("settings", OFFLOADED, ids=lambda settings: "-".join(map(str, settings.values())))
def test_offload_changes_no_bit(device, delays, settings, tmp_path, monkeypatch):
    """With SGD, whose updates a GPU and a CPU round alike. With AdamW, nothing that is late does."""
    monkeypatch.setattr(offload, "MIN_NBYTES", 1)
    if "offload_dir" in settings:
        settings = {**settings, "offload_dir": str(tmp_path)}
    here = {key: value for key, value in settings.items() if not key.startswith(("offload", "in_backward"))}
    for optimizer, reference in (("sgd", here), ("adamw", settings)):
        wanted = train_late(device, optimizer=optimizer, **reference)
        for delay in delays:
            trained = train_late(device, delay, optimizer=optimizer, **settings)
            assert_same(trained, wanted, f"{settings}, {optimizer}, {delay} late")


@pytest.mark.parametrize("settings", [dict(prefetch_units=0), dict(prefetch_units=3), dict(keep_gathered=2)])
def test_how_far_ahead_blocks_are_gathered_changes_no_bit(device, delays, settings):
    wanted = train_late(device, stage=3)
    for delay in delays:
        assert_same(train_late(device, delay, stage=3, **settings), wanted, f"{settings}, {delay} late")


@pytest.mark.full("slow")
def test_an_update_that_nobody_waits_for_is_noticed(monkeypatch):
    settings = dict(stage=3, offload="params", optimizer="sgd", compute_dtype=torch.bfloat16, **ALONE)
    wanted = train_late(torch.device("cpu"), **settings)
    monkeypatch.setattr(Bus, "wait_for_jobs", lambda self: None)
    with pytest.raises(AssertionError):
        assert_same(train_late(torch.device("cpu"), "host", **settings), wanted, "not waited for")


def test_the_check_passes(device):
    """On all devices of this machine, in processes of its own; with several, through NCCL."""
    command = [sys.executable, "-m", "hf_zero.recipes", "check", *(["--use_cpu"] if device.type == "cpu" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_nccl_agrees_with_plain_torch():
    """On two devices: `check` with a process for each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    command = [sys.executable, "-m", "hf_zero.recipes", "check", "--num_processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
