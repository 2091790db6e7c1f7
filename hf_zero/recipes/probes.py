"""What the processes of `check` do: each probe is one line of its result."""

import copy
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_zero.activation.shard_model import shard_with
from hf_zero.checkpoint import load_state, load_weights
from hf_zero.checkpoint.save import save_checkpoint
from hf_zero.comm import Comm, DistributedComm, connect
from hf_zero.comm.distributed import NativeComm
from hf_zero.comm.loopback import run_loopback
from hf_zero.config import ZeroConfig
from hf_zero.engine.build import build
from hf_zero.errors import HfZeroError
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.bandwidth import (
    Wrong,
    copy_rate,
    gather_rate,
    reduce_rate,
    shared_memory_rate,
    transfer_rate,
)
from hf_zero.recipes.loading import quiet
from hf_zero.recipes.tiny_training import (
    Trained,
    TrainingJob,
    make_inner,
    tiny_llama,
    train_job,
    train_plain,
    train_sharded,
)


Result = TypeVar("Result")

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
LOOPBACK_RANKS = 2
TIMEOUT_SECONDS, AGREEMENT_SECONDS = 40.0, 90.0  # who waits for a rank that has failed gives up before the agreement
# Sums over ranks are taken in another order than in one process. Gradients of a few thousand terms then agree to some
# 1e-6 of their size, and three steps add no more than that.
ROUNDING = 2e-5
# One rounding to bf16 is 2^-8 of a value, in a loss of fp32. Kernels that take sums in another order round otherwise.
BF16_ROUNDING = 2e-2
SLEEP_CYCLES = 300_000  # a few tenths of a millisecond


class Skipped(str):
    """What a probe returns that cannot be made on these devices: the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a probe has found."""

    name: str
    status: str  # ok, FAILED or skipped
    text: str  # what was found, in one line

    def line(self) -> str:
        return f"{self.status:8}{self.name}: {self.text}"


def run_probes(device_type: str, journal: str | None) -> list[Outcome]:
    """Runs all probes in one process of the check, and returns the same on all ranks. Rank 0 prints their lines, and
    writes to the file `journal` the name of each probe, and then its outcome. Its folder holds what the probes
    save."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # a device then repeats its bits
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    ranks = Ranks(device_type)
    outcomes: list[Outcome] = []
    probes, goes_on = Probes(ranks, None if journal is None else Path(journal).parent), True
    for name, probe in probes.all().items():
        note = partial(_note, journal if ranks.rank == 0 else None)
        note({"begins": name})
        if goes_on:
            outcome, goes_on = ranks.agree(name, probe)
        else:
            outcome = Outcome(name, SKIPPED, "the ranks are not in step after what failed")
        outcomes.append(outcome)
        note(asdict(outcome))
        if ranks.rank == 0:
            print(outcome.line(), flush=True)
    probes.close()
    ranks.leave()
    return outcomes


def _note(journal: str | None, entry: dict[str, str]) -> None:
    if journal is not None:
        with open(journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Ranks:
    """The ranks that this process plays: its own of several, or all those of a loop-back where it is alone."""

    def __init__(self, device_type: str):
        self.is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.rank = int(os.environ.get("RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local_rank)
        self.comm: Comm = connect(self.device, timeout_seconds=TIMEOUT_SECONDS, bucket_nbytes="auto")
        self.num_ranks = LOOPBACK_RANKS if self.is_alone else self.comm.num_ranks
        self._talk: Comm = self.comm
        if not self.is_alone:  # over connections of its own: of the others a failure may leave messages behind
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_SECONDS))
            self._talk = DistributedComm(group, torch.device("cpu"), AGREEMENT_SECONDS)

    @property
    def repeats_bits(self) -> bool:
        """Whether all stages take each sum in the same order. A GPU may choose another kernel where memory is aligned
        otherwise, and a backend's own collectives may add up more than two ranks in any order."""
        return self.device.type == "cpu" and (self.num_ranks == 2 or not isinstance(self.comm, NativeComm))

    def each(self, act: Callable[[Comm, Callable[..., Any]], Result]) -> list[Result]:
        """Calls a function for each rank that this process plays, with its collectives and what shards a model."""
        if self.is_alone:

            def play(comm: Comm) -> Result:
                with _seen_by_sanitizer():
                    return act(comm, partial(build, comm=comm))

            return run_loopback(
                LOOPBACK_RANKS, play, self.device, timeout_seconds=TIMEOUT_SECONDS, delay=_delay_of(self.device)
            )
        return [act(self.comm, partial(shard_with, device=self.device))]

    def agree(self, name: str, probe: Callable[[], str]) -> tuple[Outcome, bool]:
        """Runs a probe on all ranks. Returns what the first rank found on which it failed, or rank 0; and whether the
        ranks are in step, so that others may follow."""
        outcome, is_in_step = _tried(name, probe)
        is_in_step = is_in_step or self.is_alone  # the next loop-back is a new one
        found = self._talk.all_gather_object((outcome, is_in_step))
        failed = [rank for rank, (each, _) in enumerate(found) if each.status == FAILED]
        # who waited in vain for a rank says less than that rank
        first = min(failed, key=lambda rank: "CommError" in found[rank][0].text, default=0)
        outcome = found[first][0]
        if failed and len(found) > 1:
            outcome = Outcome(name, FAILED, f"rank {first}: {outcome.text}")
        return outcome, all(in_step for _, in_step in found)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _tried(name: str, probe: Callable[[], str]) -> tuple[Outcome, bool]:
    try:
        said = probe()
        return Outcome(name, SKIPPED if isinstance(said, Skipped) else OK, said), True
    except Wrong as wrong:
        return Outcome(name, FAILED, str(wrong)), True
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        where = "" if isinstance(error, HfZeroError) else f" ({Path(frame.filename).name}:{frame.lineno})"
        return Outcome(name, FAILED, f"{type(error).__name__}: {text}{where}"), False


def _seen_by_sanitizer() -> AbstractContextManager[Any]:
    """Lets torch's CUDA sanitizer see what this thread launches, if it is switched on: it looks at the main thread
    alone."""
    sanitizer = sys.modules.get("torch.cuda._sanitizer")
    return nullcontext() if sanitizer is None else sanitizer.cuda_sanitizer.dispatch


def _delay_of(device: torch.device) -> Callable[[], None] | None:
    """Work that makes copies of a loop-back late, so that what does not wait for them shows."""
    sleep = getattr(torch.get_device_module(device), "_sleep", None)
    return None if sleep is None else partial(sleep, SLEEP_CYCLES)


def _config(job: TrainingJob) -> ZeroConfig:
    settings = {"stage": job.stage, "compute_dtype": job.compute_dtype, "offload": job.offload}
    return ZeroConfig(**settings, timeout_seconds=TIMEOUT_SECONDS)


class Probes:
    """All probes. Each returns what it found, or raises. They save in `parent`, by default the folder of temporary
    files."""

    def __init__(self, ranks: Ranks, parent: Path | None):
        self._ranks, self._parent = ranks, parent
        self._device = ranks.device
        with quiet():
            self._model = tiny_llama(seed=0)
        self._done: dict[TrainingJob, list[Trained]] = {}
        self._folder: Path | None = None  # None until something is saved

    def all(self) -> dict[str, Callable[[], str]]:
        """Returns the probes by name, in order."""
        return {
            **{f"stage {stage}": partial(self.stage, stage) for stage in range(4)},
            "stages in bf16": self.bf16,
            "save, load, resume": self.resume,
            "offload optimizer": partial(self.offload, "optimizer"),
            "offload params": partial(self.offload, "params"),
            "one rank": self.one_rank,
            "all-gather": partial(self._exchange_speed, gather_rate),
            "reduce-scatter": partial(self._exchange_speed, reduce_rate),
            "shared memory": self.shared_memory_speed,
            "host to device": partial(self.transfer_speed, "up"),
            "device to host": partial(self.transfer_speed, "down"),
            "copies in memory": lambda: copy_rate(self._device).text(),
        }

    def stage(self, stage: int) -> str:
        """Compares a stage with plain torch, and with stage 0."""
        trained, first = self._trained(TrainingJob(stage)), self._trained(TrainingJob(0))
        said = f"{self._same(trained, first, 'stage 0')}, " if stage else ""
        return f"{said}agrees with plain torch to {self._compared(trained, self._plain('adamw'), 'plain torch'):.1e}"

    def bf16(self) -> str:
        """Compares all stages with bf16 copies of fp32 masters."""
        jobs = [TrainingJob(stage, compute_dtype=torch.bfloat16) for stage in range(4)]
        first, *others = [self._trained(job) for job in jobs]  # all, before one rank may find something wrong
        said = [
            self._same(each, first, "stage 0", f"stage {job.stage}: ", BF16_ROUNDING)
            for each, job in zip(others, jobs[1:])
        ]
        found = [one.differences(other)["losses"] for one, other in zip(first, self._own(self._plain("adamw")))]
        if max(found) > BF16_ROUNDING:
            raise Wrong(f"losses differ by {max(found):.1e} from those of plain torch in fp32; expected rounding")
        return f"{max(said, key=len)}, losses are those of fp32 to {max(found):.1e}"

    def offload(self, offload: str) -> str:
        """Compares offload with none, by an optimizer that rounds alike on the device and on the host."""
        stage = 3 if offload == "params" else 2
        away = self._trained(TrainingJob(stage, offload=offload, optimizer="sgd"))
        return self._same(away, self._trained(TrainingJob(stage, optimizer="sgd")), f"stage {stage} without it")

    def one_rank(self) -> str:
        """Trains as one rank with one device does, with all that can be offloaded on the host."""
        if not self._ranks.is_alone:
            return Skipped("there are several; with --num_processes 1 it is tried")
        job, shard = TrainingJob(3, offload="params", optimizer="sgd"), partial(shard_with, device=self._device)
        trained = train_job(self._copy(), job, 0, self._device, shard, _config(job))
        (wanted,) = train_plain(self._copy(), 1, "sgd", self._device)
        return f"with offload it agrees with plain torch to {self._compared([trained], [wanted], 'plain torch'):.1e}"

    def resume(self) -> str:
        """Saves at stage 3, goes on, and resumes at stage 1; the saved folder is loaded by transformers too."""
        folder = tempfile.mkdtemp(prefix="hf_zero_", dir=self._parent) if self._ranks.rank == 0 else None
        unbroken = self._ranks.each(partial(self._save_and_go_on, folder))
        resumed = self._ranks.each(self._load_and_go_on)
        said = self._same(resumed, [end for _, end in unbroken], "the run that was not broken", "resumed at stage 1: ")
        if self._ranks.rank == 0:
            self._refuse_other_weights(unbroken[0][0])
        return f"{said}; from stage 3 to stage 1, and transformers loads the folder"

    def close(self) -> None:
        """Removes the files of this process. All ranks are done with them."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save_and_go_on(self, folder: str | None, comm: Comm, shard: Callable) -> tuple[Trained, Trained]:
        self._folder = Path(comm.broadcast_object(folder))
        model = self._copy()
        shard(model, ZeroConfig(stage=3, timeout_seconds=TIMEOUT_SECONDS))
        optimizer = ShardedOptimizer(model, make_inner("adamw", model.parameters()))
        saved = train_sharded(model, optimizer, comm.rank, self._device, range(2), clips=True)
        save_checkpoint(model, optimizer, self._folder / "checkpoint")
        return saved, train_sharded(model, optimizer, comm.rank, self._device, range(2, 4), clips=True)

    def _load_and_go_on(self, comm: Comm, shard: Callable) -> Trained:
        assert self._folder is not None
        model, path = self._copy(), self._folder / "checkpoint"
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)  # all values come from the folder
        shard(model, ZeroConfig(stage=1, timeout_seconds=TIMEOUT_SECONDS))
        optimizer = ShardedOptimizer(model, make_inner("adamw", model.parameters()))
        load_weights(model, path)
        load_state(model, optimizer, path)
        return train_sharded(model, optimizer, comm.rank, self._device, range(2, 4), clips=True)

    def _refuse_other_weights(self, saved: Trained) -> None:
        assert self._folder is not None
        with quiet():
            loaded = AutoModelForCausalLM.from_pretrained(self._folder / "checkpoint")
        for name, param in loaded.named_parameters():
            if not torch.equal(param.detach().float(), saved.weights[name]):
                raise Wrong(f"{name}: transformers loads other values than were saved")

    def shared_memory_speed(self) -> str:
        if self._ranks.comm.shared_memory is None:
            return Skipped("these ranks share none")
        return shared_memory_rate(self._ranks.comm).text()

    def transfer_speed(self, way: str) -> str:
        if self._device.type == "cpu":
            return Skipped("the device is the host")
        return transfer_rate(self._device, way).text()

    def _exchange_speed(self, measure: Callable[[Comm], Any]) -> str:
        if self._ranks.is_alone:
            return Skipped("one process has nobody to exchange with")
        through = "shared memory" if self._ranks.comm.shared_memory is not None else type(self._ranks.comm).__name__
        return f"{measure(self._ranks.comm).text()} received by each rank, through {through}"

    def _copy(self) -> Any:
        return copy.deepcopy(self._model).to(self._device)

    def _trained(self, job: TrainingJob) -> list[Trained]:
        """What each rank of this process has trained as the job says."""
        if job not in self._done:
            self._done[job] = self._ranks.each(
                lambda comm, shard: train_job(self._copy(), job, comm.rank, self._device, shard, _config(job))
            )
        return self._done[job]

    def _plain(self, kind: str) -> list[Trained]:
        """What plain torch trains, for all ranks there are."""
        job = TrainingJob(-1, optimizer=kind)
        if job not in self._done:
            self._done[job] = train_plain(self._copy(), self._ranks.num_ranks, kind, self._device)
        return self._done[job]

    def _own(self, everyones: list[Trained]) -> list[Trained]:
        """Of what all ranks have, what those of this process have."""
        return everyones if self._ranks.is_alone else [everyones[self._ranks.rank]]

    def _compared(self, trained: list[Trained], wanted: list[Trained], other: str, bound: float = ROUNDING) -> float:
        """The largest difference, if it is one of rounding."""
        where, worst = _worst(trained, wanted if len(wanted) == len(trained) else self._own(wanted))
        if worst > bound:
            raise Wrong(f"{where} differs from {other} by {worst:.1e} of its size; rounding would be below {bound}")
        return worst

    def _same(
        self, trained: list[Trained], wanted: list[Trained], other: str, what: str = "", bound: float = ROUNDING
    ) -> str:
        """Says that two trainings are equal to the bit, or to rounding where sums have no one order."""
        where, worst = _worst(trained, wanted)
        if worst == 0.0:
            return f"bit-equal to {other}"
        if self._ranks.repeats_bits:
            raise Wrong(f"{what}{where} differs from {other} by {worst:.1e} of its size; expected the same bits")
        return f"equal to {other} to {self._compared(trained, wanted, other, bound):.1e} (another order of sums)"


def _worst(trained: list[Trained], wanted: list[Trained]) -> tuple[str, float]:
    """What differs most of what the ranks have trained, and by how much of its size."""
    found = [one.differences(another) for one, another in zip(trained, wanted)]
    return max((item for each in found for item in each.items()), key=lambda item: item[1])
