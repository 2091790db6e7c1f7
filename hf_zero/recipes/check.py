"""The tool `check`: trains a tiny model here at all stages, measures bandwidth, and prints what is wrong."""

import copy
import html
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_zero.activation.shard_model import shard_with
from hf_zero.checkpoint import load_state, load_weights
from hf_zero.checkpoint.save import save_checkpoint
from hf_zero.comm import Bus, Comm, Counters, DistributedComm, connect
from hf_zero.comm.distributed import LAUNCH_ORDER, NativeComm
from hf_zero.comm.streams import Streams
from hf_zero.comm.world import local_device
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes import env
from hf_zero.recipes.launch import launch
from hf_zero.recipes.loading import quiet
from hf_zero.recipes.parser import option
from hf_zero.recipes.run_config import launched_world_size
from hf_zero.recipes.tiny_training import (
    BF16_ROUNDING,
    ROUNDING,
    Trained,
    make_inner,
    tiny_llama,
    train_plain,
    train_sharded,
)
from hf_zero.trainer.checks import check_output_dir


POSITIONAL = ()

DEADLINE_SECONDS = 600.0  # for all probes, which take a minute or two
TIMEOUT_SECONDS, AGREEMENT_SECONDS = 40.0, 90.0  # a rank that waits for a failed one gives up before the agreement
ON_DEVICE_NBYTES, ON_CPU_NBYTES = 256 * 2**20, 32 * 2**20
PERIOD = 251  # a prime: a block that is written to another block's place then has other values
MEAN_ROUNDING = 1e-5  # of a mean of whole numbers in fp32, which a backend may take in any order
PAGE_NAME = "check.html"
VERSIONS = ("hf_zero", "python", "system", "torch", "transformers", "backend")  # facts of `env`
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"


@dataclass
class Arguments:
    """Keys of `check`."""

    num_processes: int | None = option(
        None, "Number of processes to start. Default: one per device, 2 on CPUs. Omit it under torchrun."
    )
    use_cpu: bool = option(False, "Check the CPUs of a machine that has other devices.")
    output_dir: str | None = option(None, f"Folder to write {PAGE_NAME} to.")


class Wrong(Exception):
    """A probe has found that something is wrong. The message says what."""


class Skipped(str):
    """Returned by a probe that cannot run on these devices: the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a probe has found, in one line."""

    name: str
    status: str  # ok, FAILED or skipped
    text: str

    def __str__(self) -> str:
        return f"{self.status:8}{self.name}: {self.text}"


def run(arguments: Arguments) -> None:
    """Prints a line for each probe, and the conclusion. Raises [`HfZeroError`] if one has failed."""
    launched = launched_world_size(arguments.num_processes)
    found = None if arguments.use_cpu else torch.accelerator.current_accelerator(check_available=True)
    device_type = found.type if found is not None and hasattr(torch.get_device_module(found), "Stream") else "cpu"
    num_devices = 2 if device_type == "cpu" else torch.accelerator.device_count()
    asked = arguments.num_processes or num_devices
    if device_type != "cpu" and not launched and asked > num_devices:
        raise ConfigError(
            f"--num_processes {asked}: each process needs a device of its own, and there are {num_devices}; give at "
            f"most {num_devices}, or --use_cpu"
        )
    if arguments.output_dir is not None:
        check_output_dir(arguments.output_dir)
    # A GPU's matrix products then take the same way each time. Both are read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault(LAUNCH_ORDER, "1")  # groups of ranks have communicators of their own
    if launched or asked == 1:
        check(device_type, arguments.output_dir)
    else:
        launch(asked, check, device_type, arguments.output_dir)


def check(device_type: str, output_dir: str | None) -> None:
    """Runs all probes. All ranks call it; the first prints. A process that hangs ends when the time is up."""

    def give_up() -> None:
        said = f"hf-zero: check: not finished after {DEADLINE_SECONDS:.0f} s; the probe after the last line hangs"
        print(said, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(DEADLINE_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        _check(device_type, output_dir)
    finally:
        timer.cancel()


def _check(device_type: str, output_dir: str | None) -> None:
    begin, probes = time.monotonic(), Probes(device_type)
    say: Callable[..., None] = partial(print, flush=True) if probes.comm.rank == 0 else lambda *_: None
    facts = dict(env.facts())
    cpus = f"CPUs ({facts['processors']} processors)"
    device = cpus if device_type == "cpu" else facts.get("device 0", device_type)
    where = f"{probes.comm.num_ranks} process(es) on {device}"
    versions = "; ".join(f"{name} {facts[name]}" for name in VERSIONS if name in facts)
    say(f"{versions}\n{where}")
    outcomes: list[Outcome] = []
    is_in_step = True
    for name, probe in probes.all().items():
        if is_in_step:
            outcome, is_in_step = probes.agree(name, probe)
        else:
            outcome = Outcome(name, SKIPPED, "the ranks are not in step after what failed")
        outcomes.append(outcome)
        say(outcome)
    probes.close()
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    num_ok = sum(outcome.status == OK for outcome in outcomes)
    text = f"{num_ok} probes passed, {len(failed)} failed, {len(outcomes) - num_ok - len(failed)} were skipped, in "
    text += f"{time.monotonic() - begin:.0f} s: "
    text += "do not trust this machine with a run" if failed else "nothing wrong was found"
    say(f"\n{text}")
    if failed:
        say("for a bug report:", "; ".join([*(f"{each.name}: {each.text}" for each in failed), where, versions]))
    if output_dir is not None and probes.comm.rank == 0:
        page, lines = Path(output_dir, PAGE_NAME), [*outcomes, "", text, "", *map(": ".join, facts.items())]
        page.parent.mkdir(parents=True, exist_ok=True)
        content = html.escape("\n".join(map(str, lines)))
        page.write_text(f"<!doctype html><title>hf-zero check</title><pre>{content}</pre>\n", encoding="utf-8")
        say(f"page: {page}")
    if failed:
        names = ", ".join(outcome.name for outcome in failed)
        raise HfZeroError(f"check: {len(failed)} of {len(outcomes)} probes failed ({names})")


class Probes:
    """The probes on this rank. Each returns what it found, or raises [`Wrong`]. All ranks call it."""

    def __init__(self, device_type: str):
        torch.use_deterministic_algorithms(True, warn_only=True)  # a device then repeats its bits
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        self.device = local_device(device_type)
        self.comm: Comm = connect(self.device, timeout_seconds=TIMEOUT_SECONDS, bucket_nbytes="auto")
        self.is_alone = self.comm.num_ranks == 1
        self._talk = self.comm
        if not self.is_alone:  # connections of its own: a failure may leave messages behind in the others
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_SECONDS))
            self._talk = DistributedComm(group, torch.device("cpu"), AGREEMENT_SECONDS)
        with quiet():
            self._model = tiny_llama(seed=0)
        self._done: dict[tuple, Trained] = {}

    def all(self) -> dict[str, Callable[[], str]]:
        """Returns the probes by name, in order."""
        return {
            **{f"stage {stage}": partial(self.stage, stage) for stage in range(4)},
            "stages in bf16": self.bf16,
            "save, load, resume": self.resume,
            "offload optimizer": partial(self.offload, "optimizer", 2),
            "offload params": partial(self.offload, "params", 3),
            "all-gather": self.gather_rate,
            "reduce-scatter": self.reduce_rate,
            "host to device": partial(self.transfer_rate, "up"),
            "device to host": partial(self.transfer_rate, "down"),
            "copies in memory": self.copy_rate,
        }

    def agree(self, name: str, probe: Callable[[], str]) -> tuple[Outcome, bool]:
        """Runs a probe on all ranks. Returns the outcome of the first rank on which it failed, or of rank 0, and
        whether the ranks are in step, so that others may follow."""
        is_in_step = True
        try:
            said = probe()
            outcome = Outcome(name, SKIPPED if isinstance(said, Skipped) else OK, said)
        except Wrong as wrong:
            outcome = Outcome(name, FAILED, str(wrong))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = "" if isinstance(error, HfZeroError) else f" ({Path(frame.filename).name}:{frame.lineno})"
            outcome = Outcome(name, FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}{where}")
            is_in_step = self.is_alone
        found = self._talk.all_gather_object((outcome, is_in_step), what=f"check, probe {name!r}")
        failed = [rank for rank, (each, _) in enumerate(found) if each.status == FAILED]
        # A rank that waited in vain for another says less than that other.
        first = min(failed, key=lambda rank: "CommError" in found[rank][0].text, default=0)
        outcome = found[first][0]
        if failed and not self.is_alone:
            outcome = Outcome(name, FAILED, f"rank {first}: {outcome.text}")
        return outcome, all(in_step for _, in_step in found)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def stage(self, stage: int) -> str:
        """Compares a stage with stage 0 and with plain torch."""
        trained, first = self._trained(stage), self._trained(0)
        same = f"{self._same(trained, first, 'stage 0')}, " if stage else ""
        return f"{same}agrees with plain torch to {_compared(trained, self._plain(), 'plain torch'):.1e}"

    def bf16(self) -> str:
        """Compares all stages with bf16 copies of fp32 masters."""
        first, *others = [self._trained(stage, compute_dtype=torch.bfloat16) for stage in range(4)]
        said = [self._same(each, first, "stage 0", BF16_ROUNDING) for each in others]
        found = first.differences(self._plain())["losses"]
        if found > BF16_ROUNDING:
            raise Wrong(f"losses differ by {found:.1e} from those of plain torch in fp32; expected rounding")
        return f"{max(said, key=len)}, losses are those of fp32 to {found:.1e}"

    def offload(self, offload: str, stage: int) -> str:
        """Compares offload with none, with an optimizer that rounds alike on the device and on the host."""
        away, here = self._trained(stage, "sgd", offload=offload), self._trained(stage, "sgd")
        return self._same(away, here, f"stage {stage} without it")

    def resume(self) -> str:
        """Saves at stage 3, continues, and resumes at stage 1. transformers loads the saved folder too."""
        folder = Path(self.comm.broadcast_object(tempfile.mkdtemp(prefix="hf_zero_") if self.comm.rank == 0 else None))
        try:
            model, optimizer = self._sharded(3)
            saved = train_sharded(model, optimizer, self.comm.rank, self.device, range(2), clips=True)
            save_checkpoint(model, optimizer, folder)
            unbroken = train_sharded(model, optimizer, self.comm.rank, self.device, range(2, 4), clips=True)
            model, optimizer = self._sharded(1)
            load_weights(model, folder)
            load_state(model, optimizer, folder)
            resumed = train_sharded(model, optimizer, self.comm.rank, self.device, range(2, 4), clips=True)
            said = self._same(resumed, unbroken, "the uninterrupted run")
            with quiet():
                loaded = AutoModelForCausalLM.from_pretrained(folder)
            for name, param in loaded.named_parameters():
                if not torch.equal(param.detach().float(), saved.weights[name]):
                    raise Wrong(f"{name}: transformers loads other values than were saved")
            self.comm.barrier()  # all ranks have read the folder
        finally:
            if self.comm.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        return f"{said}; from stage 3 to stage 1, and transformers loads the folder"

    def gather_rate(self) -> str:
        """Measures an all-gather."""
        full, shard = self._buffer()
        rate = self._exchange(full, lambda: self.comm.all_gather(full, shard, what="a measurement").wait())
        full.fill_(-1.0)
        shard.copy_(_pattern(shard, self.comm.rank))
        self._once(lambda: self.comm.all_gather(full, shard, what="a measurement").wait())
        for rank, found in enumerate(full.chunk(self.comm.num_ranks)):
            _compare(found, _pattern(found, rank), f"all-gather: range of rank {rank}")
        return rate

    def reduce_rate(self) -> str:
        """Measures a reduce-scatter."""
        full, shard = self._buffer()

        def reduce() -> None:
            self.comm.reduce_scatter(full, shard, dtype=full.dtype, accumulate=False, what="a measurement").wait()

        rate, num_ranks, rank = self._exchange(full, reduce), self.comm.num_ranks, self.comm.rank
        wanted = _pattern(full, 0).chunk(num_ranks)[rank] + PERIOD * (num_ranks - 1) / 2
        full.copy_(_pattern(full, rank))
        self._once(reduce)
        _compare(shard, wanted, f"reduce-scatter: range of rank {rank}", MEAN_ROUNDING)
        return rate

    def copy_rate(self) -> str:
        """Measures copies inside the device's memory."""
        source = torch.empty(self._nbytes, dtype=torch.uint8, device=self.device)
        source.copy_(_pattern(source, 0))
        target = torch.zeros_like(source)
        rate = self._rate(source.nbytes, lambda: target.copy_(source))
        _compare(target, source, "copies in memory")
        return rate

    def transfer_rate(self, way: str) -> str:
        """Measures copies between the device and page-locked memory of the host."""
        if self.device.type == "cpu":
            return Skipped("the device is the host")
        bus = Bus(self.device, Counters())
        host = bus.empty(self._nbytes, torch.uint8).zero_()
        here = torch.zeros(host.numel(), dtype=torch.uint8, device=self.device)
        source, target = (host, here) if way == "up" else (here, host)
        source.copy_(_pattern(source, 0))
        act = partial(bus.up, here, host) if way == "up" else partial(bus.down, host, here)
        rate = self._rate(host.nbytes, lambda: act().synchronize())
        _compare(target, _pattern(target, 0), f"copies {way}")
        return rate

    def _sharded(self, stage: int, kind: str = "adamw", **settings: Any) -> tuple[Any, ShardedOptimizer]:
        """Makes a sharded copy of the model. Alone, it is sharded as one of several ranks is (`strict`)."""
        model = copy.deepcopy(self._model).to(self.device)
        config = ZeroConfig(stage=stage, timeout_seconds=TIMEOUT_SECONDS, strict=self.is_alone, **settings)
        shard_with(model, config, device=self.device)
        return model, ShardedOptimizer(model, make_inner(kind, model.parameters()))

    def _trained(self, stage: int, kind: str = "adamw", **settings: Any) -> Trained:
        key = (stage, kind, *settings.values())
        if key not in self._done:
            model, optimizer = self._sharded(stage, kind, **settings)
            self._done[key] = train_sharded(
                model, optimizer, self.comm.rank, self.device, range(3), clips=kind == "adamw"
            )
        return self._done[key]

    def _plain(self) -> Trained:
        if () not in self._done:
            model = copy.deepcopy(self._model).to(self.device)
            self._done[()] = train_plain(model, self.comm.num_ranks, "adamw", self.device)[self.comm.rank]
        return self._done[()]

    def _same(self, trained: Trained, wanted: Trained, other: str, bound: float = ROUNDING) -> str:
        """Says that two trainings are equal to the bit, or to rounding where bits do not repeat."""
        differs = _compared(trained, wanted, other, bound)
        if differs == 0.0:
            return f"bit-equal to {other}"
        if self.repeats_bits:
            raise Wrong(f"differs from {other} by {differs:.1e} of its size; expected the same bits")
        return f"equal to {other} to {differs:.1e} (another order of sums)"

    @property
    def repeats_bits(self) -> bool:
        """Whether all stages take each sum in the same order. A GPU may choose another kernel for memory that is
        aligned otherwise, and a backend's own collectives may add up more than two ranks in any order."""
        return self.device.type == "cpu" and (self.comm.num_ranks <= 2 or not isinstance(self.comm, NativeComm))

    @property
    def _nbytes(self) -> int:
        return ON_CPU_NBYTES if self.device.type == "cpu" else ON_DEVICE_NBYTES

    def _buffer(self) -> tuple[Tensor, Tensor]:
        """Returns memory for the whole, and this rank's range of it, as the engine allocates them."""
        full = self.comm.empty(self._nbytes // 4 // self.comm.num_ranks * self.comm.num_ranks, torch.float32).zero_()
        return full, full.chunk(self.comm.num_ranks)[self.comm.rank]

    def _exchange(self, full: Tensor, act: Callable[[], object]) -> str:
        if self.is_alone:
            return Skipped("one process has nobody to exchange with")
        self.comm.barrier()
        through = "shared memory" if self.comm.shared_memory is not None else type(self.comm).__name__
        nbytes = full.nbytes * (self.comm.num_ranks - 1) // self.comm.num_ranks
        return f"{self._rate(nbytes, act)} received by each rank, through {through}"

    def _once(self, act: Callable[[], object]) -> None:
        """Does something once, after all ranks have written what they send."""
        streams = Streams(self.device)
        streams.synchronize()
        self.comm.barrier()
        act()
        streams.synchronize()

    def _rate(self, nbytes: int, act: Callable[[], object]) -> str:
        """Measures the fastest of five times, after one that warms up."""
        streams, seconds = Streams(self.device), []
        for _ in range(6):
            streams.synchronize()
            begin = time.perf_counter()
            act()
            streams.synchronize()
            seconds.append(time.perf_counter() - begin)
        return f"{nbytes / min(seconds[1:]) / 1e9:.1f} GB/s"


def _compared(trained: Trained, wanted: Trained, other: str, bound: float = ROUNDING) -> float:
    """Returns the largest difference, if it is one of rounding."""
    where, worst = max(trained.differences(wanted).items(), key=lambda item: item[1])
    if worst > bound:
        raise Wrong(f"{where} differs from {other} by {worst:.1e} of its size; rounding would be below {bound}")
    return worst


def _pattern(like: Tensor, rank: int) -> Tensor:
    """Returns whole numbers that tell the place in a tensor, and the rank, on its device."""
    return (torch.arange(like.numel(), dtype=torch.int32, device=like.device) % PERIOD + PERIOD * rank).float()


def _compare(found: Tensor, wanted: Tensor, what: str, rounding: float = 0.0) -> None:
    differ = ~((found - wanted).abs() <= rounding * wanted) if rounding else found != wanted
    if differ.any():
        at = int(differ.nonzero()[0])
        raise Wrong(
            f"{what}: {int(differ.sum())} of {found.numel()} values are wrong, the first at {at}: found "
            f"{found[at].item()}, expected {wanted[at].item()}"
        )
