"""Any elementwise optimizer over this rank's shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from hf_zero.engine.access import unit_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import Flat, NamedShard
from hf_zero.engine.gradient import Gradient
from hf_zero.engine.unit import Unit
from hf_zero.errors import CheckpointError, ConfigError, LifecycleError, UnsupportedError
from hf_zero.optim.norm import global_norm


# Optimizers whose update of an element depends on that element's own history alone, by class name.
ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adagrad RMSprop NAdam RAdam Adamax ASGD Rprop Adadelta Lion Lion32bit FusedAdam".split()
)


@dataclass(eq=False)
class Run:
    """A stretch of one flat buffer that one optimizer group updates: what the inner optimizer sees as a parameter.

    Args:
        unit (`Unit`): whose buffer.
        gradient (`Gradient`): of the buffer.
        start (`int`): first element, counted in the buffer.
        stop (`int`): one past the last.
        group (`int`): index of the optimizer group.
        param (`nn.Parameter`): 1-D view of the master.
    """

    unit: Unit
    gradient: Gradient
    start: int
    stop: int
    group: int
    param: nn.Parameter

    @property
    def flat(self) -> Flat:
        return self.gradient.flat

    @cached_property
    def indices(self) -> list[int]:
        """The parameters that lie in it, wholly or in part."""
        return [piece.index for piece in self.flat.layout.pieces(self.start, self.stop)]

    def named(self, tensor: Tensor, only: tuple[int, int]) -> Iterator[NamedShard]:
        """The parameters' runs inside `tensor`, which is shaped like `param`, limited to the range `only`."""
        covers = (self.start, self.stop)
        if max(covers[0], only[0]) < min(covers[1], only[1]):
            yield from self.flat.named_shards(tensor, covers, only)


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs an elementwise `torch.optim` optimizer over flat shards instead of parameters (ZeRO stage 1, section 5.1).

    Args:
        engine (`ZeroEngine`): the sharded model.
        optimizer (`type` or `torch.optim.Optimizer`): a class, which is then built on the trainable parameters, or an
            optimizer that was built on the model's parameters: its groups and hyperparameters are kept, and it must
            not have stepped yet.
        params (iterable, *optional*): with a class, parameters or groups of them, as `torch.optim` takes them.
        kwargs: with a class, its hyperparameters.

    Raises:
        `UnsupportedError`: for an optimizer that is not elementwise.
        `ConfigError`: when a group holds a tensor that is not a parameter of the model.
        `LifecycleError`: when the optimizer has stepped already.
    """

    def __init__(self, engine: ZeroEngine, optimizer, params=None, **kwargs):
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        refuse_non_elementwise(cls)
        if isinstance(optimizer, type):
            if params is None:
                params = [p for p in engine.model.parameters() if p.requires_grad]
            optimizer = optimizer(params, **kwargs)
        makes_state_early = _refuse_stepped(optimizer)
        optimizer.state.clear()
        self.engine = engine
        self.inner = optimizer
        frozen = [flat for unit in engine.units for flat in unit.flats if not flat.trainable]
        self._frozen = [(info.name, p) for flat in frozen for info, p in zip(flat.infos, flat.params)]
        self._refuse_unfrozen()
        _refuse_added(engine.model)
        self._group_names = [[name for name, _ in group] for group in _named_groups(engine, optimizer)]
        self.runs = _make_runs(engine, optimizer)
        self._makes_state_early = makes_state_early
        self._share_groups()
        if makes_state_early:
            self._make_early_state()

    def _share_groups(self) -> None:
        """Lets the inner optimizer's groups hold the runs. Groups and state are one object for both optimizers, so
        that schedulers may change either."""
        for index, group in enumerate(self.inner.param_groups):
            group["params"] = [run.param for run in self.runs if run.group == index]
        if not hasattr(self, "param_groups"):
            placeholder = [dict(group, params=[nn.Parameter(torch.empty(0))]) for group in self.inner.param_groups]
            super().__init__(placeholder, self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def add_param_group(self, param_group: dict) -> None:
        """Refused: the runs are cut by the groups when the optimizer is built."""
        if hasattr(self, "param_groups") and self.param_groups is self.inner.param_groups:
            raise LifecycleError(
                "add_param_group: the shards are assigned; give all groups when the optimizer is built"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """Updates the masters by the averaged gradients; the compute copies follow. The gradients are consumed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_unfrozen()
        self.engine.begin_update()
        scale = self.engine.take_grad_scale() if self._can_scale() else None
        self.engine.finish_gradients()
        self._leave_out_unused()
        self._lend_gradients()
        with _scaling(self.inner, scale):
            self.inner.step()
        self._drop_runs_gradients()
        self.engine.end_step()
        return loss

    def _can_scale(self) -> bool:
        """Whether the update itself can scale the gradients: torch's fused optimizers do, without a pass over them."""
        fused = getattr(self.inner, "_step_supports_amp_scaling", False)
        return fused and all(group.get("fused") for group in self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of this step."""
        self._drop_runs_gradients()
        self.engine.clear_gradients()

    def _drop_runs_gradients(self) -> None:
        for run in self.runs:
            run.param.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Args:
            max_norm (`float`): the bound; `inf` only measures.
            norm_type (`float`): order of the norm, `inf` included.

        Returns:
            `Tensor`: 0-d fp32, the norm before clipping, equal on every rank.
        """
        self.engine.finish_gradients()
        gradients = [gradient for gradient in self.engine.gradients() if gradient.is_reduced]
        norm = global_norm(gradients, self.engine.comm, norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if scale < 1.0 or not torch.isfinite(scale):
            self.engine.scale_gradients(scale)
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Bounds every element of the averaged gradients to [-clip_value, clip_value]."""
        self.engine.finish_gradients()
        for gradient in self.engine.gradients():
            if gradient.is_reduced:
                gradient.reduced.clamp_(-clip_value, clip_value)

    def _lend_gradients(self) -> None:
        for run in self.runs:
            gradient = run.gradient
            if not gradient.is_reduced or not any(gradient.used[index] for index in run.indices):
                run.param.grad = None
                continue
            offset = 0 if gradient.reduced.numel() == run.flat.layout.full_numel else run.flat.owned[0]
            grad = gradient.reduced[run.start - offset : run.stop - offset]
            run.param.grad = grad if grad.dtype is run.param.dtype else grad.to(run.param.dtype)

    def _refuse_unfrozen(self) -> None:
        unfrozen = next((name for name, param in self._frozen if param.requires_grad), None)
        if unfrozen is not None:
            raise LifecycleError(
                f"{unfrozen}: was unfrozen after the model was sharded; choose what is trained (requires_grad, or "
                "PEFT's set_adapter) before, or load the model anew"
            )

    def _leave_out_unused(self) -> None:
        """A parameter that no rank used has no gradient, and an optimizer leaves it alone, decay included.

        The ranks agree by one vector. A run in which used and unused parameters meet is divided between them, with its
        state, so that each keeps a step count of its own, as in an optimizer on whole parameters.
        """
        gradients = list(self.engine.gradients())
        own = [used for gradient in gradients for used in gradient.used]
        if not own:
            return
        flags = self.engine.comm.all_gather_vector(
            torch.tensor(own, dtype=torch.uint8, device=self.engine.comm.device)
        )
        anywhere = flags.amax(dim=0).tolist()
        for gradient in gradients if not all(own) else ():
            gradient.used = [bool(flag) for flag in anywhere[: len(gradient.used)]]
            anywhere = anywhere[len(gradient.used) :]
        if all(used for gradient in gradients for used in gradient.used):
            return
        self.runs = [
            part for run in self.runs for part in self._divided(run, lambda index, g=run.gradient: g.used[index])
        ]
        self._share_groups()

    def _divided(self, run: Run, key) -> list[Run]:
        """The run cut wherever `key(index of the parameter)` changes; its state goes with the parts."""
        cuts = _cuts(run, key)
        if len(cuts) == 1:
            return [run]
        state = self.state.pop(run.param, {})
        parts = []
        for start, stop in cuts:
            window = slice(start - run.start, stop - run.start)
            param = nn.Parameter(run.param.detach()[window], requires_grad=True)
            parts.append(Run(run.unit, run.gradient, start, stop, run.group, param))
            if state:
                self.state[param] = {key: _part(value, run.param, window) for key, value in state.items()}
        return parts

    # Checkpoints

    def named_state_shards(self, resident: bool = False) -> Iterator[tuple[str, NamedShard]]:
        """The state tensors that are shaped like parameters, as (state key, run of one parameter).

        Args:
            resident (`bool`): `False` gives the ranges that this rank owns, `True` those that it holds.
        """
        for run in self.runs:
            only = (run.start, run.stop) if resident else run.flat.owned
            for key, value in self.state.get(run.param, {}).items():
                if isinstance(value, Tensor) and value.shape == run.param.shape and value.dim() == 1:
                    for shard in run.named(value, only):
                        yield key, shard

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """The state that is one number per parameter, such as Adam's step count, by parameter name."""
        scalars: dict[str, dict[str, float]] = {}
        for run in self.runs:
            values = {
                key: float(value)
                for key, value in self.state.get(run.param, {}).items()
                if not isinstance(value, Tensor) or value.shape != run.param.shape or value.dim() != 1
                if value is not None
            }
            for index in run.indices:
                if self.state.get(run.param):
                    scalars[run.flat.infos[index].name] = values
        return scalars

    @torch.no_grad()
    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Makes the state anew, its numbers from `state`, its tensors empty: to be called before those are loaded.

        Args:
            state (`dict[str, dict[str, float]]`): for every parameter that has state, its numbers by key (there may
                be none, as for SGD with momentum).
        """
        self.state.clear()
        self.runs = [
            part
            for run in self.runs
            for part in self._divided(run, lambda index, f=run.flat: state.get(f.infos[index].name))
        ]
        self._share_groups()
        self._create_state()
        for run in self.runs:
            names = [run.flat.infos[index].name for index in run.indices]
            values = state.get(names[0]) if names else None
            if values is None:
                self.state.pop(run.param, None)
                continue
            for key, value in values.items():
                if key not in self.state[run.param]:
                    raise CheckpointError(
                        f"{names[0]}: the checkpoint has optimizer state {key!r}, {type(self.inner).__name__} has "
                        f"{sorted(self.state[run.param])}; resume with the optimizer that saved it"
                    )
                old = self.state[run.param][key]
                self.state[run.param][key] = (
                    torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)
                )

    def _make_early_state(self) -> None:
        """The state of an optimizer that makes it when it is built (Adagrad), for the runs."""
        groups = [{**group, "params": list(group["params"])} for group in self.inner.param_groups]
        self.state.update(
            type(self.inner)([group for group in groups if group["params"]], **self.inner.defaults).state
        )

    def _create_state(self) -> None:
        """Lets the inner optimizer make its state, by a step with zero gradients and no effect on the masters."""
        if self._makes_state_early:
            self._make_early_state()
        for run in self.runs:  # one at a time: what is set aside is one run
            for index, group in enumerate(self.inner.param_groups):
                group["params"] = [run.param] if index == run.group else []
            values = run.param.detach().clone()
            run.param.grad = torch.zeros_like(run.param)
            self.inner.step()
            run.param.copy_(values)
            run.param.grad = None
        self._share_groups()

    def groups_state(self) -> list[dict]:
        """The groups' hyperparameters that can be written as JSON, each with its parameters' names."""
        groups = []
        for group, names in zip(self.param_groups, self._group_names):
            plain = {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            groups.append({**plain, "param_names": names})
        return groups

    def load_groups_state(self, groups: list[dict]) -> None:
        """Takes over hyperparameters from `groups_state`.

        Raises:
            `CheckpointError`: when the groups are not the same in number or in parameters.
        """
        if [sorted(group["param_names"]) for group in groups] != [sorted(names) for names in self._group_names]:
            raise CheckpointError(
                f"optimizer groups: the checkpoint has {len(groups)} with {[len(g['param_names']) for g in groups]} "
                f"parameters, this run {len(self._group_names)} with {[len(n) for n in self._group_names]}; "
                "resume with the settings of the run that saved it"
            )
        for group, saved in zip(self.param_groups, groups):
            for key, value in saved.items():
                if key != "param_names":
                    group[key] = tuple(value) if isinstance(value, list) else value

    def state_dict(self):
        raise LifecycleError("state_dict: the optimizer's state is sharded; save with hf_zero.save_state(...)")

    def load_state_dict(self, state_dict):
        raise LifecycleError("load_state_dict: the optimizer's state is sharded; load with hf_zero.load_state(...)")


@contextmanager
def _scaling(optimizer: torch.optim.Optimizer, scale: Tensor | None) -> Iterator[None]:
    """Lets a fused optimizer multiply the gradients by `scale` on its way; its own attribute is a divisor."""
    if scale is None:
        yield
        return
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), scale.device)
    optimizer.grad_scale, optimizer.found_inf = scale.reciprocal().to(device), None
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def refuse_non_elementwise(cls: type) -> None:
    """Refuses optimizers that look at whole parameters.

    Raises:
        `UnsupportedError`: naming the optimizer and those that work.
    """
    if cls.__name__ not in ELEMENTWISE and not getattr(cls, "elementwise", False):
        raise UnsupportedError(
            f"optimizer {cls.__name__}: is not known to update each element by itself, so it cannot run on shards; "
            f"use one of {', '.join(sorted(ELEMENTWISE))}, or set `elementwise = True` on a class that is"
        )


def _refuse_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fresh optimizer has state already, because its class makes it when it is built.

    Raises:
        `LifecycleError`: when it has state because it has stepped.
    """
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise LifecycleError(
            f"{type(optimizer).__name__}: has stepped on whole parameters already; give a fresh optimizer"
        )
    return bool(optimizer.state)


def _refuse_added(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.requires_grad and unit_of(param) is None:
            raise LifecycleError(
                f"{name}: was added after the model was sharded; add what is to be trained (an adapter, a head) "
                "before, or load the model anew"
            )


def _named_groups(engine: ZeroEngine, optimizer) -> list[list[tuple[str, nn.Parameter]]]:
    """Each group's parameters with their names."""
    names = {id(p): info.name for unit in engine.units for f in unit.flats for info, p in zip(f.infos, f.params)}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"optimizer group {index}: a tensor of shape {tuple(param.shape)} is no parameter of the model; "
                    "build the optimizer on model.parameters()"
                )
        groups.append([(names[id(param)], param) for param in group["params"]])
    return groups


def _make_runs(engine: ZeroEngine, optimizer) -> list[Run]:
    """Cuts every trainable buffer, as far as this rank updates it, where the optimizer group changes."""
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    runs = []
    for unit in engine.units:
        for gradient in unit.gradients:
            flat = gradient.flat
            start, stop = flat.held
            whole = Run(unit, gradient, start, stop, -1, None)
            groups = [group_of.get(id(p), -1) for p in flat.params]
            for low, high in _cuts(whole, groups.__getitem__):
                indices = [piece.index for piece in flat.layout.pieces(low, high)]
                if not indices or groups[indices[0]] < 0:
                    continue
                param = nn.Parameter(flat.master.detach()[low - start : high - start])
                runs.append(Run(unit, gradient, low, high, groups[indices[0]], param))
    return runs


def _cuts(run: Run, key) -> list[tuple[int, int]]:
    """The ranges of a run in which `key(index of the parameter)` is the same; padding goes with what is before it."""
    places = run.flat.layout.places
    cuts, last = [run.start], None
    for position, index in enumerate(run.indices):
        value = key(index)
        if position and value != last:
            cuts.append(places[index].offset)
        last = value
    return list(zip(cuts, [*cuts[1:], run.stop]))


def _part(value, param: Tensor, window: slice):
    """A part of one state value: a window of what is shaped like the run, a copy of what is not."""
    if isinstance(value, Tensor):
        return value[window] if value.shape == param.shape and value.dim() == 1 else value.clone()
    return value


def _is_plain(value) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
