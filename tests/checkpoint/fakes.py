"""An engine and an optimizer that only slice, and ranks that are real gloo processes."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hf_zero.checkpoint.manifest import Manifest, SavedRun, run_of
from hf_zero.comm import connect
from tests import distributed


def world_of_one():
    return connect(torch.device("cpu"), timeout_seconds=60, bucket_nbytes=2**20)


def run_ranks(work, num_ranks: int, folder: Path, *args) -> None:
    """Runs `work(comm, folder, *args)` on every rank of a process group."""
    distributed.run_ranks(_on_rank, num_ranks, work, folder, args)


def _on_rank(work, folder: Path, args) -> None:
    work(world_of_one(), folder, *args)


@dataclass(frozen=True)
class FakeInfo:
    name: str
    shape: torch.Size
    save_dtype: torch.dtype
    trainable: bool = True


@dataclass(frozen=True)
class FakeShard:
    name: str
    shape: torch.Size
    start: int
    tensor: torch.Tensor


def owned_ranges(numel: int, comm) -> list[tuple[int, int]]:
    """This rank's part of a flat parameter, in two pieces, as where a parameter lies in two flat buffers."""
    start, stop = comm.rank * numel // comm.num_ranks, (comm.rank + 1) * numel // comm.num_ranks
    middle = (start + stop) // 2
    return [(first, last) for first, last in ((start, middle), (middle, stop)) if first < last]


class FakeEngine:
    """Masters are whole flat copies of the parameters; a rank hands out slices of them.

    Args:
        save_dtype (`torch.dtype`, *optional*): dtype in which parameters are saved; by default their own.
        master_dtype (`torch.dtype`, *optional*): by default that of the parameters.
    """

    def __init__(self, model, comm, stage=3, save_dtype=None, master_dtype=None):
        self.model, self.comm, self.stage = model, comm, stage
        self.num_updates = 0
        self.torn = {}
        self.masters = {
            name: parameter.detach().clone().reshape(-1).to(master_dtype or parameter.dtype)
            for name, parameter in model.named_parameters()
        }
        self._infos = [
            FakeInfo(name, parameter.shape, save_dtype or parameter.dtype)
            for name, parameter in model.named_parameters()
        ]

    newest_optimizer = None

    def compare_before_save(self):
        """Nothing is updated, and no rank has a replica."""

    def param_infos(self):
        return self._infos

    def ranges(self, numel: int, resident: bool) -> list[tuple[int, int]]:
        return [(0, numel)] if resident and self.stage == 0 else owned_ranges(numel, self.comm)

    def named_shards(self, resident=False, values=True, only=None):
        for info in self._infos if only is None else [info for info in self._infos if info.name in only]:
            for start, stop in self.ranges(info.shape.numel(), resident):
                yield FakeShard(info.name, info.shape, start, self.masters[info.name][start:stop])

    def begin_update(self):
        self.comm.barrier()

    def evict_all(self):
        """Nothing is gathered."""

    def mark_updated(self):
        self.comm.barrier()
        self.num_updates += 1


class FakeOptimizer:
    """Moments whose every element is known from its place, for the parameters that had a gradient."""

    keys = ("exp_avg", "exp_avg_sq")

    def __init__(self, engine, *, stepped=True, lr=0.1):
        self.engine = engine
        self.groups = [{"lr": lr, "betas": [0.9, 0.95], "param_names": [info.name for info in engine.param_infos()]}]
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.steps: dict[str, float] = {}
        if stepped:
            self.load_scalar_state({info.name: {"step": 12.0} for info in engine.param_infos()})
            for info in engine.param_infos():
                for key in self.keys:
                    self.state[info.name][key].copy_(expected_moment(info, key))

    def named_state_shards(self, resident=False, values=True):
        for info in self.engine.param_infos():
            for key, tensor in self.state.get(info.name, {}).items():
                for start, stop in self.engine.ranges(info.shape.numel(), resident):
                    yield key, FakeShard(info.name, info.shape, start, tensor[start:stop])

    def named_scalar_state(self):
        held = {shard.name for shard in self.engine.named_shards()}
        return {name: {"step": step} for name, step in self.steps.items() if name in held}

    def load_scalar_state(self, state):
        numel_of = {info.name: info.shape.numel() for info in self.engine.param_infos()}
        self.steps = {name: numbers["step"] for name, numbers in state.items() if "step" in numbers}
        self.state = {name: {key: torch.zeros(numel_of[name]) for key in self.keys} for name in state}

    def groups_state(self):
        return self.groups

    def load_groups_state(self, groups):
        self.groups = groups


def expected_moment(info, key: str) -> torch.Tensor:
    offset = sum(map(ord, info.name + key))
    return torch.arange(info.shape.numel(), dtype=torch.float32) / 7 + offset


def resealed(folder: Path, change=lambda run: None) -> None:
    """Writes the manifest of a folder anew, as if what lies there now had been saved, by a run whose record is
    changed."""
    run = run_of(folder)
    if run is not None:
        content = asdict(run)
        change(content)
        run = SavedRun(**content)
    Manifest.of_folder(folder, run=run).write(folder)
