"""Ranks are killed at random moments of saves: nothing that was complete is lost, and the run goes on bit for bit."""

import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hf_zero.engine import engine_of
from tests.distributed import start_ranks
from tests.tiers import more


NUM_RANKS = 2
LIMIT_SECONDS = 60.0


def train(folder: str, num_steps: int) -> None:
    """Trains with a checkpoint after every step, each second one in the background; goes on where a run was killed."""
    import torch.distributed as dist

    import hf_zero
    from hf_zero.checkpoint import check_checkpoint
    from tests.checkpoint import models

    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
    rank = dist.get_rank()
    engine = engine_of(hf_zero.shard(models.tied_llama(), stage=3))
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=1e-2)
    newest = steps_in(folder)[-1:]
    for step in newest:
        check_checkpoint(f"{folder}/checkpoint-{step}")
        hf_zero.load_weights(engine, f"{folder}/checkpoint-{step}")
        hf_zero.load_state(engine, optimizer, f"{folder}/checkpoint-{step}")
    snapshots, last = hf_zero.Snapshots(), None
    for step in range(newest[0] if newest else 0, num_steps):
        tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        if last is not None:
            last.wait()
        background = snapshots if step % 2 else None
        last = hf_zero.save_checkpoint(engine, optimizer, f"{folder}/checkpoint-{step + 1}", background=background)
    last.wait()
    Path(folder, f"done-{rank}").touch()
    dist.barrier()
    time.sleep(0.1)
    os._exit(0)  # gloo's threads are not awaited


def steps_in(folder: str) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in Path(folder).glob("checkpoint-*"))


def wait_for(condition, processes: list) -> bool:
    """Whether it came to be before the processes ended."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "no progress"
        if not any(process.is_alive() for process in processes):
            return condition()
        time.sleep(0.002)
    return True


def end(processes: list) -> None:
    """Every process must come to its end by itself: no rank hangs because another was killed."""
    try:
        for process in processes:
            process.join(LIMIT_SECONDS)
            assert process.exitcode is not None, "a rank hangs"
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
                process.join()


def assert_complete(folder: str) -> None:
    from hf_zero.checkpoint import check_checkpoint
    from hf_zero.checkpoint.checks import check_checksums

    for step in steps_in(folder):
        path = Path(folder, f"checkpoint-{step}")
        check_checkpoint(path)
        assert check_checksums(path).tensors


def stop_in_save(processes: list, folder: str, pause: float) -> bool:
    """Stops the ranks while they save, about `pause` seconds after a save began; False where they ended before."""
    while wait_for(lambda: is_saving(folder), processes):
        time.sleep(pause)
        for process in processes:
            process_signal(process, signal.SIGSTOP)
        if is_saving(folder):
            return True
        for process in processes:
            process_signal(process, signal.SIGCONT)
        if not any(process.is_alive() for process in processes):
            return False
        pause /= 2
    return False


def is_saving(folder: str) -> bool:
    return any(Path(folder).glob("_saving-*"))


def process_signal(process, number: int) -> bool:
    """Whether the process was there to be sent it: one that has ended waits for its parent, and takes none."""
    if process.is_alive():
        os.kill(process.pid, number)
        return True
    return False


@pytest.mark.parametrize("num_kills, num_steps, num_in_saves", [(7, 5, 2), *more((30, 10, 12))])
def test_ranks_killed_in_the_middle_of_saves_lose_nothing(tmp_path, num_kills, num_steps, num_in_saves):
    whole = str(tmp_path / "whole")
    end(start_ranks(train, NUM_RANKS, whole, num_steps))
    assert steps_in(whole) == list(range(1, num_steps + 1))

    generator, kills, in_saves, runs = random.Random(0), 0, 0, 0
    folder = str(tmp_path / "0")
    while kills < num_kills or in_saves < num_in_saves or not runs:
        before = steps_in(folder)
        processes = start_ranks(train, NUM_RANKS, folder, num_steps)
        wait_for(lambda: steps_in(folder)[len(before) :], processes)  # noqa: B023 - called at once
        time.sleep(generator.uniform(0, 0.05))
        aims = generator.random() < 0.7  # in the middle of a save, most of the time
        in_saves += aims and stop_in_save(processes, folder, generator.uniform(0, 0.02))
        for victim in generator.choice([processes[:1], processes[1:], processes]):
            kills += process_signal(victim, signal.SIGKILL)
        for process in processes:
            process_signal(process, signal.SIGCONT)
        end(processes)
        after = steps_in(folder)
        assert after[: len(before)] == before and len(after) > len(before), "a complete checkpoint was lost"
        if after[-1] == num_steps:
            assert_complete(folder)
            for name in ("model.safetensors", "zero/optimizer.safetensors"):
                ours = Path(folder, f"checkpoint-{num_steps}", name).read_bytes()
                assert ours == Path(whole, f"checkpoint-{num_steps}", name).read_bytes(), "the runs differ"
            runs += 1
            folder = str(tmp_path / str(runs))
        assert runs <= num_kills, "kills were to fall into saves"
    assert_complete(folder)
