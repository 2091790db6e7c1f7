"""The seam to accelerate: an `Accelerator` that shards a model where the stock one would wrap it in DDP."""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import Tensor, nn

from hf_zero.config import ZeroConfig
from hf_zero.engine import ZeroEngine, compile_blocks, engine_of, gathered
from hf_zero.engine.build import shard_with
from hf_zero.optim import ShardedOptimizer, ZeroGradScaler, sharded_of
from hf_zero.trainer.compat import check_overrides


OVERRIDES = ("prepare_model", "prepare_optimizer", "backward", "clip_grad_norm_", "clip_grad_value_", "get_state_dict")


@dataclass
class LastStep:
    """What the last optimizer step was like, for the checkpoint's record.

    Args:
        loss (`Tensor`, *optional*): 0-d, of this rank: the sum of what its micro-batches were differentiated for.
        grad_norm (`Tensor`, *optional*): 0-d, before clipping, of all ranks; `None` without clipping.
    """

    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    _is_over: bool = True

    def add(self, loss: Tensor, *, ends: bool) -> None:
        """Takes the loss of one micro-batch; `ends` with the step's last."""
        self.loss = loss if self._is_over else self.loss + loss
        self._is_over = ends


class ZeroAccelerator(Accelerator):
    """An `Accelerator` whose models are sharded in place. Made from a stock one by `adopt`."""

    zero_config: ZeroConfig
    zero_device: torch.device
    last_step: "LastStep"

    @classmethod
    def adopt(cls, accelerator: Accelerator, config: ZeroConfig, device: torch.device) -> "ZeroAccelerator":
        """Turns an accelerator that was just made into one that shards.

        Args:
            accelerator (`Accelerator`): the one that `Trainer` made.
            config (`ZeroConfig`): the engine's settings.
            device (`torch.device`): where to train.
        """
        accelerator.__class__ = cls
        accelerator.zero_config = config
        accelerator.zero_device = device
        accelerator.last_step = LastStep()
        if accelerator.scaler is not None:
            accelerator.scaler = ZeroGradScaler(accelerator.device.type)
        return accelerator

    def shard(self, model: nn.Module) -> ZeroEngine:
        """The engine of a model, which is sharded now unless it is already."""
        return engine_of(model) or shard_with(model, self.zero_config, device=self.zero_device)

    def prepare_model(self, model: nn.Module, device_placement=None, evaluation_mode: bool = False) -> nn.Module:
        """Shards the model, and compiles its blocks if asked to; autocast applies as usual, DDP does not."""
        engine, plugin = self.shard(model), self.state.dynamo_plugin
        backend = plugin.backend
        if backend is not DynamoBackend.NO:
            compile_blocks(engine, **compile_options(plugin))
        plugin.backend = DynamoBackend.NO  # the stock accelerator would compile the whole model, hooks and all
        try:
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            plugin.backend = backend

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement=None):
        """Puts the optimizer onto the shards of the model that was prepared before it."""
        if sharded_of(optimizer) is None:
            optimizer = ShardedOptimizer(engine_of(self._models[-1]), optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def backward(self, loss, **kwargs) -> None:
        """As ever; the loss is noted."""
        self.last_step.add(loss.detach(), ends=self.sync_gradients)
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2) -> Tensor:
        """Clips by the exact norm over all shards; `parameters` are those of the prepared model."""
        self.unscale_gradients()
        self.last_step.grad_norm = self._sharded().clip_grad_norm_(max_norm, norm_type)
        return self.last_step.grad_norm

    def clip_grad_value_(self, parameters, clip_value) -> None:
        """Clips every element; `parameters` are those of the prepared model."""
        self.unscale_gradients()
        self._sharded().clip_grad_value_(clip_value)

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

    def _sharded(self) -> ShardedOptimizer:
        return sharded_of(self._optimizers[-1])


check_overrides(ZeroAccelerator, Accelerator, OVERRIDES)


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
