"""The checkpoint of a real engine in training: what is saved, and how it goes on."""

import json

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import load_state, load_weights
from hf_zero.engine import engine_of
from tests.checkpoint import models
from tests.checkpoint.subjects import run_ranks


NUM_STEPS = 3


def start(build, stage):
    engine = engine_of(hf_zero.shard(build(), stage=stage))
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


@pytest.mark.quick(cases=1)
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
