"""The checkpoint of a real engine in training: what is saved, and how it goes on."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_zero
from hf_zero.checkpoint import load_state, load_weights, save_pretrained, save_state
from hf_zero.engine import engine_of
from tests.checkpoint import models
from tests.checkpoint.fakes import run_ranks


NUM_STEPS = 3


def start(build, stage, compute_dtype=None):
    engine = engine_of(hf_zero.shard(build(), stage=stage, compute_dtype=compute_dtype))
    return engine, hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=1e-2)


def train(engine, optimizer, first, last) -> list[float]:
    losses = []
    for step in range(first, last):
        # The whole batch on every rank: the average over ranks is then the same for any number of them.
        tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = engine.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_after_some_steps(comm, folder, build, stage, compute_dtype=None):
    engine, optimizer = start(build, stage, compute_dtype)
    train(engine, optimizer, 0, NUM_STEPS)
    save_pretrained(engine, folder / "saved", max_shard_size="20KB")
    save_state(engine, optimizer, folder / "saved")
    with hf_zero.gathered(engine.model):
        whole = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    if comm.rank == 0:
        torch.save(whole, folder / "gathered.pt")
    losses = train(engine, optimizer, NUM_STEPS, 2 * NUM_STEPS)
    (folder / f"unbroken-{comm.rank}.json").write_text(json.dumps(losses))


def resume(comm, folder, build, stage, compute_dtype=None):
    engine, optimizer = start(build, stage, compute_dtype)
    load_weights(engine, folder / "saved")
    load_state(engine, optimizer, folder / "saved")
    losses = train(engine, optimizer, NUM_STEPS, 2 * NUM_STEPS)
    unbroken = json.loads((folder / "unbroken-0.json").read_text())
    assert losses == unbroken


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("build", [models.tied_llama, models.t5, models.mixtral])
def test_a_trained_model_loads_with_plain_transformers(tmp_path, build):
    run_ranks(save_after_some_steps, 2, tmp_path, build, 3)
    auto_class = type(build()) if build is models.t5 else AutoModelForCausalLM
    loaded, report = auto_class.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values())
    expected = torch.load(tmp_path / "gathered.pt", weights_only=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert (Path(tmp_path) / "saved" / "model.safetensors.index.json").exists()


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path, compute_dtype):
    run_ranks(save_after_some_steps, 2, tmp_path, models.tied_llama, 3, compute_dtype)
    run_ranks(resume, 2, tmp_path, models.tied_llama, 3, compute_dtype)


CHAIN = [(2, 3), (1, 1), (4, 2), (3, 0)]  # ranks and stage, one after the other


def go_on(comm, folder, build, stage, turn):
    """Takes its turn of the run: from the checkpoint of the one before, some steps, a checkpoint of its own."""
    engine, optimizer = start(build, stage)
    engine.model.eval()  # T5 would drop others on every rank
    if turn:
        load_weights(engine, folder / f"checkpoint-{turn - 1}")
        load_state(engine, optimizer, folder / f"checkpoint-{turn - 1}")
    losses = train(engine, optimizer, turn * NUM_STEPS, (turn + 1) * NUM_STEPS)
    hf_zero.save_checkpoint(engine, optimizer, folder / f"checkpoint-{turn}", step=(turn + 1) * NUM_STEPS)
    (folder / f"losses-{turn}-{comm.rank}.json").write_text(json.dumps(losses))


@pytest.mark.parametrize("build", [models.tied_llama, models.t5, models.mixtral])
def test_a_run_goes_from_ranks_to_ranks_and_from_stage_to_stage(tmp_path, build):
    engine, optimizer = start(build, 0)
    engine.model.eval()
    unbroken = train(engine, optimizer, 0, len(CHAIN) * NUM_STEPS)
    for turn, (num_ranks, stage) in enumerate(CHAIN):
        run_ranks(go_on, num_ranks, tmp_path, build, stage, turn)
        for rank in range(num_ranks):
            losses = json.loads((tmp_path / f"losses-{turn}-{rank}.json").read_text())
            expected = unbroken[turn * NUM_STEPS : (turn + 1) * NUM_STEPS]
            assert losses == pytest.approx(expected, rel=1e-4), f"{num_ranks} ranks at stage {stage}, rank {rank}"
    loaded = type(build()).from_pretrained(tmp_path / f"checkpoint-{len(CHAIN) - 1}")
    for (name, weight), (_, expected) in zip(loaded.named_parameters(), engine.model.named_parameters(), strict=True):
        assert torch.allclose(weight, expected, rtol=1e-3, atol=1e-4), name
