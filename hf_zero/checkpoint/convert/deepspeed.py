"""Checkpoints of DeepSpeed ZeRO, stages 1 to 3, read without DeepSpeed.

`mp_rank_00_model_states.pt` (stages 1 and 2) or `zero_pp_rank_{r}_mp_rank_00_model_states.pt` (stage 3) have the names
and shapes. `[bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt` have the rank's part of the fp32 values and of the
optimizer state, flat and without names:

- Stages 1 and 2: the parameters of a group are concatenated in the order of `param_shapes`, each followed by
  `param_alignment_paddings` elements (none in files of older versions). The result is split into equal parts, one per
  rank. The last ranks' fp32 values are saved without the padding at the end, their state with it.
- Stage 3: each parameter is split into equal parts, one per rank, the last one padded. A rank's parts of a group are
  concatenated. Frozen parameters are split the same way, in `frozen_param_fragments`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.convert.state import SavedState
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.errors import CheckpointError


_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_FLAT_KEYS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_STATE_KEYS = {2: "base_optimizer_state", 3: "optimizer_state_dict"}


def tag_folder(folder: Path) -> Path | None:
    """Returns the folder named in a checkpoint's `latest` (`global_step...`), or the folder itself. Returns `None` for
    other folders."""
    latest = folder / "latest"
    tag = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    if tag and (folder / tag).is_dir():
        return folder / tag
    return folder if any(folder.glob("*_optim_states.pt")) else None


def read(folder: Path) -> tuple[dict[str, Tensor], SavedState]:
    """Returns parameters and buffers by name (trained parameters as their fp32 masters), and the optimizer's state.
    Raises [`CheckpointError`] if files are missing, damaged, or not supported."""
    files, state = _Files.read(folder), SavedState()
    weights = {
        name: tensor
        for name, tensor in files.model["module"].items()
        if isinstance(tensor, Tensor) and (files.layout == 2 or name in files.model["buffer_names"])
    }
    weights |= files.frozen()
    groups: list[dict[str, Any]] = files.states[0]["param_groups"]
    for place in files.places():
        weights[place.name] = files.tensor(place, [flats[place.group] for flats in files.masters])
        # Stage 3 may have cut one of the user's groups into several flat groups.
        group = next((each for each in groups if place.group in each["params"]), {})
        state.settings[place.name] = {key: value for key, value in group.items() if key != "step"}
        of_ranks = [states["state"].get(place.group, {}) for states in files.states]
        steps = {"step": group["step"]} if "step" in group else {}  # DeepSpeed's fused Adam counts by group
        for key, value in (steps | of_ranks[0]).items():
            if isinstance(value, Tensor) and value.dim() == 1:
                value = files.tensor(place, [found[key] for found in of_ranks])
            state.put(place.name, key, value)
    for alias, name in (files.model.get("shared_params") or {}).items():
        if name in weights:
            weights[alias] = weights[name]
    return weights, state


@dataclass(frozen=True)
class _Place:
    """A parameter, its group, and its first element in the group's flat parts."""

    name: str
    shape: tuple[int, ...]
    group: int = 0
    offset: int = 0


@dataclass(frozen=True)
class _Files:
    """The opened files of one checkpoint."""

    folder: Path
    model: dict[str, Any]  # rank 0's model states
    optim: list[dict[str, Any]]  # every rank's optimizer states
    layout: int  # 2 for stages 1 and 2, 3 for stage 3

    @classmethod
    def read(cls, folder: Path) -> "_Files":
        folder = tag_folder(folder) or folder
        optim = [load_safely(path, mmap=True).get("optimizer_state_dict") or {} for path in _optim_paths(folder)]
        layout = next((layout for layout, key in _FLAT_KEYS.items() if key in optim[0]), 0)
        if not layout or isinstance(optim[0][_STATE_KEYS[layout]], list):
            raise CheckpointError(
                f"{folder}: has no partitions of ZeRO stages 1 to 3, or elastic ones; save it without "
                "elastic_checkpoint"
            )
        counts = optim[0]["partition_count"]
        count = max(counts) if isinstance(counts, list) else counts
        if count != len(optim):
            raise CheckpointError(
                f"{folder}: found optimizer states of {len(optim)} ranks, {count} saved; copy the files of all ranks"
            )
        model = load_safely(_model_path(folder, layout, 0), mmap=True)
        if not model.get("param_shapes"):
            raise CheckpointError(f"{folder}: its model states have no param_shapes; save with DeepSpeed 0.4 or later")
        return cls(folder, model, optim, layout)

    @property
    def masters(self) -> list[list[Tensor]]:
        return [states[_FLAT_KEYS[self.layout]] for states in self.optim]

    @property
    def states(self) -> list[dict[str, Any]]:
        return [states[_STATE_KEYS[self.layout]] for states in self.optim]

    def part_numel(self, shape: Sequence[int]) -> int:
        return math.ceil(math.prod(shape) / len(self.optim))

    def places(self) -> Iterator[_Place]:
        """Yields the parameters in the order of the files, and checks that they fill the groups."""
        paddings = self.optim[0].get("param_alignment_paddings") if self.layout == 2 else None
        for group, shapes in enumerate(self.model["param_shapes"]):
            offset = 0
            for index, (name, shape) in enumerate(shapes.items()):
                yield _Place(name, tuple(shape), group, offset)
                offset += math.prod(shape) if self.layout == 2 else self.part_numel(shape)
                offset += paddings[group][index] if paddings else 0
            parts = [groups[group].numel() for groups in self.masters]
            # At stages 1 and 2 the end is padded to a multiple of twice the number of ranks.
            found, most = (sum(parts), offset + 2 * len(parts) - 1) if self.layout == 2 else (parts[0], offset)
            if not offset <= found <= most:
                raise CheckpointError(
                    f"{self.folder}: flat group {group} has {found} elements, but its parameters have {offset}; the "
                    "files belong to different checkpoints, or to an unsupported version of DeepSpeed"
                )

    def tensor(self, place: _Place, parts: Sequence[Tensor]) -> Tensor:
        """Returns a parameter, or state of its shape, from the ranks' flat parts of its group."""
        numel, first = math.prod(place.shape), place.offset
        if self.layout == 2:
            pieces = []
            for part in parts:
                pieces.append(part[max(0, first) : max(0, first + numel)])
                first -= part.numel()
        else:  # equal parts, one in each rank's flat tensor
            pieces = [part[first : first + self.part_numel(place.shape)] for part in parts]
        flat = torch.cat(pieces)[:numel]
        if flat.numel() != numel:
            raise CheckpointError(
                f"{self.folder}: {place.name} has {flat.numel()} elements in the files, but shape "
                f"{list(place.shape)}; the checkpoint is incomplete, copy all of its files"
            )
        return flat.view(place.shape)

    def frozen(self) -> Mapping[str, Tensor]:
        """Returns the parameters that were not trained at stage 3. At other stages they are in the model states."""
        shapes = self.model.get("frozen_param_shapes") if self.layout == 3 else None
        if not shapes:
            return {}
        others = [load_safely(_model_path(self.folder, 3, rank), mmap=True) for rank in range(1, len(self.optim))]
        fragments = [model["frozen_param_fragments"] for model in (self.model, *others)]
        return {
            name: self.tensor(_Place(name, tuple(shape)), [of[name].reshape(-1) for of in fragments])
            for name, shape in shapes.items()
        }


def _optim_paths(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = _OPTIM_FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path}: was saved with tensor, pipeline or expert parallelism, which is not supported; "
                "pass a checkpoint of a run with ZeRO alone"
            )
        if found.setdefault(int(match.group(1)), path) != path:
            raise CheckpointError(
                f"{folder}: has {found[int(match.group(1))].name} and {path.name}, of two runs; remove those of one"
            )
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder}: found optimizer states of ranks {sorted(found)}; copy the files of all ranks"
        )
    return [found[rank] for rank in sorted(found)]


def _model_path(folder: Path, layout: int, rank: int) -> Path:
    prefix = "" if layout == 2 else f"zero_pp_rank_{rank}_"
    return folder / f"{prefix}mp_rank_00_model_states.pt"
