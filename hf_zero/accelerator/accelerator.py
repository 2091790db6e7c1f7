"""The seam to accelerate: an `Accelerator` that shards a model where the stock one would wrap it in DDP."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import Tensor, nn

from hf_zero.accelerator.last_step import LastStep
from hf_zero.activation import shard_with
from hf_zero.compat import check_overrides
from hf_zero.config import ZeroConfig
from hf_zero.engine import ZeroEngine, compile_blocks, engine_of, gathered
from hf_zero.engine.access import unit_of
from hf_zero.errors import ConfigError
from hf_zero.optim import ShardedOptimizer, ZeroGradScaler, sharded_of


OVERRIDES = ("prepare_model", "prepare_optimizer", "backward", "clip_grad_norm_", "clip_grad_value_", "get_state_dict")


class ZeroAcceleratedOptimizer(AcceleratedOptimizer):
    """What accelerate wraps an optimizer in; schedules stand still where a step was left out, whoever did that."""

    @property
    def step_was_skipped(self) -> bool:
        return super().step_was_skipped or sharded_of(self).step_was_skipped


class ZeroAccelerator(Accelerator):
    """An `Accelerator` whose models are sharded in place. Made from a stock one by `adopt`."""

    zero_config: ZeroConfig
    zero_device: torch.device
    last_step: "LastStep"
    trains: Callable[[nn.Module], bool]
    clips: bool = True  # whether gradients may be clipped between the last backward and the step

    @classmethod
    def adopt(
        cls,
        accelerator: Accelerator,
        config: ZeroConfig,
        device: torch.device,
        trains: Callable[[nn.Module], bool] = lambda model: True,
    ) -> "ZeroAccelerator":
        """Turns an accelerator that was just made into one that shards.

        Args:
            accelerator (`Accelerator`): the one that `Trainer` made.
            config (`ZeroConfig`): the engine's settings.
            device (`torch.device`): where to train.
            trains (`Callable`): whether a model that is prepared for evaluation will be trained all the same.
        """
        accelerator.__class__ = cls
        accelerator.trains = trains
        accelerator.zero_config = config
        accelerator.zero_device = device
        accelerator.last_step = LastStep()
        if accelerator.scaler is not None:
            scaler = ZeroGradScaler(accelerator.device.type)
            scaler.__dict__.update(accelerator.scaler.__dict__)  # as the user set it up
            accelerator.scaler = scaler
        return accelerator

    def shard(self, model: nn.Module) -> ZeroEngine:
        """The engine of a model, which is sharded now unless it is already."""
        return engine_of(model) or shard_with(model, self.zero_config, device=self.zero_device)

    def prepare_model(
        self, model: nn.Module, device_placement=None, evaluation_mode: bool = False, **kwargs
    ) -> nn.Module:
        """Shards the model, and compiles its blocks if asked to; autocast applies as usual, DDP does not. One that is
        only evaluated (a reference, a teacher, a reward) is frozen: no gradients, no masters of higher precision."""
        if evaluation_mode and engine_of(model) is None and not self.trains(model):
            model.requires_grad_(False)
        engine, plugin = self.shard(model), self.state.dynamo_plugin
        backend = plugin.backend
        if backend is not DynamoBackend.NO:
            compile_blocks(engine, **compile_options(plugin))
        plugin.backend = DynamoBackend.NO  # the stock accelerator would compile the whole model, hooks and all
        try:
            return super().prepare_model(model, device_placement=False, evaluation_mode=True, **kwargs)
        finally:
            plugin.backend = backend

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement=None, **kwargs):
        """Puts the optimizer onto the shards of the model whose parameters it has, which was prepared before it."""
        if sharded_of(optimizer) is None:
            optimizer = ShardedOptimizer(self._engine_of(params_of(optimizer)), optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement=False, **kwargs)
        prepared.__class__ = ZeroAcceleratedOptimizer
        return prepared

    def backward(self, loss, **kwargs) -> None:
        """As ever; the loss is noted. The step's last backward updates what is offloaded as it goes, where nothing
        stands between it and the step.

        Raises:
            `LifecycleError`: when the loss was made of parameters whose data was away, such as a penalty on all.
        """
        for engine in filter(None, map(engine_of, self._models)):
            engine.refuse_misuse()
        self.last_step.add(loss.detach(), ends=self.sync_gradients)
        optimizers = [sharded_of(optimizer) for optimizer in self._optimizers]
        is_last = self.sync_gradients and not self.clips and self.scaler is None and len(optimizers) == 1
        with optimizers[0].in_backward() if is_last and optimizers[0] else nullcontext():
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2) -> Tensor:
        """Clips by the exact norm over all shards; `parameters` are those of the prepared model."""
        self.unscale_gradients()
        self.last_step.grad_norm = self._optimizer_of(parameters).clip_grad_norm_(max_norm, norm_type)
        return self.last_step.grad_norm

    def clip_grad_value_(self, parameters, clip_value) -> None:
        """Clips every element; `parameters` are those of the prepared model."""
        self.unscale_gradients()
        self._optimizer_of(parameters).clip_grad_value_(clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole state dict, gathered unit by unit: on rank 0's CPU, empty on other ranks. All ranks call it."""
        engine = engine_of(self.unwrap_model(model))
        state = {}
        for unit in engine.units:
            params = [p for flat in unit.flats for p in flat.params]
            with gathered(params):
                if engine.comm.rank == 0:
                    whole = {id(p): p.detach().cpu().clone() for p in params}
                    named = engine.model.named_parameters(remove_duplicate=False)
                    state.update({name: whole[id(p)] for name, p in named if id(p) in whole})
        if engine.comm.rank == 0:
            state.update({name: buffer.cpu() for name, buffer in persistent_buffers(engine.model)})
        return state

    def _engine_of(self, params: Iterable[Tensor]) -> ZeroEngine:
        """The engine, among those of all prepared models, that holds these parameters."""
        held = {unit_of(param) for param in params}
        engines = [engine_of(model) for model in self._models]
        found = next((engine for engine in engines if engine and held & set(engine.units)), None)
        if found is None:
            raise ConfigError(
                "the parameters are of no prepared model; prepare the model with, or before, its optimizer"
            )
        return found

    def _optimizer_of(self, params: Iterable[Tensor]) -> ShardedOptimizer:
        engine = self._engine_of([params] if isinstance(params, Tensor) else params)
        return next(found for found in map(sharded_of, self._optimizers) if found.engine is engine)


check_overrides(ZeroAccelerator, Accelerator, OVERRIDES)


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters in an optimizer's groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def compile_options(plugin: TorchDynamoPlugin) -> dict:
    """What was chosen for `torch.compile`. The plugin's own `to_kwargs` leaves out what the environment says too."""
    chosen = {key: value for key, value in plugin.to_dict().items() if value not in (None, "default")}
    chosen.pop("use_regional_compilation")
    return chosen


def persistent_buffers(model: nn.Module):
    """The buffers that belong to the state dict, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
