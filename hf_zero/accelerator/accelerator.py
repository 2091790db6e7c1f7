"""An `Accelerator` that shards models instead of wrapping them in DDP."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DDPCommunicationHookType, DynamoBackend, TorchDynamoPlugin, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_zero.accelerator import states
from hf_zero.accelerator.environment import launched_ranks, refuse_other_engines, refuse_other_world
from hf_zero.activation import chunked_loss_of, refuse_group_size, shard_with
from hf_zero.comm.ranks import take_timeout
from hf_zero.compat import check_overrides, replaced
from hf_zero.config import ZeroConfig, choose
from hf_zero.engine import ZeroEngine, compile_blocks, engine_of
from hf_zero.engine.access import unit_of
from hf_zero.engine.patch import Patch
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.optim import ShardedOptimizer, ZeroGradScaler, sharded_of
from hf_zero.parent import end_with_launcher
from hf_zero.removed import refuse_removed


OVERRIDES = (
    "torch_device_mesh",
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "gather",
    "gather_for_metrics",
    "get_state_dict",
    "load_state",
    "save_model",
    "save_state",
)

# Settings in which an already sharded model must agree: they determine the computation and where values are stored.
SAME = (
    *("stage", "sequence_parallel", "compute_dtype", "reduce_dtype", "gather_dtype"),
    *("offload", "nonfinite"),
)
_SETTINGS = {f"zero_{field.name}": field.name for field in fields(ZeroConfig)}
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}


class ZeroAcceleratedOptimizer(AcceleratedOptimizer):
    """accelerate's optimizer wrapper, which also holds schedules when a step is skipped because of non-finite
    gradients."""

    @property
    def step_was_skipped(self) -> bool:
        return super().step_was_skipped or sharded_of(self).step_was_skipped


class ZeroAccelerator(Accelerator):
    """accelerate's `Accelerator`, which shards a model in place instead of wrapping it in DDP.

    Pass model, optimizer, data loaders and schedulers to `prepare` as usual, in one call, or prepare the model before
    its optimizer. `save_state` writes a folder that `from_pretrained` loads, and the training state; a run resumes
    from it bit for bit. All ranks must call `save_state`, `load_state`, `save_model` and `get_state_dict`.

    Args:
        zero_stage (`int`): What is partitioned over the ranks: 0 nothing, 1 the optimizer state, 2 also the gradients,
            3 also the parameters.
        zero_autocast (`bool`): With `mixed_precision`, keep parameters in the dtype that they were loaded in and cast
            them at each use, as with DDP. By default, hf_zero computes with half-precision copies of fp32 master
            weights.
        settings: Arguments of `Accelerator`, and fields of `ZeroConfig` with the prefix `zero_`, such as
            `zero_offload="optimizer"`.

    Raises:
        `ConfigError`: If a setting is not supported.
    """

    scaler: torch.amp.GradScaler | None
    zero_config: ZeroConfig
    zero_device: torch.device
    last_step: states.LastStep
    trains: Callable[[nn.Module], bool]
    clips: Callable[[], bool] | None = None  # whether gradients are clipped; None: unknown
    drops_logits: bool = True  # whether the training loop needs only the loss, not logits; see `zero_chunked_loss`
    patches_saving: bool = True  # whether to patch `save_pretrained` of prepared models
    num_sharing: int = 1  # number of neighboring ranks that share batches
    _gathers_once: bool = False
    _batch_mesh: DeviceMesh | None = None  # None: no ranks share batches

    def __init__(self, *, zero_stage: int = 3, zero_autocast: bool = False, **settings: Any):
        end_with_launcher()
        refuse_removed(settings)
        own, rest = _divided(settings)
        config = ZeroConfig(stage=zero_stage, **own)
        refuse_other_engines(rest, prefix="")
        launched = launched_ranks()
        if launched > 1 and not torch.accelerator.is_available():
            rest["cpu"] = True
        super().__init__(**rest)
        refuse_other_world(launched, self.num_processes)
        if "compute_dtype" not in own and not zero_autocast:
            config = replace(config, compute_dtype=choose("mixed_precision", self.mixed_precision, _HALVES))
        self._refuse_unsupported()
        if dist.is_initialized() and config.timeout_seconds is not None:
            take_timeout(dist.group.WORLD, config.timeout_seconds)
        self._shard_by(config, self.device)

    def _refuse_unsupported(self) -> None:
        if self.mixed_precision == "fp16" and self.device.type == "cpu":
            raise ConfigError(
                "mixed_precision: this process trains on the CPU, which has no fp16 training; use bf16, or no"
            )
        hook = DDPCommunicationHookType(getattr(self.ddp_handler, "comm_hook", DDPCommunicationHookType.NO))
        if hook is not DDPCommunicationHookType.NO:
            raise ConfigError(
                f"comm_hook: {hook.value} requires DDP; remove it, or use zero_reduce_dtype=torch.bfloat16"
            )

    @classmethod
    def adopt(
        cls,
        accelerator: Accelerator,
        config: ZeroConfig,
        device: torch.device,
        trains: Callable[[nn.Module], bool] = lambda model: True,
    ) -> "ZeroAccelerator":
        """Returns a `ZeroAccelerator` in the place of a new `Accelerator`. `trains` returns whether a model that is
        prepared for evaluation will be trained too."""
        own = cls.__new__(cls)
        own.__dict__.update(accelerator.__dict__)
        own.patches_saving = False  # Trainer has its own methods for saving
        own._shard_by(config, device, trains)
        return own

    def _shard_by(
        self, config: ZeroConfig, device: torch.device, trains: Callable[[nn.Module], bool] = lambda model: False
    ) -> None:
        self.trains = trains
        self.zero_config = config
        self.zero_device = device
        self.last_step = states.LastStep()
        self._share_batches(config.sequence_parallel)
        if self.scaler is not None:
            scaler = ZeroGradScaler(self.device.type)
            scaler.__dict__.update(self.scaler.__dict__)  # keep the user's settings
            self.scaler = scaler

    # Batches that neighboring ranks share

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh that tells loaders which ranks share batches. accelerate's own would apply to all accelerators of
        the process."""
        return self._batch_mesh

    def give_neighbours_same(self, num_sharing: int, axis: str) -> None:
        """Makes loaders that are prepared later give the same batches to `num_sharing` neighboring ranks. `axis` is
        accelerate's name of the mesh dimension: cp or tp."""
        self.num_sharing = num_sharing
        shape = (self.num_processes // num_sharing, num_sharing)
        self._batch_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp_shard", axis))

    def _share_batches(self, num_sharing: int) -> None:
        """Makes `num_sharing` neighboring ranks share each sequence. Raises [`ConfigError`] if the number of ranks is
        not divisible by it, or with `dispatch_batches`."""
        if num_sharing == 1:
            return
        refuse_group_size(num_sharing, self.num_processes, "zero_sequence_parallel")
        if self.dispatch_batches:
            raise ConfigError(
                "dispatch_batches: gives every rank other rows, but zero_sequence_parallel needs the same rows on "
                "neighboring ranks; remove it"
            )
        self.dataloader_config.dispatch_batches = False  # the default is True for streams
        self.give_neighbours_same(num_sharing, "cp")

    # Preparing

    def shard(self, model: nn.Module) -> ZeroEngine:
        """Returns the engine of a model, and shards the model if it is not sharded yet. Raises [`ConfigError`] if it
        is already sharded with other values of the settings in `SAME`."""
        engine, wanted = engine_of(model), self.zero_config
        engine = engine or shard_with(model, wanted, device=self.zero_device)
        for name in SAME:
            if (found := getattr(engine.config, name)) != (own := getattr(wanted, name)):
                raise ConfigError(
                    f"{type(model).__name__}: is already sharded with {name} {found}, but the accelerator has {own}; "
                    f"use the same {name}, or call hf_zero.ShardedModel(model).unshard() first"
                )
        engine.shares_buffers = getattr(self.ddp_handler, "broadcast_buffers", True)
        if (chunked := chunked_loss_of(model)) is not None:
            chunked.is_active = self.drops_logits
        return engine

    def prepare(self, *args, device_placement=None, **kwargs):
        """Prepares like `Accelerator.prepare`, but the models first, regardless of the order of the arguments."""
        for model in args:
            if isinstance(model, nn.Module):
                self.prepare_model(model)
        return super().prepare(*args, device_placement=device_placement, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement=None, evaluation_mode: bool = False, **kwargs
    ) -> nn.Module:
        """Shards the model, and compiles its blocks if requested. Autocast applies as usual; DDP does not. A model
        that is only evaluated (reference, teacher, reward model) is frozen, so it has no gradients and master
        weights."""
        is_new, is_trained = engine_of(model) is None, not evaluation_mode or self.trains(model)
        if is_new and not is_trained:
            model.requires_grad_(False)
        engine, plugin = None if is_trained else engine_of(model), self.state.dynamo_plugin
        engine = self.shard(model) if engine is None else engine  # a model for evaluation may have another stage
        if is_new and self.patches_saving and hasattr(model, "save_pretrained"):
            save = partial(states.save_prepared, engine, model.save_pretrained)
            engine.handles.append(Patch(model, "save_pretrained", save))
        if plugin.backend is not DynamoBackend.NO:
            compile_blocks(engine, **compile_options(plugin))
        # the stock accelerator would compile the full model including our hooks
        with replaced(plugin, backend=DynamoBackend.NO):
            return super().prepare_model(model, device_placement=False, evaluation_mode=True, **kwargs)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement=None, **kwargs):
        """Makes the optimizer update the shards of the prepared model that owns its parameters. Raises [`ConfigError`]
        if the parameters belong to no prepared model, or to one that already has an optimizer."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement=False, **kwargs)
        known = next((found for found in self._optimizers if sharded_of(found).inner is optimizer), None)
        if known is not None:
            return known
        if sharded_of(optimizer) is None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            engine = self._engine_of(params, type(optimizer).__name__)
            if any(sharded_of(found).engine is engine for found in self._optimizers):
                raise ConfigError(
                    f"{type(optimizer).__name__}: {type(engine.model).__name__} already has an optimizer; prepare one "
                    "with all parameter groups, or hf_zero.CombinedOptimizer(first, second)"
                )
            optimizer = ShardedOptimizer(engine, optimizer)
        prepared = ZeroAcceleratedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler, **kwargs) -> AcceleratedScheduler:
        """Prepares like `Accelerator.prepare_scheduler`. The schedule pauses only if its own optimizer skips a step,
        not if another one does."""
        prepared = super().prepare_scheduler(scheduler, **kwargs)
        given = getattr(scheduler, "optimizer", None)
        for optimizer in self._optimizers:
            sharded = sharded_of(optimizer)
            if given is not None and given in (optimizer, sharded, sharded.inner):
                prepared.optimizers = [optimizer]
        return prepared

    # Training

    def backward(self, loss, **kwargs) -> None:
        """Runs the backward like accelerate, and records the loss. In Trainer, the last backward of a step reduces
        gradients while it runs. If nothing happens between it and the step, it also updates offloaded parameters."""
        engines = list(filter(None, map(engine_of, self._models)))
        trained = [engine for engine in engines if engine.gradients]
        self.last_step.add(loss.detach() / self.gradient_accumulation_steps, ends=self.sync_gradients)
        optimizers = [sharded_of(optimizer) for optimizer in self._optimizers]
        clips = self.clips is None or self.clips()
        is_last = self.sync_gradients and not clips and self.scaler is None and len(optimizers) == 1
        with ExitStack() as stack:
            # known only in Trainer: another loop may run more backwards, and with several models the loss may use one
            if self.sync_gradients and self.clips is not None and len(trained) == 1:
                stack.enter_context(trained[0].reducing_this_backward(loss))
            if is_last and optimizers[0]:
                stack.enter_context(optimizers[0].in_backward())
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2) -> Tensor:
        """Clips by the exact norm over all shards. Raises [`ConfigError`] if `parameters` are not exactly the
        trainable parameters of one prepared model."""
        optimizer = self._optimizer_of(parameters, "clip_grad_norm_")
        self.unscale_gradients()
        self.last_step.grad_norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        return self.last_step.grad_norm

    def clip_grad_value_(self, parameters, clip_value) -> None:
        """Clips every element. `parameters` and errors are as in `clip_grad_norm_`."""
        optimizer = self._optimizer_of(parameters, "clip_grad_value_")
        self.unscale_gradients()
        optimizer.clip_grad_value_(clip_value)

    def gather(self, tensor, **kwargs) -> Any:
        """Gathers like accelerate; for metrics, from one rank per group."""
        gathered = super().gather(tensor, **kwargs)
        return recursively_apply(self._first_of_each, gathered) if self._gathers_once else gathered

    def _first_of_each(self, joined: Tensor) -> Tensor:
        return joined.unflatten(0, (self.num_processes, -1))[:: self.num_sharing].flatten(0, 1)

    def gather_for_metrics(self, input_data, use_gather_object=False, **kwargs) -> Any:
        """Gathers like accelerate, but rows that ranks share only once. Raises [`UnsupportedError`] if ranks share
        batches and `input_data` has objects other than tensors."""
        if self.num_sharing > 1 and (use_gather_object or not _are_tensors(input_data)):
            raise UnsupportedError(
                "gather_for_metrics: only tensors can be gathered if ranks share batches (zero_sequence_parallel, "
                "tensor parallelism); pass tensors"
            )
        with replaced(self, _gathers_once=self.num_sharing > 1):
            return super().gather_for_metrics(input_data, use_gather_object, **kwargs)

    # Saving

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Returns the full state dict on the CPU of rank 0, and an empty one on other ranks. All ranks must call
        it."""
        engine = engine_of(self.unwrap_model(model))
        if engine is None:
            return super().get_state_dict(model, unwrap)
        return states.whole_state_dict(engine)

    def save_model(self, model, save_directory, max_shard_size="10GB", safe_serialization: bool = True) -> None:
        """Saves a model for `from_pretrained`. Each rank writes its own byte ranges of the weights. A model that is
        not prepared is saved by accelerate."""
        engine = engine_of(self.unwrap_model(model))
        if engine is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        states.refuse_pickles(safe_serialization)
        states.save_model(engine, save_directory, max_shard_size=max_shard_size)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs
    ) -> str:
        """Writes a checkpoint: a folder from which `from_pretrained` loads the first model, with its optimizer state
        in `zero/`, other models in `model_1`, `model_2`, ..., and accelerate's own files of schedules, samplers,
        random states and registered objects. The folder appears when it is complete. Registered hooks are called
        without models.

        Args:
            output_dir (`str`, *optional*): The folder. By default it is named by `ProjectConfiguration`.
            safe_serialization (`bool`): Must be `True`.
            save_model_func_kwargs: `max_shard_size`.

        Raises:
            `CheckpointError`: On all ranks, if saving fails. The incomplete folder is removed.
        """
        states.refuse_pickles(safe_serialization)
        return states.save_run(self, self.last_step, super().save_state, output_dir, **save_model_func_kwargs)

    def load_state(self, input_dir: str | None = None, *args, **load_model_func_kwargs) -> None:
        """Loads a checkpoint of `save_state`, at any stage and with any number of ranks. Each rank reads its own
        ranges.

        Args:
            input_dir (`str`, *optional*): The checkpoint. By default, the newest of `ProjectConfiguration`.
            args, load_model_func_kwargs: As in accelerate, for objects other than models and optimizers.

        Raises:
            `CheckpointError`: On all ranks, if the checkpoint is incomplete, damaged, or of other models.
        """
        load = super().load_state
        states.load_run(self, lambda folder: load(folder, *args, **load_model_func_kwargs), input_dir)

    # Lookup by parameters

    def _engine_of(self, params: Iterable[Tensor], subject: str) -> ZeroEngine:
        """Returns the engine of the prepared model that owns these parameters."""
        held = {unit_of(param) for param in params}
        engines = [engine_of(model) for model in self._models]
        found = next((engine for engine in engines if engine and held & set(engine.units)), None)
        if found is None:
            raise ConfigError(
                f"{subject}: the parameters belong to no prepared model; prepare the model with the optimizer of "
                "its parameters, or before it"
            )
        return found

    def _optimizer_of(self, params: Tensor | Iterable[Tensor], subject: str) -> ShardedOptimizer:
        """Returns the optimizer of the model with exactly these trainable parameters."""
        params = [params] if isinstance(params, Tensor) else list(params)
        engine = self._engine_of(params, subject)
        given = {id(param) for param in params if param.requires_grad}
        wanted = {id(param) for param in engine.model.parameters() if param.requires_grad}
        if given != wanted:
            raise ConfigError(
                f"{subject}: got {len(given)} trainable parameters, but {type(engine.model).__name__} has "
                f"{len(wanted)}; pass all parameters of one model, and call it once per model"
            )
        found = next((found for found in map(sharded_of, self._optimizers) if found.engine is engine), None)
        if found is None:
            raise ConfigError(
                f"{subject}: no optimizer of {type(engine.model).__name__} is prepared; prepare it first"
            )
        return found


check_overrides(ZeroAccelerator, Accelerator, OVERRIDES)
check_overrides(ZeroAcceleratedOptimizer, AcceleratedOptimizer, ("step_was_skipped",))


def _divided(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits settings into those of `ZeroConfig`, by the names of its fields, and those of `Accelerator`."""
    own, rest = {}, {}
    for name, value in settings.items():
        if name.startswith("zero_"):
            own[choose("ZeroAccelerator", name, _SETTINGS)] = value
        else:
            rest[name] = value
    return own, rest


def _are_tensors(values: Any) -> bool:
    if isinstance(values, dict):
        values = tuple(values.values())
    return all(map(_are_tensors, values)) if isinstance(values, (tuple, list)) else isinstance(values, Tensor)


def compile_options(plugin: TorchDynamoPlugin) -> dict:
    """Returns the selected options of `torch.compile`. The plugin's own `to_kwargs` omits options that are also set in
    the environment."""
    chosen = {key: value for key, value in plugin.to_dict().items() if value not in (None, "default")}
    chosen.pop("use_regional_compilation")
    return chosen
