"""`ZeroStrategy`: ZeRO for the Trainer of Lightning."""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn


try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        f"hf_zero.lightning: requires Lightning, which is not installed ({error}); pip install lightning",
        name="lightning",
    ) from error

from hf_zero.activation import shard_with
from hf_zero.checkpoint import Checkpoint, check_checkpoint, load_state, load_weights, plan_state, plan_weights
from hf_zero.checkpoint.staging import StagedFiles
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.compat import check_overrides
from hf_zero.config import ZeroConfig, ZeroSettings
from hf_zero.engine import ZeroEngine
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.optim import ShardedOptimizer
from hf_zero.removed import refuse_removed


# File of a checkpoint with Lightning's own state, without weights and optimizer.
REST_NAME = "lightning.ckpt"

OVERRIDES = (
    "restore_checkpoint_after_setup",
    "setup",
    "setup_optimizers",
    "setup_precision_plugin",
    "lightning_module_state_dict",
    "optimizer_state",
    "save_checkpoint",
    "load_checkpoint",
    "load_model_state_dict",
    "load_optimizer_state_dict",
    "teardown",
)


class ZeroStrategy(DDPStrategy):
    """Shards a `LightningModule` in place instead of wrapping it in DDP: `Trainer(strategy=ZeroStrategy(stage=3))`.

    A checkpoint is a folder with the full model in safetensors files, under the names of the module's `state_dict`;
    the optimizer state in `zero/`; and Lightning's own state in `lightning.ckpt`, whose `state_dict` is empty. All
    ranks write and read their own ranges, so a run can resume at another stage and with another number of ranks.

    Args:
        stage (`int`): What is partitioned over the ranks: 0 nothing, 1 the optimizer state, 2 also the gradients,
            3 also the parameters.
        compute_dtype (`torch.dtype`, *optional*): Dtype to cast the parameters to. Trainable parameters keep an fp32
            master copy. By default, the Trainer's `precision` works as with DDP.
        settings: Other fields of `ZeroConfig`.

    Raises:
        `ConfigError`: If a setting is invalid.
    """

    _engine: ZeroEngine  # set by `setup`
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    _loaded: Path  # the checkpoint that is being loaded

    def __init__(
        self, *, stage: int = 3, compute_dtype: torch.dtype | None = None, **settings: Unpack[ZeroSettings]
    ) -> None:
        refuse_removed(settings, "zero_")
        self.zero_config = ZeroConfig(stage=stage, compute_dtype=compute_dtype, **settings)
        seconds = self.zero_config.timeout_seconds
        super().__init__(**({} if seconds is None else {"timeout": timedelta(seconds=seconds)}))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always `True`, since weights are loaded into the shards."""
        return True

    def setup(self, trainer) -> None:
        """Shards the module and its optimizer.

        Raises:
            `ConfigError`: For precision 16-mixed, or several optimizers.
        """
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ConfigError("precision 16-mixed: its loss scaler does not support shards; use bf16-mixed")
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self._engine = shard_with(self.model, self.zero_config, device=self.root_device)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False  # inference tensors cannot be used in a later backward
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer, **kwargs) -> None:
        """Creates the optimizer of the module's `configure_optimizers`, and shards it."""
        super().setup_optimizers(trainer, **kwargs)
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"configure_optimizers: returns {len(self.optimizers)} optimizers; return one with several parameter "
                "groups, or hf_zero.CombinedOptimizer(first, second)"
            )
        self.optimizers = [ShardedOptimizer(self._engine, optimizer) for optimizer in self.optimizers]

    def setup_precision_plugin(self, **kwargs) -> None:
        """Makes Lightning clip the gradients by their norm over all shards, instead of only this rank's."""
        super().setup_precision_plugin(**kwargs)
        self.precision_plugin.clip_grad_by_norm = lambda _, limit: self.optimizers[0].clip_grad_norm_(limit)
        self.precision_plugin.clip_grad_by_value = lambda _, limit: self.optimizers[0].clip_grad_value_(limit)

    # Checkpoints. Weights and optimizer state are not in Lightning's own dictionary.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike, storage_options: Any | None = None
    ) -> None:
        """Writes a folder, which appears when it is complete. All ranks must call it.

        Raises:
            `CheckpointError`: On all ranks, if saving fails. The incomplete folder is removed.
        """
        engine, state = self._engine, None
        if self.optimizers and "optimizer_states" in checkpoint:
            state = plan_state(engine, self.optimizers[0], step=checkpoint["global_step"])

        def write_rest(folder: Path) -> None:
            if engine.comm.rank == 0:
                torch.save(checkpoint, folder / REST_NAME)

        rest = StagedFiles(write_beside=write_rest)
        Checkpoint.begin(engine, filepath, plan_weights(engine), state, rest).finish()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike, weights_only: bool | None = None, **kwargs
    ) -> dict[str, Any]:
        """Loads Lightning's own state. Weights and optimizer state are loaded later.

        Raises:
            `CheckpointError`: On all ranks, if the folder is incomplete or damaged, or was saved by another strategy.
        """
        self._loaded = folder = Path(checkpoint_path)
        load_rest = super().load_checkpoint

        def load() -> dict[str, Any]:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder}: is not a folder of ZeroStrategy; load its weights into the module instead"
                )
            check_checkpoint(folder)
            return load_rest(folder / REST_NAME, weights_only=weights_only, **kwargs)

        return run_on_all_ranks(self._engine.comm, f"loading {folder}", load)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load_weights(self._engine, self._loaded)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_state(self._engine, self.optimizers[0], self._loaded)

    def teardown(self) -> None:
        """Ends the run. The module stays sharded and on its device."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


check_overrides(ZeroStrategy, DDPStrategy, OVERRIDES)
