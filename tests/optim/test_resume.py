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
from tests.optim.test_trajectories import each_kind
from tests.training import Sharded, loss_of


NUM_STEPS = 2


def _train(subject: Sharded, first: int, last: int) -> list[float]:
    """The same batch on every rank: over 1, 2 and 4 ranks the average is then the same bit for bit."""
    losses = []
    kinds.set_mode(subject.optimizer, "train")
    for step in range(first, last):
        loss = loss_of(subject(**models.batch("llama", seed=step)))
        loss.backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _save(folder: str, kind: str, stage: int) -> None:
    with kinds.eager():
        subject = Sharded(kinds.model_for(kind), kinds.KINDS[kind], stage)
        _train(subject, 0, NUM_STEPS)
        kinds.set_mode(subject.optimizer, "eval")
        hf_zero.save_checkpoint(subject.engine, subject.optimizer, folder)
        losses = _train(subject, NUM_STEPS, 3 * NUM_STEPS)
    Path(folder, "unbroken.json").write_text(json.dumps(losses))


def _resume(folder: str, kind: str, stage: int, exact: bool) -> None:
    with kinds.eager():
        subject = Sharded(kinds.model_for(kind), kinds.KINDS[kind], stage)
        hf_zero.load_weights(subject.engine, folder)
        hf_zero.load_state(subject.engine, subject.optimizer, folder)
        losses = _train(subject, NUM_STEPS, 3 * NUM_STEPS)
    unbroken = json.loads(Path(folder, "unbroken.json").read_text())
    assert losses == (unbroken if exact else pytest.approx(unbroken, rel=1e-5)), f"stage {stage}"


@each_kind(("Muon with AdamW", "8-bit AdamW (torchao)", "AdEMAMix (bitsandbytes)"))
@pytest.mark.full("more cases", after=2)
def test_a_resumed_run_is_the_unbroken_one_whatever_the_ranks_and_the_stage(tmp_path, kind):
    kinds.skip_without(kind)
    run_ranks(_save, 2, str(tmp_path), kind, 3, timeout=240)
    run_ranks(_resume, 2, str(tmp_path), kind, 3, True, timeout=240)
    run_ranks(_resume, 2, str(tmp_path), kind, 0, True, timeout=240)
    run_ranks(_resume, 1, str(tmp_path), kind, 1, False, timeout=240)


@each_kind(())
def test_a_run_resumes_at_more_ranks(tmp_path, kind):
    kinds.skip_without(kind)
    run_ranks(_save, 1, str(tmp_path), kind, 1, timeout=240)
    run_ranks(_resume, 4, str(tmp_path), kind, 2, False, timeout=240)


def _whole(folder: str, kind: str) -> dict[str, tuple]:
    with safe_open(Path(folder, "zero", "optimizer.safetensors"), "pt") as file:
        return {
            name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())) for name in file.keys()
        }


@pytest.mark.quick
def test_factors_lie_beside_the_weights_in_their_own_shapes(tmp_path):
    run_ranks(_save, 2, str(tmp_path), "Adafactor (torch)", 2)
    found = _whole(str(tmp_path), "Adafactor (torch)")
    gate = "model.layers.1.mlp.gate_proj.weight"  # 52 by 24
    assert found[f"{gate}.row_var"] == ("F32", (52, 1)) and found[f"{gate}.col_var"] == ("F32", (1, 24))
    assert found["model.norm.weight.variance"] == ("F32", (24,))


def test_quantised_state_is_saved_as_codes_and_scales(tmp_path):
    kinds.skip_without("8-bit AdamW (torchao)")
    run_ranks(_save, 2, str(tmp_path), "8-bit AdamW (torchao)", 3)
    found = _whole(str(tmp_path), "8-bit AdamW (torchao)")
    gate = "model.layers.1.mlp.gate_proj.weight"  # 260 by 128
    assert found[f"{gate}.exp_avg_codes"][0] == "U8" and found[f"{gate}.exp_avg_scale"] == ("F32", (260 * 128 // 256,))
    assert found["model.norm.weight.exp_avg"] == ("F32", (128,)), "too small to be quantised"
    assert not any(name.endswith("qmap") for name in found), "the tables follow from the optimizer"


@pytest.mark.parametrize("num_bits", [8, 32])
def test_rows_of_state_are_saved_each_by_itself(tmp_path, num_bits):
    kind = {8: "8-bit AdEMAMix (bitsandbytes)", 32: "AdEMAMix (bitsandbytes)"}[num_bits]
    kinds.skip_without(kind)
    run_ranks(_save, 2, str(tmp_path), kind, 3)
    found = _whole(str(tmp_path), kind)
    gate = "model.layers.1.mlp.gate_proj.weight"
    shape = (260, 128) if num_bits == 8 else (52, 24)
    for key in ("state1_0", "state1_1", "state2"):
        assert found[f"{gate}.{key}"] == ("U8" if num_bits == 8 else "F32", shape)
    scales = {name for name in found if name.startswith(f"{gate}.absmax")}
    assert scales == ({f"{gate}.{key}" for key in ("absmax1_0", "absmax1_1", "absmax2")} if num_bits == 8 else set())
    assert all(found[name] == ("F32", (260 * 128 // 256,)) for name in scales)


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
