"""State that is not shaped like parameters, or lies whole on one rank, is saved by name and resumes anywhere."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import hf_zero
from hf_zero.errors import CheckpointError
from tests import models
from tests.distributed import run_ranks
from tests.optim import kinds
from tests.training import Sharded, go_on, loss_of


NUM_STEPS = 2


def _save(folder: str, kind: str, stage: int) -> None:
    with kinds.eager():
        subject = Sharded(kinds.model_for(kind), kinds.KINDS[kind], stage)
        kinds.set_mode(subject.optimizer, "train")
        go_on(subject, "llama", 0, NUM_STEPS)
        kinds.set_mode(subject.optimizer, "eval")
        hf_zero.save_checkpoint(subject.engine, subject.optimizer, folder)
        kinds.set_mode(subject.optimizer, "train")
        losses = go_on(subject, "llama", NUM_STEPS, 3 * NUM_STEPS)
    Path(folder, "unbroken.json").write_text(json.dumps(losses))


def _resume(folder: str, kind: str, stage: int, exact: bool) -> None:
    with kinds.eager():
        subject = Sharded(kinds.model_for(kind), kinds.KINDS[kind], stage)
        hf_zero.load_weights(subject.engine, folder)
        hf_zero.load_state(subject.engine, subject.optimizer, folder)
        kinds.set_mode(subject.optimizer, "train")
        losses = go_on(subject, "llama", NUM_STEPS, 3 * NUM_STEPS)
    unbroken = json.loads(Path(folder, "unbroken.json").read_text())
    assert losses == (unbroken if exact else pytest.approx(unbroken, rel=1e-5)), f"stage {stage}"


@kinds.each_kind(("Muon with AdamW", "8-bit AdamW (torchao)", "AdEMAMix (bitsandbytes)"))
@pytest.mark.full("more cases", after=2)
def test_a_resumed_run_is_the_unbroken_one_whatever_the_ranks_and_the_stage(tmp_path, kind):
    run_ranks(_save, 2, str(tmp_path), kind, 3, timeout=240)
    run_ranks(_resume, 2, str(tmp_path), kind, 3, True, timeout=240)
    run_ranks(_resume, 2, str(tmp_path), kind, 0, True, timeout=240)
    run_ranks(_resume, 1, str(tmp_path), kind, 1, False, timeout=240)
    run_ranks(_resume, 4, str(tmp_path), kind, 2, False, timeout=240)


GATE, NORM = "model.layers.1.mlp.gate_proj.weight", "model.norm.weight"  # 52 by 24, or 260 by 128 where quantised
BYTES, SCALES = ("U8", (260, 128)), ("F32", (260 * 128 // 256,))
# By kind: what of its state is in the file, and names that only others have.
SAVED = {
    "Adafactor (torch)": {
        f"{GATE}.row_var": ("F32", (52, 1)),
        f"{GATE}.col_var": ("F32", (1, 24)),
        f"{NORM}.variance": ("F32", (24,)),
    },
    "8-bit AdamW (torchao)": {
        f"{GATE}.exp_avg_scale": SCALES,
        f"{NORM}.exp_avg": ("F32", (128,)),  # too small to be quantised
    },
    "8-bit AdEMAMix (bitsandbytes)": {
        **{f"{GATE}.{key}": BYTES for key in ("state1_0", "state1_1", "state2")},
        **{f"{GATE}.{key}": SCALES for key in ("absmax1_0", "absmax1_1", "absmax2")},
    },
    "AdEMAMix (bitsandbytes)": {f"{GATE}.{key}": ("F32", (52, 24)) for key in ("state1_0", "state1_1", "state2")},
}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=kinds.needs_package_of(kind)) for kind in SAVED])
def test_state_is_saved_in_its_own_shapes_and_dtypes(tmp_path, kind):
    """Factors beside the weights, codes and scales of what is quantised, each row of what is stacked by itself."""
    run_ranks(_save, 2, str(tmp_path), kind, 3)
    with safe_open(Path(tmp_path, "zero", "optimizer.safetensors"), "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        found = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    assert SAVED[kind].items() <= found.items()
    assert ("8-bit" in kind) is any(dtype == "U8" for dtype, _ in found.values())
    assert not any(name.endswith("qmap") for name in found), "the tables follow from the optimizer"
    if kind == "AdEMAMix (bitsandbytes)":
        assert not any("absmax" in name for name in found)


class Listing(torch.optim.SGD):
    """Keeps a list in its state, which no checkpoint knows."""

    whole_parameters = True

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1.0]


def test_state_that_cannot_be_saved_is_named(tmp_path):
    subject = Sharded.__new__(Sharded)
    model = models.build("mlp")
    engine = hf_zero.shard(model, stage=1)
    subject = hf_zero.ShardedOptimizer(engine, Listing, lr=0.1)
    loss_of(model(**models.batch("mlp", seed=0))).backward()
    subject.step()
    with pytest.raises(
        CheckpointError, match="state 'history' of .*: a list cannot be saved; keep tensors and numbers"
    ):
        hf_zero.save_checkpoint(engine, subject, tmp_path / "saved")


def test_hyperparameters_in_tensors_are_saved(tmp_path):
    """An optimizer that was saved without them would be taken for another kind."""
    made = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.5), torch.tensor(0.25)), "foreach": False}
    for folder in (tmp_path / "saved", None):
        model = models.build("mlp")
        engine = hf_zero.shard(model, stage=1)
        optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, **made)
        if folder is not None:
            hf_zero.save_checkpoint(engine, optimizer, folder)
    made["betas"][0].fill_(0.75)
    hf_zero.load_state(engine, optimizer, tmp_path / "saved")
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.25)
