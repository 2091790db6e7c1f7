"""A short training on two ranks that can be started, killed and gone on with, and what is asked of its folder.

Its ranks are started as those of tests are.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_zero.engine import engine_of
from tests.distributed import start_ranks


NUM_RANKS = 2
NUM_STEPS = 6
LIMIT_SECONDS = 90.0  # a run takes 5; who waits for a rank that has gone may take as long as ddp_timeout
SETTINGS = {
    "max_steps": NUM_STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 3,
    "ddp_timeout": 30,
}
BESIDE = ("config.json", "trainer_state.json", "scheduler.pt", *(f"rng_state_{rank}.pth" for rank in range(NUM_RANKS)))

Fault = Callable[[int], None]  # what a rank does to itself before it trains; it can be pickled


@dataclass
class Run:
    """A training in `folder/out`, under way.

    Args:
        folder (`Path`): where it writes; `said-R` there is what rank R says.
        processes (`list`): the ranks.
    """

    folder: Path
    processes: list

    @classmethod
    def start(cls, folder: Path, fault: Fault | None = None, *, in_background: bool = False) -> "Run":
        """Starts the ranks. They go on at the newest checkpoint, if there is any."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("training-*"):
            path.unlink()
        return cls(folder, start_ranks(_be_rank, NUM_RANKS, str(folder), fault, in_background))

    def wait_for_training(self) -> None:
        """Returns when all ranks are about to train, or one has ended."""
        while len(list(self.folder.glob("training-*"))) < NUM_RANKS and all(p.is_alive() for p in self.processes):
            time.sleep(0.002)

    def end(self, limit: float = LIMIT_SECONDS) -> bool:
        """Waits for the ranks; kills those that do not end. Returns whether all have ended by themselves."""
        deadline = time.monotonic() + limit
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in self.processes if process.exitcode is None]
        for process in hung:
            process.kill()
            process.join()
        return not hung

    @property
    def codes(self) -> list[int]:
        return [process.exitcode for process in self.processes]

    def last_line(self, rank: int) -> str:
        lines = (self.folder / f"said-{rank}").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _be_rank(folder: str, fault: Fault | None, in_background: bool) -> None:
    rank = int(os.environ["RANK"])
    said = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 0
    try:
        _train(rank, Path(folder), fault, in_background)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:  # noqa: B902
        code = 1
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
    os._exit(code)  # gloo's threads are not awaited


def _train(rank: int, folder: Path, fault: Fault | None, in_background: bool) -> None:
    from tests import models
    from tests.compare import weights_of
    from tests.trainer.harness import Rows, make, seed_everything

    out = folder / "out"
    goes_on = any(out.glob("checkpoint-*"))
    seed_everything()
    trainer = make(3, out, models.build("bert"), Rows("bert"), zero_async_save=in_background, **SETTINGS)
    (folder / f"training-{rank}").touch()
    if fault is not None:
        fault(rank)
    trainer.train(resume_from_checkpoint=goes_on or None)
    trainer.save_model()
    weights = weights_of(trainer.model)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    # torch's own says of a rank that has ended only that a connection has closed
    engine_of(trainer.model).comm.barrier()
    time.sleep(0.05)


def steps_in(out: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))


def incomplete_in(out: Path) -> list[str]:
    """What is wrong with folders that have the name of a checkpoint."""
    from hf_zero.checkpoint import check_checkpoint
    from hf_zero.checkpoint.manifest import check_checksums

    found = []
    for step in steps_in(out):
        path = out / f"checkpoint-{step}"
        try:
            check_checkpoint(path)
            check_checksums(path)
            empty = [name for name in BESIDE if not (path / name).stat().st_size]
            assert not empty, f"{empty} are empty"
            assert json.loads((path / "trainer_state.json").read_text())["global_step"] == step
            torch.load(path / "scheduler.pt", weights_only=True)
        except Exception as error:
            found.append(f"{path}: {error}")
    return found


def is_equal(folder: Path, whole: Path) -> bool:
    """Whether two runs have ended with the same weights, bit for bit, in memory and in the final folder."""
    ours, theirs = (torch.load(each / "weights.pt", weights_only=True) for each in (folder, whole))
    files = [(each / "out" / "model.safetensors").read_bytes() for each in (folder, whole)]
    return files[0] == files[1] and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def unbroken(root: Path) -> Path:
    """A run that nothing disturbs, for comparison."""
    run = Run.start(root / "whole")
    if not run.end() or any(run.codes):
        raise RuntimeError(f"the undisturbed run ended with {run.codes}: {run.last_line(0)}")
    return root / "whole"
