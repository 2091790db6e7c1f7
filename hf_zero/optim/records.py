"""The state of an optimizer over shards, by parameter name: saved, loaded and counted."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_zero.config import MemoryTier
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import NamedShard
from hf_zero.errors import ConfigError, LifecycleError
from hf_zero.optim import slice_state
from hf_zero.optim.exchange import Exchange
from hf_zero.optim.flat_slices import FlatSlice


class StateRecords(torch.optim.Optimizer):
    """The half of `ShardedOptimizer` that knows the state of its slices. The other half makes them, and steps."""

    engine: ZeroEngine
    inner: torch.optim.Optimizer
    slices: list[FlatSlice]
    num_steps: int  # so far, in this training and those that it continues
    _exchanges: dict[torch.optim.Optimizer, Exchange]  # of those that are not elementwise
    _group_names: list[list[str]]  # the parameters of each group
    _inners: list[torch.optim.Optimizer]
    _inner_of: list[torch.optim.Optimizer]  # by index of the group
    _make_state_early: list[torch.optim.Optimizer]  # those that make their state when they are built
    _no_param: nn.Parameter

    def named_state_shards(self, resident: bool = False, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
        """The state tensors, as (state key, slice of one parameter, or of a tensor that belongs to it).

        Args:
            resident (`bool`): `False` gives the ranges that this rank owns, `True` those that it holds, and what is
                written to them lasts.
            values (`bool`): `False` where the tensors' shapes and dtypes are enough: what rests on disk stays there.
        """
        self.engine.finish_updates()
        turns = self._in_turn(writes=resident) if values else [self.slices]
        for flat_slice in (flat_slice for slices in turns for flat_slice in slices):
            only = (flat_slice.start, flat_slice.stop) if resident else flat_slice.saved
            yield from slice_state.state_shards(flat_slice, self.state.get(flat_slice.param, {}), only)

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """The state that is one number per parameter, such as Adam's step count, by parameter name."""
        self.engine.finish_updates()
        scalars: dict[str, dict[str, float]] = {}
        for flat_slice in self.slices:
            if self.state.get(flat_slice.param):
                scalars.update(
                    dict.fromkeys(flat_slice.names, slice_state.numbers(flat_slice, self.state[flat_slice.param]))
                )
        return scalars

    @torch.no_grad()
    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Makes the state anew, its numbers from `state`, its tensors empty: to be called before those are loaded.

        Args:
            state (`dict[str, dict[str, float]]`): for every parameter that has state, its numbers by key (there may
                be none, as for SGD with momentum).
        """
        self.engine.finish_updates()
        self.state.clear()
        self.slices = [
            part
            for flat_slice in self.slices
            for part in self._divided(flat_slice, lambda index, f=flat_slice.flat: state.get(f.infos[index].name))
        ]
        self._share_groups()
        self._create_state()
        for flat_slice in self.slices:
            values = state.get(flat_slice.names[0]) if flat_slice.names else None
            if values is None:
                self.state.pop(flat_slice.param, None)
            else:
                slice_state.set_numbers(flat_slice, self.state[flat_slice.param], values, type(self.inner).__name__)

    def _divided(self, flat_slice: FlatSlice, key) -> list[FlatSlice]:
        """Cuts a slice wherever `key(index of the parameter)` changes; its state goes with the parts."""
        cuts = flat_slice.cuts(key)
        if len(cuts) == 1:
            return [flat_slice]
        state = self.state.pop(flat_slice.param, {})
        parts = []
        for start, stop in cuts:
            window = slice(start - flat_slice.start, stop - flat_slice.start)
            param = nn.Parameter(flat_slice.param.detach()[window], requires_grad=True)
            parts.append(FlatSlice(flat_slice.unit, flat_slice.gradient, start, stop, flat_slice.group, param))
            if state:
                self.state[param] = {
                    key: slice_state.part_of(value, flat_slice.param, window) for key, value in state.items()
                }
        return parts

    def state_dict(self) -> dict:
        """The groups and this rank's state, as torch gives them, with the stretches of its shards in place of
        parameters: for who looks at them, and for `load_state_dict` on the same rank of the same training.
        Checkpoints, which go by parameters' names, are written by `hf_zero.save_state`. All ranks call it.

        Raises:
            `LifecycleError`: where the state rests on disk.
        """
        self._refuse_on_disk("state_dict")
        self.engine.finish_updates()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes back what `state_dict` gave on this rank. All ranks call it.

        Raises:
            `LifecycleError`: for groups or stretches that are not these: of another rank, stage or training.
        """
        self._refuse_on_disk("load_state_dict")
        self.engine.finish_updates()
        groups, state = state_dict["param_groups"], state_dict["state"]
        params = [param for group in self.param_groups for param in group["params"]]
        found = [len(group["params"]) for group in groups]
        wanted = [len(group["params"]) for group in self.param_groups]
        if found != wanted or any(not _fits(params[index], values) for index, values in state.items()):
            raise LifecycleError(
                f"load_state_dict: the state is of {found} stretches of shards and not of these {wanted}; load what "
                "state_dict() gave on this rank, or a checkpoint with hf_zero.load_state(...)"
            )
        self.state.clear()
        group_of = [group for group in groups for _ in group["params"]]
        for index, values in state.items():
            param, group = params[index], group_of[index]
            is_on_device = bool(group.get("fused") or group.get("capturable"))  # also numbers, such as the step
            self.state[param] = {key: _taken(value, param.device, is_on_device) for key, value in values.items()}
        for group, saved in zip(self.param_groups, groups):
            group.update((key, value) for key, value in saved.items() if key != "params")

    def _refuse_on_disk(self, what: str) -> None:
        if self.engine.disk is not None:
            raise LifecycleError(
                f"{what}: the optimizer's state rests on disk; use hf_zero.save_state(...) and hf_zero.load_state(...)"
            )

    def _make_early_state(self) -> None:
        """Makes, for the slices, the state of optimizers that make it when they are built (Adagrad)."""
        for slices in self._in_turn(writes=True) if self._make_state_early else ():
            chosen = {id(flat_slice.param) for flat_slice in slices}
            for inner in self._make_state_early:
                groups = [
                    {**group, "params": [param for param in group["params"] if id(param) in chosen]}
                    for group in inner.param_groups
                ]
                groups = [group for group in groups if group["params"]]
                self.state.update(type(inner)(groups, **inner.defaults).state if groups else {})

    def _create_state(self) -> None:
        """Lets the inner optimizers make their state, by a step with zero gradients on zeros; groups stay alike."""
        self._make_early_state()
        # one at a time: no more than one slice's values are set aside
        for flat_slice in (flat_slice for slices in self._in_turn(writes=True) for flat_slice in slices):
            values = flat_slice.param.data
            flat_slice.param.data = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
            self._step_alone(flat_slice.param, flat_slice.group)
            flat_slice.param.data = values

    def _step_alone(self, param: nn.Parameter, group: int) -> None:
        """Steps one parameter of a group with zero gradients, which makes its state."""
        inner, own = self._inner_of[group], self.param_groups[group]
        before = [dict(each) for each in inner.param_groups]
        for each in inner.param_groups:
            each["params"] = [param] if each is own else []
            if "train_mode" in each:
                each["train_mode"] = True  # schedule-free optimizers step in training alone
        param.grad = torch.zeros_like(param)
        inner.step()
        param.grad = None
        for each, kept in zip(inner.param_groups, before):
            each.clear()
            each.update(kept)

    def groups_state(self) -> list[dict]:
        """The groups' hyperparameters that can be written as JSON, each with its parameters' names."""
        return [
            {**slice_state.group_as_json(group), "param_names": names, "num_steps": self.num_steps}
            for group, names in zip(self.param_groups, self._group_names)
        ]

    def load_groups_state(self, groups: list[dict]) -> None:
        """Takes over hyperparameters from `groups_state`.

        Raises:
            `CheckpointError`: when the groups are not the same in number or in parameters.
        """
        slice_state.check_groups(groups, self._group_names)
        for group, saved in zip(self.param_groups, groups):
            self.num_steps = saved.get("num_steps", self.num_steps)
            own = {key: value for key, value in saved.items() if key not in ("param_names", "num_steps")}
            slice_state.set_group(group, own)

    def state_tensors(self) -> Iterator[tuple[Tensor, MemoryTier]]:
        """Every tensor of the state on this rank, and where it rests; of composite ones, their parts."""
        for flat_slice in self.slices:
            for tensor in self._tensors_of(flat_slice):
                yield tensor, flat_slice.flat.master_at

    def _tensors_of(self, flat_slice: FlatSlice) -> Iterator[Tensor]:
        for _, tensor in slice_state.plain_tensors(self.state.get(flat_slice.param, {}), flat_slice.is_whole):
            yield tensor

    def expected_state(self) -> Iterator[tuple[torch.dtype, int, MemoryTier]]:
        """Dtype, number of elements and resting place of every state tensor on this rank, single numbers left out;
        before the first step without those of optimizers that are not elementwise."""
        dtypes: dict[tuple[int, torch.dtype], list[torch.dtype]] = {}
        for flat_slice in self.slices:
            if flat_slice.param in self.state:
                tensors = (tensor for tensor in self._tensors_of(flat_slice) if tensor.dim())
                yield from ((tensor.dtype, tensor.numel(), flat_slice.flat.master_at) for tensor in tensors)
            elif self._inner_of[flat_slice.group] not in self._exchanges:
                key = (flat_slice.group, flat_slice.param.dtype)
                if key not in dtypes:
                    dtypes[key] = list(self._state_dtypes(*key).values())
                yield from ((dtype, flat_slice.param.numel(), flat_slice.flat.master_at) for dtype in dtypes[key])

    @property
    def late_state(self) -> list[str]:
        """The optimizers whose state is not among `expected_state` before the first step."""
        return [type(inner).__name__ for inner in self._exchanges] if not self.state else []

    def _state_dtypes(self, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the dtypes of the state's tensors by key, for elements of this dtype."""
        found = slice_state.plain_tensors(self._try_state(group, dtype))
        return {key: tensor.dtype for key, tensor in found if tensor.dim()}

    def _try_state(self, group: int, dtype: torch.dtype) -> dict:
        """Returns the state of a few elements, which the optimizer makes and forgets again."""
        param = nn.Parameter(torch.zeros(4, dtype=dtype, device=self._no_param.device))
        self._step_alone(param, group)
        return self.state.pop(param, {})

    def _refuse_in_files(self) -> None:
        """Refuses optimizers whose masters or state cannot come from the disk a piece at a time.

        Raises:
            `ConfigError`: naming the optimizer.
        """
        for group, inner in enumerate(self._inner_of):
            if inner in self._exchanges or hasattr(inner, "eval"):
                reason = "needs more than a part of the masters at a time"
            elif any(isinstance(v, Tensor) and v.dim() > 1 for v in self._try_state(group, torch.float32).values()):
                reason = "keeps more than one value for each element in one tensor of its state"
            else:
                continue
            raise ConfigError(
                f"offload_dir: {type(inner).__name__} {reason}; use another elementwise optimizer, such as AdamW, or "
                "offload to the host's memory, without offload_dir"
            )

    def unsharded_state_nbytes(self) -> int:
        """Bytes of the state over whole parameters, as far as it grows with them: what this rank has for each element,
        times the elements. 0 before the first step."""
        infos = [info for gradient in self.engine.gradients() for info in gradient.flat.infos]
        sizes = {info.name: info.shape.numel() for info in infos}
        nbytes = 0
        for inner in self._inners:
            slices = [flat_slice for flat_slice in self._slices_of(inner) if self.state.get(flat_slice.param)]
            tensors = [tensor for flat_slice in slices for tensor in self._tensors_of(flat_slice) if tensor.dim()]
            held = sum(flat_slice.stop - flat_slice.start for flat_slice in slices)
            if held:
                found = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                owned = [names for names, own in zip(self._group_names, self._inner_of) if own is inner]
                nbytes += found * sum(sizes[name] for names in owned for name in names) // held
        return nbytes


def _fits(param: nn.Parameter, values: dict) -> bool:
    """Whether state may be that of a stretch: what has a value for each element is 1-D, or of a parameter's shape."""
    shaped = [value for value in values.values() if isinstance(value, Tensor) and value.dim() == param.dim() > 0]
    return not shaped or any(value.shape == param.shape for value in shaped)


def _taken(value, device: torch.device, numbers: bool):
    """A copy of a value of a saved state where the optimizer wants it, as `torch.optim.Optimizer.load_state_dict` puts
    it: tensors beside their parameter, single numbers only where `numbers` says so."""
    if not isinstance(value, Tensor):
        return value
    moved = value.to(device) if numbers or value.dim() else value
    return value.clone() if moved is value else moved
