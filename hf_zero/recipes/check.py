"""The tool `check`: trains a tiny Llama on this machine at all stages and measures bandwidth, before a run."""

import copy
import faulthandler
import html
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_zero.activation.shard_model import shard_with
from hf_zero.checkpoint import load_state, load_weights
from hf_zero.checkpoint.save import save_checkpoint
from hf_zero.comm import Comm, connect
from hf_zero.comm.streams import Streams
from hf_zero.comm.world import local_device
from hf_zero.config import ZeroConfig
from hf_zero.engine.access import gathered
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.optim import ShardedOptimizer
from hf_zero.recipes import env
from hf_zero.recipes.launch import launched_world_size, run_on
from hf_zero.recipes.models import quiet
from hf_zero.recipes.parser import option
from hf_zero.trainer.checks import check_output_dir


POSITIONAL = ()

DEADLINE_SECONDS = 600.0  # for all probes, which take a minute or two
TIMEOUT_SECONDS, AGREEMENT_SECONDS = 40.0, 90.0  # a rank that waits for a failed one gives up before the agreement
ON_DEVICE_NBYTES, ON_CPU_NBYTES = 256 * 2**20, 32 * 2**20
PAGE_NAME = "check.html"
VERSIONS = ("hf_zero", "python", "system", "torch", "transformers", "backend")  # facts of `env`
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"

NUM_STEPS = 3
MAX_NORM = 0.1  # smaller than the norms that occur
VOCAB = 256
BATCH_SHAPE = (2, 16)
# Ranks add gradients in another order than one process does. Gradients of a few thousand terms then agree to about
# 1e-6 of their size, and three steps do not add more.
ROUNDING = 2e-5


# The training that probes repeat, in plain torch and sharded


@dataclass(frozen=True)
class Trained:
    """The results of a training, on the CPU."""

    losses: Tensor  # of each step, on this rank
    norms: Tensor  # of the gradients before they were clipped
    weights: dict[str, Tensor]  # whole parameters in fp32, by name

    def differences(self, other: "Trained") -> dict[str, float]:
        """Returns the largest relative differences of losses, norms, and the parameter that differs most. The
        difference from a NaN is infinite."""
        found = {name: _relative(getattr(self, name), getattr(other, name), each=True) for name in ("losses", "norms")}
        weights = {name: _relative(weight, other.weights[name], each=False) for name, weight in self.weights.items()}
        worst = max(weights, key=weights.__getitem__)
        return {**found, worst: weights[worst]}


def _relative(mine: Tensor, theirs: Tensor, *, each: bool) -> float:
    """The largest difference, relative to each element or to the largest one."""
    if not mine.numel():
        return 0.0
    size = theirs.abs() if each else theirs.abs().max()
    largest = ((mine - theirs).abs() / size.clamp_min(1e-30)).max().item()
    return largest if largest == largest else float("inf")


def tiny_llama(attention: str = "eager") -> LlamaForCausalLM:
    """Makes the model on the CPU, with random weights. It has one block more than the engine has slots. Eager
    attention is deterministic."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def random_batch(rank: int, step: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the batch of a rank at a step, the same on every machine."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, BATCH_SHAPE, generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def make_inner(kind: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimizer: adamw, or sgd. A rate that is a power of two makes each update of SGD one rounding; AdamW's
    epsilon keeps gradients that are rounding errors from moving a weight."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=2.0**-6)
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4, weight_decay=0.1)


def train_plain(model: nn.Module, num_ranks: int, device: torch.device) -> list[Trained]:
    """Trains in plain torch in one process, with the averaged gradients of the batches of all ranks."""
    optimizer = make_inner("adamw", model.parameters())
    losses: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    norms = []
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            loss = model(**random_batch(rank, step, device)).loss
            (loss / num_ranks).backward()
            losses[rank].append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: _on_host(param) for name, param in model.named_parameters()}
    return [Trained(_stacked(own), _stacked(norms), weights) for own in losses]


def train_sharded(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    rank: int,
    device: torch.device,
    steps: Iterable[int],
    *,
    clips: bool,
) -> Trained:
    """Trains a sharded model on the batches of one rank. All ranks call it."""
    losses, norms = [], []
    for step in steps:
        loss = model(**random_batch(rank, step, device)).loss
        loss.backward()
        losses.append(loss.detach())
        if clips:
            norms.append(optimizer.clip_grad_norm_(MAX_NORM).detach())
        optimizer.step()
        optimizer.zero_grad()
    with gathered(model):
        weights = {name: _on_host(param) for name, param in model.named_parameters()}
    return Trained(_stacked(losses), _stacked(norms), weights)


def _on_host(param: Tensor) -> Tensor:
    return param.detach().to("cpu", torch.float32, copy=True)


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).to("cpu", torch.float32) if values else torch.zeros(0)


# The probes


@dataclass
class Arguments:
    """Keys of `check`."""

    num_processes: int | None = option(
        None, "Number of processes to start. Default: one per device, 2 on CPUs. Omit it under torchrun."
    )
    use_cpu: bool = option(False, "Check the CPUs of a machine that has other devices.")
    output_dir: str | None = option(None, f"Folder to write {PAGE_NAME} to.")


class Wrong(HfZeroError):
    """Raised by a probe that has found something wrong."""


def run(arguments: Arguments) -> None:
    """Prints one line per probe and a conclusion. Raises [`HfZeroError`] if a probe has failed."""
    launched = launched_world_size(arguments.num_processes)
    found = None if arguments.use_cpu else torch.accelerator.current_accelerator(check_available=True)
    device_type = found.type if found is not None and hasattr(torch.get_device_module(found), "Stream") else "cpu"
    num_devices = 2 if device_type == "cpu" else torch.accelerator.device_count()
    num_processes = arguments.num_processes or num_devices
    if device_type != "cpu" and not launched and num_processes > num_devices:
        raise ConfigError(
            f"--num_processes {num_processes}: there are {num_devices} devices, one per process; give at most "
            f"{num_devices}, or --use_cpu"
        )
    if arguments.output_dir is not None:
        check_output_dir(arguments.output_dir)
    # Makes matrix products and sums over GPUs deterministic. CUDA and NCCL read these variables when they start.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")  # which does not add in a fixed order
    run_on(launched or num_processes, check, device_type, arguments.output_dir)


def check(device_type: str, output_dir: str | None) -> None:
    """Runs all probes. All ranks call it; rank 0 prints. A process that hangs prints its stack and exits."""
    faulthandler.dump_traceback_later(DEADLINE_SECONDS, exit=True, file=sys.__stderr__)
    try:
        _check(device_type, output_dir)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _check(device_type: str, output_dir: str | None) -> None:
    begin, probes, facts = time.monotonic(), Probes(device_type), defaultdict[str, str](str)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if probes.comm.rank == 0:
            print(line, flush=True)

    if probes.comm.rank == 0:  # asking for the memory of a device creates a context on it
        facts |= dict(env.facts())
    cpus = f"CPUs ({facts['processors']} processors)"
    device = cpus if device_type == "cpu" else facts.get("device 0", device_type)
    versions = "; ".join(f"{name} {facts[name]}" for name in VERSIONS if name in facts)
    say(f"{versions}\n{probes.comm.num_ranks} process(es) on {device}")
    failed, is_in_step, counts = list[str](), True, Counter[str]()
    for name, probe in probes.all().items():
        status, text = SKIPPED, "the ranks are out of step after the failure"
        if is_in_step:
            status, text, is_in_step = probes.agree(probe)
        failed += [name] if status == FAILED else []
        counts[status] += 1
        say(f"{status:8}{name}: {text}")
    probes.close()
    text = f"\n{counts[OK]} probes passed, {counts[FAILED]} failed, {counts[SKIPPED]} were skipped, in "
    text += f"{time.monotonic() - begin:.0f} s: "
    say(text + ("do not trust this machine with a run" if failed else "nothing wrong was found"))
    if output_dir is not None and probes.comm.rank == 0:
        page = Path(output_dir, PAGE_NAME)
        page.parent.mkdir(parents=True, exist_ok=True)
        content = html.escape("\n".join([*lines, "", *map(": ".join, facts.items())]))
        page.write_text(f"<!doctype html><title>hf-zero check</title><pre>{content}</pre>\n", encoding="utf-8")
        say(f"page: {page}")
    if failed:
        raise HfZeroError(f"check: {', '.join(failed)} failed; see above")


class Probes:
    """The probes. Each returns its result, or raises an error. All ranks call it."""

    def __init__(self, device_type: str):
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        self.device = local_device(device_type)
        self.comm: Comm = connect(self.device, timeout_seconds=TIMEOUT_SECONDS, bucket_nbytes="auto")
        self.is_alone = self.comm.num_ranks == 1
        if not self.is_alone:  # a group of its own: a failed probe may leave messages in the others
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_SECONDS))
        with quiet():
            self._model = tiny_llama()
        self._done: dict[tuple, Trained] = {}

    def all(self) -> dict[str, Callable[[], str]]:
        """Returns the probes of these devices by name, in order."""
        probes: dict[str, Callable[[], str]] = {
            **{f"stage {stage}": partial(self.stage, stage) for stage in range(4)},
            "save, load, resume": self.resume,
            "offload optimizer": partial(self.offload, "optimizer", 2),
            "offload params": partial(self.offload, "params", 3),
        }
        if not self.is_alone:
            probes |= {"all-gather": self.gather_rate, "reduce-scatter": self.reduce_rate}
        if self.device.type != "cpu":
            probes["host to device"] = partial(self.copy_rate, "host", "device")
            probes["device to host"] = partial(self.copy_rate, "device", "host")
        return {**probes, "copies in memory": partial(self.copy_rate, "device", "device")}

    def agree(self, probe: Callable[[], str]) -> tuple[str, str, bool]:
        """Runs a probe on all ranks. Returns its status and a line: of the first rank on which it failed, or the
        result on rank 0; and whether the ranks are in step, so that other probes may follow."""
        try:
            own = OK, probe(), True
        except Wrong as found:
            own = FAILED, f"rank {self.comm.rank}: {found}", True
        except Exception as error:
            text = f"rank {self.comm.rank}: {type(error).__name__}: {' '.join(str(error).split())}"
            own = FAILED, text, self.is_alone
        ranks: list[Any] = [own]
        if not self.is_alone:
            ranks *= self.comm.num_ranks
            dist.all_gather_object(ranks, own, group=self._group)
        failed = [each for each in ranks if each[0] == FAILED]
        # a CommError only says that another rank has failed
        status, text, _ = min(failed, key=lambda each: "CommError" in each[1]) if failed else ranks[0]
        return status, text, all(is_in_step for *_, is_in_step in ranks)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def stage(self, stage: int) -> str:
        """Compares a stage with stage 0 and with plain torch."""
        trained, first = self._trained(stage), self._trained(0)
        same = f"{self._same(trained, first, 'stage 0')}, " if stage else ""
        return f"{same}agrees with plain torch to {_compared(trained, self._plain, 'plain torch'):.1e}"

    def offload(self, offload: str, stage: int) -> str:
        """Compares training with and without offload. SGD rounds alike on the device and on the host."""
        offloaded, plain = self._trained(stage, "sgd", offload=offload), self._trained(stage, "sgd")
        return self._same(offloaded, plain, f"stage {stage} without it")

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
        """Measures an all-gather, and checks its result."""
        full, shard = self._buffer()
        full.fill_(-1)
        shard.fill_(self.comm.rank)

        def gather() -> None:
            self.comm.all_gather(full, shard, what="a measurement").wait()

        return self._exchange(gather, full, torch.arange(self.comm.num_ranks).repeat_interleave(shard.numel()))

    def reduce_rate(self) -> str:
        """Measures a reduce-scatter, and checks its result."""
        full, shard = self._buffer()
        full.fill_(self.comm.rank)

        def reduce() -> None:
            self.comm.reduce_scatter(full, shard, dtype=full.dtype, accumulate=False, what="a measurement").wait()

        return self._exchange(reduce, shard, torch.full(shard.shape, (self.comm.num_ranks - 1) / 2))

    def copy_rate(self, source: str, target: str) -> str:
        """Measures copies between page-locked memory of the host and the device, or inside the device's memory."""
        host: dict[str, Any] = {"device": "cpu", "pin_memory": True}
        values, copied = (
            torch.zeros(self._nbytes // 8, dtype=torch.int64, **(host if place == "host" else {"device": self.device}))
            for place in (source, target)
        )
        values.copy_(torch.arange(values.numel()))
        rate = self._rate(values.nbytes, lambda: copied.copy_(values, non_blocking=True))
        if not torch.equal(copied.cpu(), values.cpu()):
            raise Wrong("the copy differs from its source")
        return rate

    def _sharded(self, stage: int, kind: str = "adamw", **settings: Any) -> tuple[Any, ShardedOptimizer]:
        """Makes a sharded copy of the model. A single process shards it as one of several does (`strict`)."""
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

    @cached_property
    def _plain(self) -> Trained:
        return train_plain(copy.deepcopy(self._model).to(self.device), self.comm.num_ranks, self.device)[
            self.comm.rank
        ]

    def _same(self, trained: Trained, wanted: Trained, other: str) -> str:
        """Checks that two trainings are bit-equal, or equal to rounding where sums may be in another order."""
        differs = _compared(trained, wanted, other)
        if differs == 0.0:
            return f"bit-equal to {other}"
        # A GPU may choose another kernel for another alignment, and a backend may add up ranks in any order.
        if self.device.type == "cpu" and (self.comm.num_ranks <= 2 or self.comm.shared_memory is not None):
            raise Wrong(f"differs from {other} by {differs:.1e} of its size; expected the same bits")
        return f"equal to {other} to {differs:.1e} (another order of sums)"

    @property
    def _nbytes(self) -> int:
        return ON_CPU_NBYTES if self.device.type == "cpu" else ON_DEVICE_NBYTES

    def _buffer(self) -> tuple[Tensor, Tensor]:
        """Allocates a flat buffer as the engine does, and returns it with this rank's range of it."""
        full = self.comm.empty(self._nbytes // 4 // self.comm.num_ranks * self.comm.num_ranks, torch.float32)
        return full, full.chunk(self.comm.num_ranks)[self.comm.rank]

    def _exchange(self, act: Callable[[], object], result: Tensor, wanted: Tensor) -> str:
        Streams(self.device).synchronize()
        self.comm.barrier()  # all ranks have written what they send
        act()
        if not torch.allclose(result.cpu(), wanted.float(), rtol=1e-5):
            raise Wrong("the received values are wrong")
        through = "shared memory" if self.comm.shared_memory is not None else type(self.comm).__name__
        nbytes = self._nbytes * (self.comm.num_ranks - 1) // self.comm.num_ranks
        return f"{self._rate(nbytes, act)} received by each rank, through {through}"

    def _rate(self, nbytes: int, act: Callable[[], object]) -> str:
        """Returns the rate of the fastest of five times, after one that warms up."""
        streams, seconds = Streams(self.device), []
        for _ in range(6):
            streams.synchronize()
            begin = time.perf_counter()
            act()
            streams.synchronize()
            seconds.append(time.perf_counter() - begin)
        return f"{nbytes / min(seconds[1:]) / 1e9:.1f} GB/s"


def _compared(trained: Trained, wanted: Trained, other: str) -> float:
    """Returns the largest relative difference. Raises [`Wrong`] if rounding does not explain it."""
    where, worst = max(trained.differences(wanted).items(), key=lambda item: item[1])
    if worst > ROUNDING:
        raise Wrong(f"{where} differs from {other} by {worst:.1e} of its size; rounding would be below {ROUNDING}")
    return worst
