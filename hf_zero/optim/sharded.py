"""Optimizers over this rank's shards: elementwise ones, those with state in blocks, and those of whole parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_zero.engine.access import unit_of
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.flat import NamedShard
from hf_zero.errors import LifecycleError
from hf_zero.optim import state as run_state
from hf_zero.optim.combined import CombinedOptimizer
from hf_zero.optim.exchange import Exchange
from hf_zero.optim.grain import grain_of, inner_optimizers, refuse_unknown
from hf_zero.optim.norm import global_norm
from hf_zero.optim.overrides import carry_overrides
from hf_zero.optim.runs import Run, make_runs, make_shares, named_groups


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs a `torch.optim` optimizer over shards instead of parameters (ZeRO stage 1, section 5.1).

    An elementwise optimizer sees flat stretches of the shard. One that looks at whole parameters, or keeps state in
    blocks of elements, sees each of its parameters, or the blocks of it, on one rank: see `Exchange`.

    Args:
        engine (`ZeroEngine`): the sharded model.
        optimizer (`type`, `torch.optim.Optimizer` or a list of them): a class, which is then built on the trainable
            parameters; or an optimizer that was built on the model's parameters: its groups and hyperparameters are
            kept, and it must not have stepped yet; or several, each of parameters of its own, that step together.
        params (iterable, *optional*): with a class, parameters or groups of them, as `torch.optim` takes them.
        kwargs: with a class, its hyperparameters.

    Raises:
        `UnsupportedError`: for an optimizer of which it is not known what it looks at.
        `ConfigError`: when a group holds a tensor that is not a parameter of the model.
        `LifecycleError`: when the optimizer has stepped already.
    """

    def __init__(self, engine: ZeroEngine, optimizer, params=None, **kwargs):
        if isinstance(optimizer, type):
            refuse_unknown(optimizer)
            if params is None:
                params = [p for p in engine.model.parameters() if p.requires_grad]
            optimizer = optimizer(params, **kwargs)
        elif isinstance(optimizer, (list, tuple)):
            optimizer = CombinedOptimizer(*optimizer)
        self.engine = engine
        self.inner = optimizer
        self._no_param = nn.Parameter(torch.empty(0, device=engine.comm.device))
        self._inners = inner_optimizers(optimizer)
        self._inner_of = [inner for inner in self._inners for _ in inner.param_groups]  # by index of the group
        grains = [grain_of(inner) for inner in self._inner_of]
        self._make_state_early = [inner for inner in self._inners if _refuse_stepped(inner)]
        optimizer.state.clear()
        frozen = [flat for unit in engine.units for flat in unit.flats if not flat.trainable]
        self._frozen = [(info.name, p) for flat in frozen for info, p in zip(flat.infos, flat.params)]
        self._refuse_unfrozen()
        _refuse_added(engine.model)
        self._group_names = named_groups(engine, optimizer)
        shares = make_shares(engine, optimizer, grains)
        self.runs = make_runs(engine, optimizer, grains, shares)
        self._exchanges: dict[torch.optim.Optimizer, Exchange] = {}  # of those that are not elementwise
        self._share_groups()
        for inner, grain in dict(zip(self._inner_of, grains)).items():
            runs = self._runs_of(inner)
            carry_overrides(inner, runs)
            if not grain.is_element:
                own_shares = [share for share in shares if self._inner_of[share.group] is inner]
                self._exchanges[inner] = Exchange(engine.comm, own_shares, runs)
        self._make_early_state()

    def _runs_of(self, inner: torch.optim.Optimizer) -> list[Run]:
        return [run for run in self.runs if self._inner_of[run.group] is inner]

    def _share_groups(self) -> None:
        """Lets the inner optimizer's groups hold the runs. Groups and state are one object for both optimizers, so
        that schedulers may change either."""
        for index, group in enumerate(self.inner.param_groups):
            # where this rank updates none of a group, schedulers still find one (`AdafactorSchedule`)
            group["params"] = [run.param for run in self.runs if run.group == index] or [self._no_param]
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
        for inner in self._inners:
            with _scaling(inner, scale):
                self._step_by_unit(inner) if inner in self._exchanges else inner.step()
        self._drop_runs_gradients()
        self.engine.end_step()
        return loss

    def _step_by_unit(self, inner: torch.optim.Optimizer) -> None:
        """Steps once for each unit, whose parameters are then here; what a group counts goes up once all the same."""
        exchange = self._exchanges[inner]
        before = [dict(group) for group in inner.param_groups]
        for unit in exchange.units:
            exchange.bring(unit)
            for group, kept in zip(inner.param_groups, before):
                own = {id(param) for param in kept["params"]}
                params = [run.param for run in self.runs if run.unit is unit and id(run.param) in own]
                group.update(kept, params=params)
            inner.step()
            exchange.take_back(unit)
        self._share_groups()

    def train(self) -> None:
        """Schedule-free optimizers: the parameters become those at which gradients are taken. All ranks call it."""
        self._switch("train")

    def eval(self) -> None:
        """Schedule-free optimizers: the parameters become those to evaluate and to save. All ranks call it."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        switched = [
            inner
            for inner in self._inners
            if hasattr(inner, mode)
            and any(group.get("train_mode") is not (mode == "train") for group in inner.param_groups)
        ]
        if switched:
            self.engine.begin_update()
            for inner in switched:
                getattr(inner, mode)()
            self.engine.mark_updated(only_trained=True)

    def _can_scale(self) -> bool:
        """Whether the update itself can scale the gradients: torch's fused optimizers do, without a pass over them."""
        fused = all(getattr(inner, "_step_supports_amp_scaling", False) for inner in self._inners)
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
            used = gradient.is_reduced and any(gradient.used[index] for index in run.indices)
            if not used or not run.is_held:
                run.param.grad = None
                continue
            offset = 0 if gradient.reduced.numel() == run.flat.layout.full_numel else run.flat.owned[0]
            grad = gradient.reduced[run.start - offset : run.stop - offset].view(run.param.shape)
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
        cuts = run.cuts(key)
        if len(cuts) == 1:
            return [run]
        state = self.state.pop(run.param, {})
        parts = []
        for start, stop in cuts:
            window = slice(start - run.start, stop - run.start)
            param = nn.Parameter(run.param.detach()[window], requires_grad=True)
            parts.append(Run(run.unit, run.gradient, start, stop, run.group, param))
            if state:
                self.state[param] = {key: run_state.part_of(value, run.param, window) for key, value in state.items()}
        return parts

    # Checkpoints

    def named_state_shards(self, resident: bool = False) -> Iterator[tuple[str, NamedShard]]:
        """The state tensors, as (state key, run of one parameter, or of a tensor that belongs to it).

        Args:
            resident (`bool`): `False` gives the ranges that this rank owns, `True` those that it holds.
        """
        for run in self.runs:
            only = (run.start, run.stop) if resident else run.saved
            yield from run_state.state_shards(run, self.state.get(run.param, {}), only)

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """The state that is one number per parameter, such as Adam's step count, by parameter name."""
        scalars: dict[str, dict[str, float]] = {}
        for run in self.runs:
            if self.state.get(run.param):
                scalars.update(dict.fromkeys(run.names, run_state.numbers(run, self.state[run.param])))
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
            values = state.get(run.names[0]) if run.names else None
            if values is None:
                self.state.pop(run.param, None)
            else:
                run_state.set_numbers(run, self.state[run.param], values, type(self.inner).__name__)

    def _make_early_state(self) -> None:
        """The state of optimizers that make it when they are built (Adagrad), for the runs."""
        for inner in self._make_state_early:
            groups = [{**group, "params": list(group["params"])} for group in inner.param_groups if group["params"]]
            self.state.update(type(inner)(groups, **inner.defaults).state if groups else {})

    def _create_state(self) -> None:
        """Lets the inner optimizers make their state, by a step with zero gradients on zeros; groups stay alike."""
        self._make_early_state()
        for run in self.runs:  # one at a time: what is set aside is one run
            values = run.param.data
            run.param.data = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
            self._step_alone(run.param, run.group)
            run.param.data = values

    def _step_alone(self, param: nn.Parameter, group: int) -> None:
        """A step of one parameter with zero gradients, as one of a group, which makes its state."""
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
            {**run_state.group_as_json(group), "param_names": names}
            for group, names in zip(self.param_groups, self._group_names)
        ]

    def load_groups_state(self, groups: list[dict]) -> None:
        """Takes over hyperparameters from `groups_state`.

        Raises:
            `CheckpointError`: when the groups are not the same in number or in parameters.
        """
        run_state.check_groups(groups, self._group_names)
        for group, saved in zip(self.param_groups, groups):
            run_state.set_group(group, {key: value for key, value in saved.items() if key != "param_names"})

    def state_tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state on this rank; of quantised ones, those that they are made of."""
        for run in self.runs:
            yield from (tensor for _, tensor in run_state.plain_tensors(self.state.get(run.param, {})))

    def expected_state(self) -> Iterator[tuple[torch.dtype, int]]:
        """Dtype and number of elements of every state tensor on this rank, single numbers left out; before the first
        step without those of optimizers that are not elementwise."""
        dtypes: dict[tuple[int, torch.dtype], list[torch.dtype]] = {}
        for run in self.runs:
            if run.param in self.state:
                tensors = [tensor for _, tensor in run_state.plain_tensors(self.state[run.param])]
                yield from ((tensor.dtype, tensor.numel()) for tensor in tensors if tensor.dim())
            elif self._inner_of[run.group] not in self._exchanges:
                key = (run.group, run.param.dtype)
                if key not in dtypes:
                    dtypes[key] = self._try_state(*key)
                yield from ((dtype, run.param.numel()) for dtype in dtypes[key])

    @property
    def late_state(self) -> list[str]:
        """The optimizers whose state is not among `expected_state` before the first step."""
        return [type(inner).__name__ for inner in self._exchanges] if not self.state else []

    def _try_state(self, group: int, dtype: torch.dtype) -> list[torch.dtype]:
        """The dtypes of the state of a few elements, which the optimizer makes and forgets again."""
        param = nn.Parameter(torch.zeros(4, dtype=dtype, device=self._no_param.device))
        self._step_alone(param, group)
        return [tensor.dtype for _, tensor in run_state.plain_tensors(self.state.pop(param, {})) if tensor.dim()]

    def unsharded_state_nbytes(self) -> int:
        """Bytes of the state over whole parameters, as far as it grows with them: what this rank has for each element,
        times the elements. 0 before the first step."""
        sizes = {info.name: info.shape.numel() for info in self.engine.param_infos()}
        nbytes = 0
        for inner in self._inners:
            runs = [run for run in self._runs_of(inner) if self.state.get(run.param)]
            tensors = [t for run in runs for _, t in run_state.plain_tensors(self.state[run.param]) if t.dim()]
            held = sum(run.stop - run.start for run in runs)
            if held:
                found = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                owned = [names for names, own in zip(self._group_names, self._inner_of) if own is inner]
                nbytes += found * sum(sizes[name] for names in owned for name in names) // held
        return nbytes

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


def _refuse_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fresh optimizer has state already, because its class makes it when it is built.

    Raises:
        `LifecycleError`: when it has state because it has stepped.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in params if p in optimizer.state]
    if any(float(state.get("step", 1)) > 0 for state in states):
        raise LifecycleError(
            f"{type(optimizer).__name__}: has stepped on whole parameters already; give a fresh optimizer"
        )
    return bool(states)


def _refuse_added(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.requires_grad and unit_of(param) is None:
            raise LifecycleError(
                f"{name}: was added after the model was sharded; add what is to be trained (an adapter, a head) "
                "before, or load the model anew"
            )
