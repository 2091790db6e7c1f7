"""The state of an optimizer over shards, by parameter name, for any number of ranks and any stage."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_zero.config import MemoryTier, Residency
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import NamedShard
from hf_zero.errors import CheckpointError, LifecycleError
from hf_zero.optim.exchange import Exchange
from hf_zero.optim.flat_slices import FlatSlice
from hf_zero.optim.partial_step import sharing_state


# The tables by which 8-bit optimizers decode: they follow from the optimizer.
TABLES = ("qmap", "qmap1", "qmap2")


# Hyperparameters that only some optimizers have.
FAMILIES = ("betas", "momentum", "alpha", "etas", "rho", "lr_decay")
# Those that tell optimizers apart whose state looks the same.
SWITCHES = ("decoupled_weight_decay", "amsgrad", "nesterov", "centered", "maximize")


class StateRecords(torch.optim.Optimizer):
    """The part of `ShardedOptimizer` that reads and loads the state of its slices."""

    engine: ZeroEngine
    inner: torch.optim.Optimizer
    slices: list[FlatSlice]
    torn: str | None = None  # see `ShardedState`
    num_steps: int  # so far, in this training and those that it continues
    _exchanges: dict[torch.optim.Optimizer, Exchange]  # of those that are not elementwise
    _group_names: list[list[str]]  # the parameters of each group
    _inners: list[torch.optim.Optimizer]
    _inner_of: list[torch.optim.Optimizer]  # by index of the group
    _make_state_early: list[torch.optim.Optimizer]  # those that make their state when they are built
    _no_param: nn.Parameter

    def named_state_shards(self, resident: bool = False, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
        """Yields the state tensors, as (state key, range of one parameter, or of a tensor that belongs to it).

        Args:
            resident (`bool`): `False` gives the ranges that this rank owns, `True` those that it holds, and what is
                written to them lasts.
            values (`bool`): `False` where the tensors' shapes and dtypes are enough: what rests on disk stays there.
        """
        self.engine.finish_updates()
        turns = self._in_turn(writes=resident) if values else [self.slices]
        for flat_slice in (flat_slice for slices in turns for flat_slice in slices):
            only = (flat_slice.start, flat_slice.stop) if resident else flat_slice.saved
            yield from _shards_of(flat_slice, self.state.get(flat_slice.param, {}), only)

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """Returns the state that is one number per parameter, such as Adam's step count, by parameter name."""
        self.engine.finish_updates()
        own = [(each, _numbers(each, self.state[each.param])) for each in self.slices if self.state.get(each.param)]
        return {name: numbers for flat_slice, numbers in own for name in flat_slice.names}

    @torch.no_grad()
    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Makes the state new with the numbers of `state` and empty tensors, which are loaded afterwards. `state`: for
        every parameter that has state, its numbers by key (there may be none, as for SGD with momentum)."""
        self.engine.finish_updates()
        self.state.clear()
        self._cut_slices(lambda flat_slice, index: state.get(flat_slice.flat.infos[index].name))
        self._create_state()
        for flat_slice in self.slices:
            values = state.get(flat_slice.names[0]) if flat_slice.names else None
            if values is None:
                self.state.pop(flat_slice.param, None)
            else:
                _set_numbers(flat_slice, self.state[flat_slice.param], values, type(self.inner).__name__)

    def _cut_slices(self, key: Callable[[FlatSlice, int], object]) -> None:
        """Cuts slices wherever `key(slice, index of the parameter)` changes, with their state."""
        self.slices = [part for flat_slice in self.slices for part in self._parts_of(flat_slice, key)]
        self._share_groups()

    def _parts_of(self, flat_slice: FlatSlice, key: Callable[[FlatSlice, int], object]) -> list[FlatSlice]:
        cuts = flat_slice.cuts(partial(key, flat_slice))
        if len(cuts) == 1:
            return [flat_slice]
        state = self.state.pop(flat_slice.param, {})
        parts = []
        for start, stop in cuts:
            window = slice(start - flat_slice.start, stop - flat_slice.start)
            param = nn.Parameter(flat_slice.param.detach()[window], requires_grad=True)
            parts.append(FlatSlice(flat_slice.unit, flat_slice.gradient, start, stop, flat_slice.group, param))
            if state:
                self.state[param] = {name: _part_of(value, flat_slice.param, window) for name, value in state.items()}
        return parts

    def state_dict(self) -> dict:
        """Returns the groups and this rank's state, as torch gives them, with flat slices in place of parameters, and
        under "shards" whose they are.

        It serves who looks at them, and `load_state_dict` on the same rank of the same training. Checkpoints, which go
        by parameters' names, are written by `hf_zero.save_state`. All ranks call it. Raises [`LifecycleError`] where
        the state rests on disk."""
        self._refuse_on_disk("state_dict")
        self.engine.finish_updates()
        return {**super().state_dict(), "shards": self._shards()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the result of `state_dict` on this rank. All ranks call it. Raises [`LifecycleError`] for the state of
        another rank, number of ranks, stage or training."""
        self._refuse_on_disk("load_state_dict")
        self.engine.finish_updates()
        groups, state = state_dict["param_groups"], state_dict["state"]
        params = [param for group in self.param_groups for param in group["params"]]
        found, wanted = state_dict.get("shards"), self._shards()
        has_these = [len(group["params"]) for group in groups] == [len(group["params"]) for group in self.param_groups]
        if not (found == wanted and has_these and all(_fits(params[index], own) for index, own in state.items())):
            raise LifecycleError(
                f"load_state_dict: the state is of {_described(found)}, and this is {_described(wanted)}; load what "
                "state_dict() gave on this very rank of this training, or a checkpoint with hf_zero.load_state(...)"
            )
        self.torn = "load_state_dict"
        self.state.clear()
        group_of = [group for group in groups for _ in group["params"]]
        for index, values in state.items():
            param, group = params[index], group_of[index]
            is_on_device = bool(group.get("fused") or group.get("capturable"))  # also numbers, such as the step
            self.state[param] = {key: _taken(value, param.device, is_on_device) for key, value in values.items()}
        for group, saved in zip(self.param_groups, groups):
            group.update((key, value) for key, value in saved.items() if key != "params")
        self.torn = None

    def _shards(self) -> dict[str, Any]:
        """Tells whose state this rank's is, and of which ranges of which parameters."""
        engine = self.engine
        is_everyones = engine.plan.master is Residency.REPLICATED and engine.divided_over is None
        return {
            "rank": 0 if is_everyones else engine.comm.rank,
            "num_ranks": engine.comm.num_ranks,
            "stage": engine.stage,
            "ranges": [[*each.names, each.start, each.stop] for each in self.slices],
        }

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
        """Makes the inner optimizers create their state by a step with zero gradients on zeros. Groups stay as they
        are."""
        self._make_early_state()
        # one at a time: no more than one slice's values are set aside
        for flat_slice in (flat_slice for slices in self._in_turn(writes=True) for flat_slice in slices):
            values = flat_slice.param.data
            flat_slice.param.data = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
            try:
                self._step_alone(flat_slice.param, flat_slice.group)
            finally:
                flat_slice.param.data = values

    def _step_alone(self, param: nn.Parameter, group: int) -> None:
        """Steps one parameter of a group with zero gradients, which makes its state. Hooks of users see real steps
        alone."""
        inner, own = self._inner_of[group], {**self.param_groups[group], "params": [param]}
        if "train_mode" in own:
            own["train_mode"] = True  # schedule-free optimizers step in training alone
        copy = sharing_state(inner, [own])
        copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        param.grad = torch.zeros_like(param)
        try:
            type(copy).step(copy)
        finally:
            param.grad = None

    def groups_state(self) -> list[dict]:
        """Returns the groups' hyperparameters that can be written as JSON, each with its parameters' names."""
        found = []
        for group, names in zip(self.param_groups, self._group_names):
            values = {key: _number(value) for key, value in group.items() if key != "params"}
            plain = {key: value for key, value in values.items() if _is_plain(value)}
            found.append({**plain, "param_names": names, "num_steps": self.num_steps})
        return found

    def load_groups_state(self, groups: list[dict]) -> None:
        """Loads hyperparameters from the result of `groups_state`. The groups may be cut otherwise, where the
        hyperparameters agree within each of this run's. Raises [`CheckpointError`] when they do not, when the groups
        have other parameters, or are those of another kind of optimizer."""
        groups = _regrouped(groups, self._group_names)
        for group, saved in zip(self.param_groups, groups):
            if saved["param_names"]:
                _refuse_other_kind(group, saved)
        for group, saved in zip(self.param_groups, groups):
            self.num_steps = saved.get("num_steps", self.num_steps)
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):  # it stays one
                    group[key].fill_(value)
                elif key not in ("param_names", "num_steps"):
                    group[key] = tuple(value) if isinstance(value, list) else value

    def state_tensors(self) -> Iterator[tuple[Tensor, MemoryTier]]:
        """Yields every tensor of the state on this rank, and where it rests; of composite ones, their parts."""
        for flat_slice in self.slices:
            for tensor in self._tensors_of(flat_slice):
                yield tensor, flat_slice.flat.rest.masters.tier

    def _tensors_of(self, flat_slice: FlatSlice) -> list[Tensor]:
        return [tensor for _, tensor in _plain_tensors(self.state.get(flat_slice.param, {}), flat_slice.is_whole)]

    def expected_state(self) -> Iterator[tuple[torch.dtype, int, MemoryTier]]:
        """Yields dtype, number of elements and memory tier of every state tensor on this rank, without single numbers;
        before the first step without those of optimizers that are not elementwise."""
        state_dtypes = cache(self._state_dtypes)
        for flat_slice in self.slices:
            group, param, found = flat_slice.group, flat_slice.param, []
            if param in self.state:
                found = [(tensor.dtype, tensor.numel()) for tensor in self._tensors_of(flat_slice) if tensor.dim()]
            elif self._inner_of[group] not in self._exchanges:
                found = [(dtype, param.numel()) for dtype in state_dtypes(group, param.dtype).values()]
            yield from ((*each, flat_slice.flat.rest.masters.tier) for each in found)

    @property
    def late_state(self) -> list[str]:
        """The names of the optimizers whose state is not in `expected_state` before the first step."""
        return [type(inner).__name__ for inner in self._exchanges] if not self.state else []

    def _state_dtypes(self, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the dtypes of the state's tensors by key, for elements of this dtype."""
        found = _plain_tensors(self._try_state(group, dtype))
        return {key: tensor.dtype for key, tensor in found if tensor.dim()}

    def _try_state(self, group: int, dtype: torch.dtype) -> dict:
        """Returns the state that the optimizer makes for a few elements, and removes it from the optimizer."""
        param = nn.Parameter(torch.zeros(4, dtype=dtype, device=self._no_param.device))
        self._step_alone(param, group)
        return self.state.pop(param, {})

    def unsharded_state_nbytes(self) -> int:
        """Returns the bytes of the state over whole parameters, as far as it grows with them: what this rank has for
        each element, times the elements. 0 before the first step."""
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


def _described(shards: dict[str, Any] | None) -> str:
    if not isinstance(shards, dict):
        return "no sharded optimizer"
    ranks = f"rank {shards['rank']} of {shards['num_ranks']} at stage {shards['stage']}"
    return f"{ranks} with {len(shards['ranges'])} ranges of parameters"


def _fits(param: nn.Parameter, values: dict) -> bool:
    """Whether a saved state fits a slice: a tensor with a value for each element is 1-D or has a parameter's shape."""
    shaped = [value for value in values.values() if isinstance(value, Tensor) and value.dim() == param.dim() > 0]
    return not shaped or any(value.shape == param.shape for value in shaped)


def _taken(value, device: torch.device, numbers: bool):
    """Returns a copy of a saved value where `torch.optim.Optimizer.load_state_dict` puts it: tensors beside their
    parameter, single numbers only where `numbers` says so."""
    if not isinstance(value, Tensor):
        return value
    moved = value.to(device) if numbers or value.dim() else value
    return value.clone() if moved is value else moved


def _number(value: Any) -> Any:
    """Returns a hyperparameter, or each of several, without the tensor in which capturable optimizers have it."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _regrouped(groups: list[dict], names: list[list[str]]) -> list[dict]:
    """Returns saved groups as they are or, where this run's have other parameters, cut as this run's."""
    if [sorted(group["param_names"]) for group in groups] == [sorted(own) for own in names]:
        return groups
    of = {name: {**group, "param_names": []} for group in groups for name in group["param_names"]}
    if sorted(of) != sorted(chain.from_iterable(names)):
        raise CheckpointError(
            f"optimizer groups: the checkpoint has {len(groups)} with {[len(g['param_names']) for g in groups]} "
            f"parameters, this run {len(names)} with {[len(own) for own in names]}; "
            "resume with the settings of the run that saved it"
        )
    for first, name in ((own[0], name) for own in names for name in own):
        for key in of[first].keys() | of[name].keys():
            if of[first].get(key) != of[name].get(key):
                raise CheckpointError(
                    f"optimizer groups: {key} is {of[first].get(key)} for {first}, {of[name].get(key)} for {name}, "
                    "which are one group here; make the groups as in the run that saved it"
                )
    return [{**of[own[0]], "param_names": own} if own else {"param_names": []} for own in names]


def _refuse_other_kind(own: dict, saved: dict) -> None:
    """Refuses hyperparameters of another optimizer, of which there may be no state that tells (SGD)."""
    for key in FAMILIES:
        if (key in own) is not (key in saved):
            saved_by, here = (f"without {key}", f"has {key}={own[key]}") if key in own else (f"with {key}", "has none")
            raise CheckpointError(
                f"optimizer groups: the state was saved by an optimizer {saved_by}, this run's {here}; "
                "resume with the optimizer that it was saved with"
            )
    for key in SWITCHES:
        if key in own and key in saved and bool(own[key]) != bool(saved[key]):
            raise CheckpointError(
                f"optimizer groups: the state was saved with {key}={saved[key]}, this run's optimizer has {own[key]}; "
                "resume with the optimizer that it was saved with"
            )


def _plain_tensors(state: dict, is_whole: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors of one slice's state; a composite tensor is given as its parts.

    A quantized tensor consists of codes and scales. A tensor with several rows for the slice (AdEMAMix keeps both of
    its averages in one) consists of these rows, each of which can be cut where the slice can. `is_whole`: it belongs
    to a whole parameter, and is in whatever shape the optimizer likes."""
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value):
            yield from ((f"{key}_{part}", getattr(value, part)) for part in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor) and value.dim() == 2 and not is_whole:
            yield from ((f"{key}_{index}", row) for index, row in enumerate(value))
        elif isinstance(value, Tensor):
            yield key, value


def _is_number(value, flat_slice: FlatSlice) -> bool:
    """Whether a state value is one number for the whole slice, such as Adam's step count."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or (value.numel() == 1 and value.shape != flat_slice.param.shape)
    return isinstance(value, (int, float))


def _shards_of(flat_slice: FlatSlice, state: dict, only: tuple[int, int]) -> Iterator[tuple[str, NamedShard]]:
    """Yields the tensors of a slice's state, by parameter, as far as they belong to the range `only`.

    What has a value for each element is given as the parameter's. What is not so shaped belongs to a slice of one
    parameter: it has a value for each of the slice's blocks, or is the slice's, and whose is the first element's.
    Raises [`CheckpointError`] for state of several parameters at once."""
    found = {key: value for key, value in state.items() if not _is_number(value, flat_slice)}
    for key, tensor in _plain_tensors(found, flat_slice.is_whole):
        if key.endswith(TABLES):
            continue
        if tensor.shape == flat_slice.param.shape:
            for shard in flat_slice.named(tensor, only):
                yield key, shard
        elif len(flat_slice.indices) > 1:
            raise CheckpointError(
                f"optimizer state {key!r}: has shape {list(tensor.shape)} over {', '.join(flat_slice.names)}, "
                f"which are updated as {list(flat_slice.param.shape)}; set `whole_parameters = True` on the "
                "optimizer's class"
            )
        elif only[0] <= flat_slice.start < only[1]:
            yield key, _unlike_parameter(flat_slice, tensor)


def _unlike_parameter(flat_slice: FlatSlice, tensor: Tensor) -> NamedShard:
    """Returns state that is not shaped like the slice: the parameter's, or a part of it by blocks."""
    index = flat_slice.indices[0]
    span, info = flat_slice.flat.layout.spans[index], flat_slice.flat.infos[index]
    if (flat_slice.start, flat_slice.stop) == (span.offset, span.stop):
        return NamedShard(info.name, tensor.shape, 0, tensor.reshape(-1))
    block = (flat_slice.stop - flat_slice.start) // tensor.numel()
    shape = torch.Size([span.numel // block])
    return NamedShard(info.name, shape, (flat_slice.start - span.offset) // block, tensor)


def _numbers(flat_slice: FlatSlice, state: dict) -> dict[str, float]:
    """Returns the state that is one number per parameter. Raises [`CheckpointError`] for state that is neither tensor
    nor number."""
    for key, value in state.items():
        if value is not None and not isinstance(value, (Tensor, int, float)):
            raise CheckpointError(
                f"optimizer state {key!r} of {', '.join(flat_slice.names)}: a {type(value).__name__} cannot be saved; "
                "keep tensors and numbers in the state"
            )
    return {key: float(value) for key, value in state.items() if _is_number(value, flat_slice)}


def _set_numbers(flat_slice: FlatSlice, state: dict, values: dict[str, float], optimizer: str) -> None:
    """Writes saved numbers into a slice's state. Raises [`CheckpointError`] for numbers that it has no place for."""
    for key, value in values.items():
        if key not in state:
            raise CheckpointError(
                f"{flat_slice.names[0]}: the checkpoint has optimizer state {key!r}, {optimizer} has {sorted(state)}; "
                "resume with the optimizer that saved it"
            )
        old = state[key]
        state[key] = torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)


def _part_of(value, param: Tensor, window: slice):
    """Returns a window of a state value that is shaped like the slice, or has rows that are; a copy of another."""
    if not isinstance(value, Tensor):
        return value
    is_cut = param.dim() == 1 and value.dim() in (1, 2) and value.shape[-1:] == param.shape
    return value[..., window].contiguous() if is_cut else value.clone()


def _is_plain(value) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
