"""The ranks on which `check` tries a machine, and how they agree on what was found."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_zero.activation.shard_model import shard_with
from hf_zero.comm import Comm, DistributedComm, connect
from hf_zero.comm.distributed import NativeComm
from hf_zero.comm.loopback import LoopbackComm, run_loopback
from hf_zero.errors import HfZeroError
from hf_zero.recipes.bandwidth import Wrong
from hf_zero.recipes.tiny_training import shard_on_loopback


Result = TypeVar("Result")

OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
LOOPBACK_RANKS = 2
TIMEOUT_SECONDS, AGREEMENT_SECONDS = 40.0, 90.0  # who waits for a rank that has failed gives up before the agreement
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

            def play(comm: LoopbackComm) -> Result:
                with _seen_by_sanitizer():
                    return act(comm, partial(shard_on_loopback, comm))

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
