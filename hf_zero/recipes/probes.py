"""What the processes of `check` do: each probe is one line of its result."""

import copy
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_zero.activation.shard_model import shard_with
from hf_zero.checkpoint import load_state, load_weights
from hf_zero.checkpoint.save import save_checkpoint
from hf_zero.comm import Comm
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes.loading import quiet
from hf_zero.recipes.probed_ranks import (
    SKIPPED,
    TIMEOUT_SECONDS,
    Outcome,
    Ranks,
    Skipped,
    Wrong,
    copy_rate,
    gather_rate,
    pcie_of,
    reduce_rate,
    shared_memory_rate,
    transfer_rate,
)
from hf_zero.recipes.tiny_training import (
    NUM_HEADS,
    Trained,
    TrainingJob,
    make_inner,
    tiny_llama,
    train_job,
    train_plain,
    train_sharded,
)


# Sums over ranks are taken in another order than in one process. Gradients of a few thousand terms then agree to some
# 1e-6 of their size, and three steps add no more than that.
ROUNDING = 2e-5
# One rounding to bf16 is 2^-8 of a value, in a loss of fp32. Kernels that take sums in another order round otherwise.
BF16_ROUNDING = 2e-2
# Of losses and norms where values are rounded to 8 bits: a rounding is 2^-8 of the largest of 256 values, and sums of
# many such errors, of either sign, are smaller.
BITS_ROUNDING = 1e-2


def run_probes(device_type: str, journal: str | None) -> list[Outcome]:
    """Runs all probes in one process of the check, and returns the same on all ranks. Rank 0 prints their lines, and
    writes each name, and then its outcome, to the file `journal`, in whose folder probes save."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # a device then repeats its bits
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    ranks = Ranks(device_type)
    outcomes: list[Outcome] = []
    probes, goes_on = Probes(ranks, None if journal is None else Path(journal).parent), True
    for name, probe in probes.all().items():
        _note(journal if ranks.rank == 0 else None, {"begins": name})
        if goes_on:
            outcome, goes_on = ranks.agree(name, probe)
        else:
            outcome = Outcome(name, SKIPPED, "the ranks are not in step after what failed")
        outcomes.append(outcome)
        _note(journal if ranks.rank == 0 else None, asdict(outcome))
        if ranks.rank == 0:
            print(outcome.line(), flush=True)
    probes.close()
    ranks.leave()
    return outcomes


def _note(journal: str | None, entry: dict[str, str]) -> None:
    if journal is not None:
        with open(journal, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Probes:
    """All probes. Each returns what it found, or raises. They save in `parent`, or the folder of temporary files."""

    def __init__(self, ranks: Ranks, parent: Path | None):
        self._ranks, self._parent = ranks, parent
        self._device = ranks.device
        with quiet():
            self._model = tiny_llama(seed=0)
        self._done: dict[TrainingJob, list[Trained]] = {}
        self._done_plain: dict[int, list[Trained]] = {}  # of so many batches at a step, in their order
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
            **{name: partial(self.way, job) for name, job in _ways(self._ranks.num_ranks).items()},
            "values in 8 bits": self.few_bits,
            "all-gather": partial(self._exchange_speed, gather_rate),
            "reduce-scatter": partial(self._exchange_speed, reduce_rate),
            "shared memory": self.shared_memory_speed,
            "host to device": partial(self.transfer_speed, "up"),
            "device to host": partial(self.transfer_speed, "down"),
            "copies in memory": lambda: _in_words(copy_rate(self._device)),
        }

    def stage(self, stage: int) -> str:
        """Compares a stage with plain torch, and with stage 0."""
        trained, first = self._trained(TrainingJob(stage)), self._trained(TrainingJob(0))
        said = f"{self._same(trained, first, 'stage 0')}, " if stage else ""
        return said + self._agrees(TrainingJob(stage))

    def bf16(self) -> str:
        """Compares all stages with bf16 copies of fp32 masters."""
        jobs = [TrainingJob(stage, compute_dtype=torch.bfloat16) for stage in range(4)]
        first, *others = [self._trained(job) for job in jobs]  # all, before one rank may find something wrong
        said = [
            self._same(each, first, "stage 0", f"stage {job.stage}: ", BF16_ROUNDING)
            for each, job in zip(others, jobs[1:])
        ]
        found = [one.differences(other)["losses"] for one, other in zip(first, self._plain(TrainingJob(0)))]
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
        trained = train_job(self._copy(), job, 0, self._device, shard, TIMEOUT_SECONDS)
        (wanted,) = train_plain(self._copy(), 1, "sgd", self._device)
        return f"with offload it agrees with plain torch to {self._compared([trained], [wanted], 'plain torch'):.1e}"

    def way(self, job: TrainingJob | None) -> str:
        """Compares what divides ranks, sequences or losses with plain torch."""
        if job is None:
            if self._ranks.is_alone:
                return Skipped("it takes several ranks")
            return Skipped(f"{self._ranks.num_ranks} ranks cannot share the {NUM_HEADS} heads of the model")
        flags = " ".join(f"--zero_{name} {value}" for name, value in job.settings)
        try:
            return f"{self._agrees(job)} ({flags})"
        except ConfigError as refused:  # on all ranks
            return Skipped(str(refused))

    def few_bits(self) -> str:
        """Compares losses and norms with plain torch, where all that ranks send is rounded to 8 bits."""
        if self._ranks.is_alone:
            return Skipped("one process sends nothing")
        sent = (("gather_dtype", torch.int8), ("reduce_dtype", torch.int8), ("shared_memory", False))
        job = TrainingJob(3, settings=sent)
        pairs = zip(self._trained(job), self._plain(job))
        found = max(one.differences(other)[what] for one, other in pairs for what in ("losses", "norms"))
        if found > BITS_ROUNDING:
            raise Wrong(f"losses and norms differ by {found:.1e} from those of plain torch; expected {BITS_ROUNDING}")
        return f"losses and norms are those of plain torch to {found:.1e}"

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
        return _in_words(shared_memory_rate(self._ranks.comm))

    def transfer_speed(self, way: str) -> str:
        if self._device.type == "cpu":
            return Skipped("the device is the host")
        link, said = pcie_of(self._device), _in_words(transfer_rate(self._device, way))
        return said if link is None else f"{said} of {link[0] / 1e9:.1f} ({link[1]})"

    def _exchange_speed(self, measure: Callable[[Comm], Any]) -> str:
        if self._ranks.is_alone:
            return Skipped("one process has nobody to exchange with")
        through = "shared memory" if self._ranks.comm.shared_memory is not None else type(self._ranks.comm).__name__
        return f"{_in_words(measure(self._ranks.comm))} received by each rank, through {through}"

    def _copy(self) -> Any:
        return copy.deepcopy(self._model).to(self._device)

    def _trained(self, job: TrainingJob) -> list[Trained]:
        """What each rank of this process has trained as the job says."""
        if job not in self._done:
            self._done[job] = self._ranks.each(
                lambda comm, shard: train_job(self._copy(), job, comm.rank, self._device, shard, TIMEOUT_SECONDS)
            )
        return self._done[job]

    def _plain(self, job: TrainingJob) -> list[Trained]:
        """What plain torch trains of a job's batches, as each rank of this process is given them."""
        batches = [job.batch_of(rank) for rank in range(self._ranks.num_ranks)]
        number = len(set(batches))
        if number not in self._done_plain:
            self._done_plain[number] = train_plain(self._copy(), number, "adamw", self._device)
        return [self._done_plain[number][batches[self._ranks.rank]]]

    def _agrees(self, job: TrainingJob) -> str:
        """Says how near a training comes to that of plain torch."""
        worst = self._compared(self._trained(job), self._plain(job), "plain torch")
        return f"agrees with plain torch to {worst:.1e}"

    def _compared(self, trained: list[Trained], wanted: list[Trained], other: str, bound: float = ROUNDING) -> float:
        """The largest difference, if it is one of rounding."""
        where, worst = _worst(trained, wanted)
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


def _ways(num_ranks: int) -> dict[str, TrainingJob | None]:
    """Returns what divides ranks, sequences or losses, by name, for so many ranks; `None` where they cannot."""
    group = max((size for size in range(1, num_ranks) if num_ranks % size == 0), default=None)
    sharing = gcd(num_ranks, NUM_HEADS)
    return {
        "shard groups": TrainingJob(3, settings=(("shard_size", group),)) if group else None,
        "shared sequences": TrainingJob(3, settings=(("sequence_parallel", sharing),)) if sharing > 1 else None,
        "chunked loss": TrainingJob(3, settings=(("chunked_loss", "on"),)),
        "tiled MLPs": TrainingJob(3, settings=(("tiled_mlp", 4),)),
        "activations on the host": TrainingJob(3, settings=(("offload_activations", True),), checkpoints=True),
    }


def _in_words(nbytes_per_second: float) -> str:
    return f"{nbytes_per_second / 1e9:.1f} GB/s"


def _worst(trained: list[Trained], wanted: list[Trained]) -> tuple[str, float]:
    """What differs most of what the ranks have trained, and by how much of its size."""
    found = [one.differences(another) for one, another in zip(trained, wanted)]
    return max((item for each in found for item in each.items()), key=lambda item: item[1])
