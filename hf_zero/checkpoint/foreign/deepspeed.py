"""Checkpoints of DeepSpeed ZeRO, stages 1 to 3, read without DeepSpeed.

`mp_rank_00_model_states.pt` (stages 1 and 2) or `zero_pp_rank_{r}_mp_rank_00_model_states.pt` (stage 3) hold the names
and shapes; `[bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt` hold the rank's part of the fp32 values and of the
state, flat and without names:

- stages 1 and 2: the parameters of a group lie one behind the other, in the order of `param_shapes`, each followed by
  `param_alignment_paddings` elements (files of older versions have none); the whole is cut into equal parts, one a
  rank. The last ranks' fp32 values are saved without the padding at the end, their state with it.
- stage 3: every parameter is cut into equal parts, one a rank, the last one padded; a rank's parts of a group lie one
  behind the other. Frozen parameters are cut likewise, in `frozen_param_fragments`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_zero.checkpoint.folders import is_file_name
from hf_zero.checkpoint.foreign.parts import ForeignState, ForeignTensor, boxes_of
from hf_zero.checkpoint.foreign.trusted import load_mapped
from hf_zero.errors import CheckpointError


_OPTIM_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MAX_TAG_NBYTES = 4096
_FLAT_KEYS = {2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_STATE_KEYS = {2: "base_optimizer_state", 3: "optimizer_state_dict"}


def tag_folder(folder: Path) -> Path | None:
    """Returns the folder `global_step...` that a checkpoint's `latest` names, or the folder itself; `None` for other
    folders."""
    latest = folder / "latest"
    if latest.is_file():
        with open(latest, "rb") as file:
            tag = file.read(_MAX_TAG_NBYTES).decode(errors="replace").strip()
        if is_file_name(tag) and (folder / tag).is_dir():
            return folder / tag
    return folder if any(folder.glob("*_optim_states.pt")) else None


def read_weights(folder: Path) -> dict[str, ForeignTensor]:
    """Returns parameters and buffers by name: fp32 masters of trained parameters, and the others as the model had
    them. Raises [`CheckpointError`] where files are missing, damaged, or of a kind that is not imported."""
    files = _Files.read(folder)
    weights = {
        name: ForeignTensor.of(tensor)
        for name, tensor in files.model["module"].items()
        if isinstance(tensor, Tensor) and (files.layout == 2 or name in files.model["buffer_names"])
    }
    weights |= files.frozen()
    for name, location in files.locations():
        weights[name] = files.tensor(name, location, [groups[location.group] for groups in files.masters])
    for alias, name in (files.model.get("shared_params") or {}).items():
        if name in weights:
            weights[alias] = weights[name]
    return weights


def read_state(folder: Path, groups: Sequence[dict]) -> ForeignState:
    """Returns the optimizer's state and hyperparameters by parameter name. Raises as `read_weights`."""
    files, state = _Files.read(folder), ForeignState()
    for name, location in files.locations():
        found, settings = files.state_of(0, location.group), files.settings_of(location.group)
        state.settings[name] = settings
        if "step" in settings and "step" not in found:  # DeepSpeed's fused Adam counts by group
            state.put(name, "step", settings["step"])
        for key, value in found.items():
            if isinstance(value, Tensor) and value.dim() == 1:
                state.put(name, key, files.tensor(f"{name}.{key}", location, files.state_parts(location.group, key)))
            else:
                state.put(name, key, value)
    return state


@dataclass(frozen=True)
class _ParamLocation:
    """The location of a parameter: its group, its offset in the group's flat parts, and its shape."""

    group: int
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Files:
    """The opened files of one checkpoint."""

    folder: Path
    model: dict[str, Any]  # rank 0's model states
    optim: list[dict[str, Any]]  # every rank's optimizer states
    layout: int  # 2 for that of stages 1 and 2, 3 for that of stage 3

    @classmethod
    def read(cls, folder: Path) -> "_Files":
        folder = tag_folder(folder) or folder
        paths = _optim_paths(folder)
        optim = [load_mapped(path).get("optimizer_state_dict") for path in paths]
        layout = next((layout for layout, key in _FLAT_KEYS.items() if key in (optim[0] or ())), None)
        if layout is None:
            raise CheckpointError(f"{paths[0]}: has no ZeRO partitions; give a checkpoint of ZeRO stage 1, 2 or 3")
        count = optim[0]["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(paths):
            raise CheckpointError(
                f"{folder}: found optimizer states of {len(paths)} ranks, {count} saved; copy the files of all ranks"
            )
        model = load_mapped(_model_path(folder, layout, 0))
        if not model.get("param_shapes"):
            raise CheckpointError(f"{folder}: its model states have no param_shapes; save with DeepSpeed 0.4 or later")
        files = cls(folder, model, optim, layout)
        files.check_groups()
        return files

    @property
    def ranks(self) -> range:
        return range(len(self.optim))

    @property
    def masters(self) -> list[list[Tensor]]:
        return [states[_FLAT_KEYS[self.layout]] for states in self.optim]

    def check_groups(self) -> None:
        wanted = len(self.model["param_shapes"])
        for rank, groups in enumerate(self.masters):
            if len(groups) != wanted:
                raise CheckpointError(
                    f"{self.folder}: rank {rank} has {len(groups)} flat groups, the model states describe {wanted}; "
                    "copy all files of one checkpoint"
                )
        if isinstance(self.optim[0][_STATE_KEYS[self.layout]], list):
            raise CheckpointError(
                f"{self.folder}: was saved with elastic_checkpoint, which is not imported; save without it"
            )

    def part_numel(self, shape: Sequence[int]) -> int:
        return math.ceil(math.prod(shape) / len(self.optim))

    def locations(self) -> Iterator[tuple[str, _ParamLocation]]:
        """Yields (parameter, location) in the order of the files. Checks that they fill the groups."""
        paddings = self.optim[0].get("param_alignment_paddings") if self.layout == 2 else None
        for group, shapes in enumerate(self.model["param_shapes"]):
            offset = 0
            for index, (name, shape) in enumerate(shapes.items()):
                yield name, _ParamLocation(group, offset, tuple(shape))
                offset += math.prod(shape) if self.layout == 2 else self.part_numel(shape)
                offset += paddings[group][index] if paddings else 0
            self._check_filled(group, offset)

    def _check_filled(self, group: int, numel: int) -> None:
        ranks = self.ranks if self.layout == 2 else (0,)
        found = sum(self.masters[rank][group].numel() for rank in ranks)
        # At stages 1 and 2 the end is padded to a multiple of twice the number of ranks.
        most = numel + 2 * len(self.optim) - 1 if self.layout == 2 else numel
        if not numel <= found <= most:
            raise CheckpointError(
                f"{self.folder}: flat group {group} has {found} elements, its parameters {numel}; "
                "the files are not of one checkpoint, or of a version of DeepSpeed that lays them out otherwise"
            )

    def tensor(self, name: str, location: _ParamLocation, parts: Sequence[Tensor]) -> ForeignTensor:
        """Returns a parameter, or state of its shape, from the ranks' flat parts of its group."""
        numel, offset = math.prod(location.shape), location.offset
        if self.layout == 2:
            boxes = list(boxes_of(parts, offset, numel))
        else:  # cut into equal parts, one in each rank's flat tensor, the last one padded
            most, boxes = self.part_numel(location.shape), []
            for start, part in zip(itertools.count(0, most), parts):
                boxes += boxes_of([part], offset, min(most, numel - start), start=start)
        return ForeignTensor.build(name, location.shape, boxes, is_flat=True)

    def frozen(self) -> dict[str, ForeignTensor]:
        """Returns the parameters that were not trained at stage 3. At other stages they lie among the model's
        tensors."""
        shapes = self.model.get("frozen_param_shapes") if self.layout == 3 else None
        if not shapes:
            return {}
        models = [self.model, *(load_mapped(_model_path(self.folder, 3, rank)) for rank in self.ranks[1:])]
        return {
            name: self.tensor(
                name,
                _ParamLocation(0, 0, tuple(shape)),
                [model["frozen_param_fragments"][name].reshape(-1) for model in models],
            )
            for name, shape in shapes.items()
        }

    def state_of(self, rank: int, group: int) -> Mapping[str, Any]:
        return self.optim[rank][_STATE_KEYS[self.layout]]["state"].get(group, {})

    def state_parts(self, group: int, key: str) -> list[Tensor]:
        parts = [self.state_of(rank, group).get(key) for rank in self.ranks]
        if not all(isinstance(part, Tensor) for part in parts):
            raise CheckpointError(f"{self.folder}: {key} of flat group {group} is not in the files of all ranks")
        return parts

    def settings_of(self, group: int) -> dict[str, Any]:
        """Returns hyperparameters by parameter name. Stage 3 may have cut one of the user's groups into several flat
        groups."""
        for settings in self.optim[0][_STATE_KEYS[self.layout]]["param_groups"]:
            if group in settings["params"]:
                return {key: value for key, value in settings.items() if key != "params"}
        return {}


def _optim_paths(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = _OPTIM_FILE.fullmatch(path.name)
        if match is None or int(match.group(3)) != 0:
            raise CheckpointError(
                f"{path}: is of a run with tensor, pipeline or expert parallelism, which is not imported; "
                "give a checkpoint of a run with ZeRO alone"
            )
        if found.setdefault(int(match.group(2)), path) != path:
            raise CheckpointError(
                f"{folder}: has {found[int(match.group(2))].name} and {path.name}, of two runs; remove those of one"
            )
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(
            f"{folder}: found optimizer states of ranks {sorted(found)}; copy the files of all ranks"
        )
    return [found[rank] for rank in sorted(found)]


def _model_path(folder: Path, layout: int, rank: int) -> Path:
    prefix = "" if layout == 2 else f"zero_pp_rank_{rank}_"
    return folder / f"{prefix}mp_rank_00_model_states.pt"


def num_steps(folder: Path) -> int | None:
    """Returns how many optimizer steps the run had taken."""
    return _Files.read(folder).model.get("global_steps")
