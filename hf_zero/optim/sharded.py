"""Optimizers over this rank's shards: elementwise, blockwise, and those that need full parameters."""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.config import MemoryTier, Residency
from hf_zero.engine import Sharded, guards, require_engine
from hf_zero.engine.flat import NamedShard
from hf_zero.engine.guards import marked_as_slices
from hf_zero.engine.unit import Unit
from hf_zero.errors import ConfigError, LifecycleError
from hf_zero.optim.combined import CombinedOptimizer
from hf_zero.optim.exchange import Exchange, make_partitions
from hf_zero.optim.flat_slices import (
    FlatSlice,
    carry_overrides,
    make_slices,
    named_groups,
    refuse_added,
    refuse_step_alone,
    refuse_unfrozen,
)
from hf_zero.optim.gradients import (
    describe_nonfinite,
    expect_finite,
    heeds_found_inf,
    known_norm,
    measure_norm,
    norms_by_unit,
    refuse_nonfinite,
)
from hf_zero.optim.granularity import (
    granularity_of,
    has_early_state,
    inner_optimizers,
    refuse_divided,
    refuse_in_files,
    refuse_unknown,
)
from hf_zero.optim.host import IN_BACKWARD, Gradients, HostSteps
from hf_zero.optim.partial_step import PartialStep, lent, sharing_state
from hf_zero.optim.state_values import (
    describe_shards,
    is_plain,
    numbers_of,
    part_of,
    plain_number,
    plain_tensors,
    refuse_other_kind,
    regrouped,
    set_numbers,
    shards_of,
    state_fits,
    taken_over,
)
from hf_zero.sharding.slots import trim
from hf_zero.storage import Swap


logger = logging.getLogger(__name__)


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs a `torch.optim` optimizer over shards instead of parameters (ZeRO stage 1, section 5.1).

    An elementwise optimizer sees flat slices of the shard. For an optimizer that needs full parameters, or keeps state
    per block of elements, each parameter or block is updated by one rank, see `Exchange`.

    Args:
        model (`nn.Module` or [`ShardedModel`]): the sharded model.
        optimizer (`type`, `torch.optim.Optimizer` or a list of them): a class, which is built on the trainable
            parameters; or an optimizer built on the model's parameters, which must not have stepped yet and whose
            groups and hyperparameters are kept; or several optimizers of different parameters, which step together.
        params (iterable, *optional*): if `optimizer` is a class, parameters or parameter groups as for `torch.optim`.
        kwargs: if `optimizer` is a class, its hyperparameters.

    Raises:
        `UnsupportedError`: if it is not known how the optimizer combines elements.
        `ConfigError`: if a group contains a tensor that is not a parameter of the model, or `optimizer` is not an
            optimizer.
        `LifecycleError`: if the optimizer has already stepped.
    """

    def __init__(self, model: Sharded, optimizer, params=None, **kwargs):
        engine = require_engine(model)
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
        self._inner_of = [inner for inner in self._inners for _ in inner.param_groups]  # by group index
        granularities = [granularity_of(inner) for inner in self._inner_of]
        if engine.divided_over is not None:
            refuse_divided(optimizer, granularities)
        self._make_state_early = [inner for inner in self._inners if has_early_state(inner)]
        optimizer.state.clear()
        frozen = [flat for flat in engine.flats if not flat.trainable]
        self._frozen = [(info.name, p) for flat in frozen for info, p in zip(flat.infos, flat.params)]
        refuse_unfrozen(self._frozen)
        refuse_added(engine.model)
        self._group_names = named_groups(engine, optimizer)
        partitions = make_partitions(engine, optimizer, granularities)
        others = [own for each in partitions if (own := each.flat_slice(engine.comm.shard_group.rank))]
        is_elementwise = [each.is_elementwise for each in granularities]
        self.slices = make_slices(engine, optimizer, is_elementwise, others)
        self._exchanges: dict[torch.optim.Optimizer, Exchange] = {}  # for those that are not elementwise
        self._share_groups()
        for inner, granularity in dict(zip(self._inner_of, granularities)).items():
            slices = self._slices_of(inner)
            carry_overrides(inner, slices)
            inner.register_step_pre_hook(refuse_step_alone)
            if not granularity.is_elementwise:
                own_partitions = [partition for partition in partitions if self._inner_of[partition.group] is inner]
                self._exchanges[inner] = Exchange(engine.comm.shard_group, own_partitions, slices)
        self._swap = self._make_swap()
        self._make_early_state()
        self.torn: str | None = None  # see `ShardedState`
        self.num_steps = 0  # including those of the runs that this one resumes
        self.step_was_skipped = False  # the last step, because of non-finite gradients
        self._host = HostSteps(engine, self._swap)
        engine.updates.add(self._host)
        engine.optimizer = weakref.ref(self)

    def _make_swap(self) -> Swap | None:
        """Creates the `Swap` for masters on disk and reserves space for their state.

        Raises:
            `ConfigError`: for optimizers that need all masters at once, or stack their state.
            `StorageError`: on all ranks, if the disk does not have enough space.
        """
        disk = self.engine.disk
        if disk is None:
            return None
        refuse_in_files(self._inner_of, self._exchanges, self._try_state)
        state_dtypes = cache(self._state_dtypes)
        return Swap(
            disk.updated,
            slices=[flat_slice for flat_slice in self.slices if flat_slice.on_disk is not None],
            state=self.state,
            state_of=lambda flat_slice: state_dtypes(flat_slice.group, flat_slice.param.dtype),
        )

    def _loaded_slices(self, *, writes: bool) -> Iterator[list[FlatSlice]]:
        """Yields the slices while their masters and state are in memory: first those in memory, then those on disk,
        one part at a time.

        Args:
            writes (`bool`): write changes of masters and state back to disk.
        """
        yield [flat_slice for flat_slice in self.slices if flat_slice.on_disk is None]
        if self._swap is not None:
            on_disk = [flat_slice for flat_slice in self.slices if flat_slice.on_disk is not None]
            for turn in self._swap.walk(on_disk, writes=writes):
                yield turn.slices

    def _slices_of(self, inner: torch.optim.Optimizer) -> list[FlatSlice]:
        return [flat_slice for flat_slice in self.slices if self._inner_of[flat_slice.group] is inner]

    def _share_groups(self) -> None:
        """Puts the slices into the inner optimizer's groups. Both optimizers share groups and state, so schedulers may
        use either."""
        for index, group in enumerate(self.inner.param_groups):
            # schedulers expect a parameter in every group (`AdafactorSchedule`), even if this rank updates none
            own = [flat_slice.param for flat_slice in self.slices if flat_slice.group == index]
            group["params"] = marked_as_slices(own or [self._no_param])
        if not hasattr(self, "param_groups"):
            placeholder = [dict(group, params=[nn.Parameter(torch.empty(0))]) for group in self.inner.param_groups]
            super().__init__(placeholder, self.inner.defaults)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def add_param_group(self, param_group: dict) -> None:
        """Raises [`LifecycleError`]: slices are assigned to groups when the optimizer is built."""
        if hasattr(self, "param_groups") and self.param_groups is self.inner.param_groups:
            raise LifecycleError(
                "add_param_group: the shards are already assigned; pass all groups when the optimizer is built"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """Updates the masters with the averaged gradients and the compute copies from the masters, then drops the
        gradients.

        Raises:
            `NonFiniteError`: on all ranks, if a gradient is not finite and the setting `nonfinite` is "stop".
            `LifecycleError`: if another optimizer was built on the model after this one.
        """
        guards.refuse_other_optimizer(self.engine, self)
        loss, self.step_was_skipped = None, False
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_unfrozen(self._frozen)
        self.engine.begin_update(partial(self.engine.finish_gradients, applies_scale=not self._can_scale()))
        if not self._host.is_spent:  # otherwise `in_backward` did it
            self.engine.take_writes()
        self.engine.finish_host_updates()
        self._host.refuse_outdated()
        if not self._device_skips_steps and not self._may_step():
            return loss
        found_inf = None
        if self._device_skips_steps:
            found_inf = expect_finite(self.engine, self.num_steps, self._uncount)
        if not self.num_steps:  # the optimizer is about to allocate its state
            trim(self.engine.comm.device)
        with guards.noting_torn(self.engine, "an optimizer step"):
            self._update(found_inf)
        return loss

    def _update(self, found_inf: Tensor | None) -> None:
        """Updates masters and state, and starts refreshing the compute copies."""
        if not all(used for gradient in self.engine.gradients for used in gradient.used):
            # split between used and unused parameters, so that each keeps its own step count
            self._cut_slices(lambda flat_slice, index: flat_slice.gradient.used[index])
        scale = self.engine.take_grad_scale()
        grads = self._gradients_of(self.engine.units)
        for inner in self._inners:
            if inner in self._exchanges:
                self._step_by_unit(inner, grads, scale)
        elementwise = [inner for inner in self._inners if inner not in self._exchanges]
        offloaded = {unit: own for unit, own in grads.items() if unit.is_offloaded}
        on_host = self._host.begin(elementwise, offloaded, scale) if self.engine.plan.is_offloaded else None
        on_device = {unit: own for unit, own in grads.items() if not unit.is_offloaded}
        self._step_on_device(elementwise, on_device, scale, found_inf)
        if on_host is not None:
            self._host.end(on_host)
        self.num_steps += 1
        self.engine.end_step()
        guards.drop_torn(self.engine, IN_BACKWARD)

    def _may_step(self) -> bool:
        """Whether to take the step: the gradients are finite, or `nonfinite` is "ignore". The same on all ranks."""
        setting = self.engine.config.nonfinite
        if setting == "ignore" or (bool(known_norm(self.engine).isfinite()) and not self._host.met_nonfinite):
            return True
        norms = norms_by_unit(self.engine)
        if setting == "stop":
            refuse_nonfinite(self.engine, self.num_steps, norms, was_updated=self._host.is_spent)
        found = describe_nonfinite(self.engine, self.num_steps, norms)
        if self.engine.comm.rank == 0:
            logger.warning("%s; the step is skipped", found)
        self._skip_step()
        return False

    def _skip_step(self) -> None:
        self.step_was_skipped = True
        self.engine.drop_step()

    @property
    def _device_skips_steps(self) -> bool:
        """Whether the device skips steps with non-finite gradients by itself, so the host need not wait for it."""
        is_known_later = self.engine.runs_ahead and self.engine.config.nonfinite == "stop" and self._can_scale()
        return is_known_later and all(map(heeds_found_inf, self._inners))

    def _uncount(self) -> None:
        self.num_steps -= 1

    def _step_on_device(self, inners: list, grads: Gradients, scale: Tensor | None, found_inf: Tensor | None) -> None:
        with lent(pair for own in grads.values() for pair in own) as params:
            for inner in inners:
                step = PartialStep(inner)
                step.step(params, scale, found_inf)
                step.finish()

    def _step_by_unit(self, inner: torch.optim.Optimizer, grads: Gradients, scale: Tensor | None) -> None:
        """Executes the step unit by unit, with the slices of other ranks that this rank updates."""
        exchange, step = self._exchanges[inner], PartialStep(inner)
        for unit in exchange.units:
            with lent(grads.get(unit, [])), exchange.borrowed(unit):
                step.step([flat_slice.param for flat_slice in self.slices if flat_slice.unit is unit], scale)
        step.finish()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Updates each unit as soon as it has its gradients, concurrently with backward, if masters are offloaded to
        the host. Use it for the last backward before `step`; the gradients cannot be clipped afterwards.

        With masters on the device, with an optimizer that is not elementwise, or with steps that may have to be
        skipped (`nonfinite="skip"`), `step` does the update instead, with the same result. If an exception is
        raised inside the context, some units are updated and others are not.
        """
        config = self.engine.config
        is_later = config.nonfinite == "skip" or self._exchanges
        if not self.engine.plan.is_offloaded or is_later:
            yield
            return
        refuse_unfrozen(self._frozen)
        self.engine.begin_update()
        self.engine.take_writes()
        with self._host.in_backward(self._inners, self._gradients_of):
            yield

    def train(self) -> None:
        """Switches schedule-free optimizers to the parameters for training. Collective."""
        self._switch("train")

    def eval(self) -> None:
        """Switches schedule-free optimizers to the parameters for evaluation and saving. Collective."""
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
            self.engine.finish_updates()
            self.engine.begin_update()
            self.engine.take_writes()
            with guards.noting_torn(self.engine, f"optimizer.{mode}()"):
                for inner in switched:
                    getattr(inner, mode)()
                self.engine.mark_updated(only_trained=True)

    def _can_scale(self) -> bool:
        """Whether the optimizer itself can scale the gradients, like torch's fused optimizers, without another
        pass."""
        fused = all(getattr(inner, "_step_supports_amp_scaling", False) for inner in self._inners)
        return fused and all(group.get("fused") for group in self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this step. With `set_to_none=False` they become zeros, see `Gradient.clear`."""
        self.engine.clear_gradients(zeroed=not set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients so that their norm over all parameters and ranks is at most `max_norm`.

        Args:
            max_norm (`float`): the maximum; `inf` measures without clipping.
            norm_type (`float`): order of the norm, including `inf`.

        Returns:
            `Tensor`: 0-d fp32, the norm before clipping, equal on every rank. On the device if the host does not wait
                for it.

        Raises:
            `LifecycleError`: on all ranks, if the arguments differ between ranks.
            `ConfigError`: if `max_norm` or `norm_type` is not a number of 0 or more.
        """
        for name, value in {"max_norm": max_norm, "norm_type": norm_type}.items():
            if not isinstance(value, Real | Tensor) or value < 0:
                raise ConfigError(f"clip_grad_norm_: {name} {value!r} is not a number of 0 or more; give one")
        if max_norm != float("inf"):
            self._refuse_spent()
        self.engine.finish_gradients(norm_type, max_norm)
        with self.engine.changing_gradients():
            norm = measure_norm(self.engine, norm_type)
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # NaN propagates to all gradients, as in torch
            if self.engine.config.nonfinite != "ignore":
                scale = torch.where(norm.isfinite(), scale, 1.0)
            is_wanted = not scale >= 1.0 if not self.engine.runs_ahead else max_norm != float("inf")
            if is_wanted and not self._host.is_spent:
                self.engine.grad_scale = scale
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps every element of the averaged gradients to [-clip_value, clip_value]."""
        self._refuse_spent()
        self.engine.finish_gradients()
        with self.engine.changing_gradients():
            self.engine.grad_norm = None
            for gradient in self.engine.gradients:
                if gradient.is_reduced:
                    gradient.reduced.clamp_(-clip_value, clip_value)

    def _gradients_of(self, units: Iterable[Unit]) -> Gradients:
        """Returns, by unit, the slices held by this rank that have a gradient, with the gradient."""
        wanted = set(units)
        grads: Gradients = {}
        for flat_slice in self.slices:
            grad = flat_slice.grad if flat_slice.unit in wanted else None
            if grad is not None:
                grads.setdefault(flat_slice.unit, []).append((flat_slice, grad))
        return grads

    @property
    def has_applied_gradients(self) -> bool:
        """Whether the gradients of this step were already applied in backward, see `in_backward`."""
        return self._host.is_spent

    def _refuse_spent(self) -> None:
        if self._host.is_spent:
            raise LifecycleError("clipping: in_backward has already applied the gradients; clip without in_backward")

    # Optimizer state by parameter name

    def named_state_shards(self, resident: bool = False, values: bool = True) -> Iterator[tuple[str, NamedShard]]:
        """Yields pairs of a state key and a range of one parameter's state.

        Args:
            resident (`bool`): yield all ranges that this rank holds, and keep values written to them, instead of
                only the ranges that it saves.
            values (`bool`): read state from disk. If `False`, only shapes and dtypes of the tensors are valid.
        """
        self.engine.finish_updates()
        turns = self._loaded_slices(writes=resident) if values else [self.slices]
        for flat_slice in (flat_slice for slices in turns for flat_slice in slices):
            only = (flat_slice.start, flat_slice.stop) if resident else flat_slice.saved
            yield from shards_of(flat_slice, self.state.get(flat_slice.param, {}), only)

    def named_scalar_state(self) -> dict[str, dict[str, float]]:
        """Returns the state that is one number per parameter, such as Adam's step count, by parameter name."""
        self.engine.finish_updates()
        own = [(each, numbers_of(each, self.state[each.param])) for each in self.slices if self.state.get(each.param)]
        return {name: numbers for flat_slice, numbers in own for name in flat_slice.names}

    @torch.no_grad()
    def load_scalar_state(self, state: dict[str, dict[str, float]]) -> None:
        """Recreates the optimizer state. Its scalars come from `state`; its tensors are uninitialized and are loaded
        afterwards. `state` contains the scalars of every parameter that has state, by key. Some optimizers (SGD with
        momentum) have no scalars; their dictionaries are empty."""
        self.engine.finish_updates()
        self.state.clear()
        self._cut_slices(lambda flat_slice, index: state.get(flat_slice.flat.infos[index].name))
        self._create_state()
        for flat_slice in self.slices:
            values = state.get(flat_slice.names[0]) if flat_slice.names else None
            if values is None:
                self.state.pop(flat_slice.param, None)
            else:
                set_numbers(flat_slice, self.state[flat_slice.param], values, type(self.inner).__name__)

    def _cut_slices(self, key: Callable[[FlatSlice, int], object]) -> None:
        """Splits slices, with their state, wherever `key(slice, parameter index)` changes."""
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
                self.state[param] = {name: part_of(value, flat_slice.param, window) for name, value in state.items()}
        return parts

    def state_dict(self) -> dict:
        """Returns the groups and this rank's state in torch's format, with flat slices in place of parameters, and the
        identity of the shards under "shards".

        The result is only for inspection and for `load_state_dict` on the same rank of the same run. Use
        `hf_zero.save_checkpoint` for checkpoints, which are independent of the sharding. Collective. Raises
        [`LifecycleError`] if the state is on disk."""
        self._refuse_on_disk("state_dict")
        self.engine.finish_updates()
        return {**super().state_dict(), "shards": self._shards()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the result of `state_dict` on this rank. Collective. Raises [`LifecycleError`] for the state of
        another rank, number of ranks, stage or run."""
        self._refuse_on_disk("load_state_dict")
        self.engine.finish_updates()
        groups, state = state_dict["param_groups"], state_dict["state"]
        params = [param for group in self.param_groups for param in group["params"]]
        found, wanted = state_dict.get("shards"), self._shards()
        has_these = [len(group["params"]) for group in groups] == [len(group["params"]) for group in self.param_groups]
        if not (found == wanted and has_these and all(state_fits(params[index], own) for index, own in state.items())):
            raise LifecycleError(
                f"load_state_dict: the state is of {describe_shards(found)}, but this is {describe_shards(wanted)}; "
                "load the result of state_dict() of the same rank in the same run, or a checkpoint with "
                "hf_zero.load_state(...)"
            )
        self.torn = "load_state_dict"
        self.state.clear()
        group_of = [group for group in groups for _ in group["params"]]
        for index, values in state.items():
            param, group = params[index], group_of[index]
            is_on_device = bool(group.get("fused") or group.get("capturable"))  # including scalars such as the step
            self.state[param] = {key: taken_over(value, param.device, is_on_device) for key, value in values.items()}
        for group, saved in zip(self.param_groups, groups):
            group.update((key, value) for key, value in saved.items() if key != "params")
        self.torn = None

    def _shards(self) -> dict[str, Any]:
        """Returns a description of this rank's shards: rank, number of ranks, stage, and ranges of parameters."""
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
                f"{what}: the optimizer's state is on disk; use hf_zero.save_checkpoint(...) and "
                "hf_zero.load_state(...)"
            )

    def _make_early_state(self) -> None:
        """Creates, for the slices, the state of optimizers that create it in their constructor (Adagrad)."""
        for slices in self._loaded_slices(writes=True) if self._make_state_early else ():
            chosen = {id(flat_slice.param) for flat_slice in slices}
            for inner in self._make_state_early:
                groups = [
                    {**group, "params": [param for param in group["params"] if id(param) in chosen]}
                    for group in inner.param_groups
                ]
                groups = [group for group in groups if group["params"]]
                self.state.update(type(inner)(groups, **inner.defaults).state if groups else {})

    def _create_state(self) -> None:
        """Makes the inner optimizers create their state by a step with zero gradients on zeros. The groups do not
        change."""
        self._make_early_state()
        # one at a time, to set aside the values of only one slice
        for flat_slice in (flat_slice for slices in self._loaded_slices(writes=True) for flat_slice in slices):
            values = flat_slice.param.data
            flat_slice.param.data = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
            try:
                self._step_alone(flat_slice.param, flat_slice.group)
            finally:
                flat_slice.param.data = values

    def _step_alone(self, param: nn.Parameter, group: int) -> None:
        """Steps one parameter of a group with zero gradients, which creates its state. Users' hooks are not called."""
        inner, own = self._inner_of[group], {**self.param_groups[group], "params": [param]}
        if "train_mode" in own:
            own["train_mode"] = True  # schedule-free optimizers only step in training mode
        copy = sharing_state(inner, [own])
        copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        param.grad = torch.zeros_like(param)
        try:
            type(copy).step(copy)
        finally:
            param.grad = None

    def groups_state(self) -> list[dict]:
        """Returns the hyperparameters of the groups that can be serialized as JSON, with the names of their
        parameters.
        """
        found = []
        for group, names in zip(self.param_groups, self._group_names):
            values = {key: plain_number(value) for key, value in group.items() if key != "params"}
            plain = {key: value for key, value in values.items() if is_plain(value)}
            found.append({**plain, "param_names": names, "num_steps": self.num_steps})
        return found

    def load_groups_state(self, groups: list[dict]) -> None:
        """Loads hyperparameters from the result of `groups_state`. The saved groups may be split differently if
        hyperparameters agree within each group of this run. Raises [`CheckpointError`] if they do not, if the groups
        have other parameters, or if they are from another kind of optimizer."""
        groups = regrouped(groups, self._group_names)
        for group, saved in zip(self.param_groups, groups):
            if saved["param_names"]:
                refuse_other_kind(group, saved)
        for group, saved in zip(self.param_groups, groups):
            self.num_steps = saved.get("num_steps", self.num_steps)
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):  # keep it a tensor
                    group[key].fill_(value)
                elif key not in ("param_names", "num_steps"):
                    group[key] = tuple(value) if isinstance(value, list) else value

    def state_tensors(self) -> Iterator[tuple[Tensor, MemoryTier]]:
        """Yields every tensor of the state on this rank and its memory tier; of composite tensors, the parts."""
        for flat_slice in self.slices:
            for tensor in self._tensors_of(flat_slice):
                yield tensor, flat_slice.flat.masters.tier

    def _tensors_of(self, flat_slice: FlatSlice) -> list[Tensor]:
        return [tensor for _, tensor in plain_tensors(self.state.get(flat_slice.param, {}), flat_slice.is_whole)]

    def expected_state(self) -> Iterator[tuple[torch.dtype, int, MemoryTier]]:
        """Yields dtype, number of elements and memory tier of every state tensor on this rank, except scalars. Before
        the first step, those of optimizers that are not elementwise are missing."""
        state_dtypes = cache(self._state_dtypes)
        for flat_slice in self.slices:
            group, param, found = flat_slice.group, flat_slice.param, []
            if param in self.state:
                found = [(tensor.dtype, tensor.numel()) for tensor in self._tensors_of(flat_slice) if tensor.dim()]
            elif self._inner_of[group] not in self._exchanges:
                found = [(dtype, param.numel()) for dtype in state_dtypes(group, param.dtype).values()]
            yield from ((*each, flat_slice.flat.masters.tier) for each in found)

    @property
    def late_state(self) -> list[str]:
        """The names of the optimizers whose state `expected_state` does not include before the first step."""
        return [type(inner).__name__ for inner in self._exchanges] if not self.state else []

    def _state_dtypes(self, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Returns the dtypes of the state tensors, by key, for elements of a dtype."""
        found = plain_tensors(self._try_state(group, dtype))
        return {key: tensor.dtype for key, tensor in found if tensor.dim()}

    def _try_state(self, group: int, dtype: torch.dtype) -> dict:
        """Returns the state that the optimizer creates for a few elements, and removes it from the optimizer."""
        param = nn.Parameter(torch.zeros(4, dtype=dtype, device=self._no_param.device))
        self._step_alone(param, group)
        return self.state.pop(param, {})

    def unsharded_state_nbytes(self) -> int:
        """Returns the size in bytes of the state over full parameters, extrapolated from this rank's state per
        element. 0 before the first step."""
        infos = [info for gradient in self.engine.gradients for info in gradient.flat.infos]
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
