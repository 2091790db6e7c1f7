"""`ZeroTrainer`: the Hugging Face `Trainer` over sharded models."""

import logging
import os
import warnings

import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from hf_zero.checkpoint import load_state, load_weights, save_pretrained, save_state
from hf_zero.checkpoint.agreement import on_first, together
from hf_zero.engine import ZeroEngine, engine_of
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.optim import ShardedOptimizer, refuse_non_elementwise, sharded_of
from hf_zero.planner import MemoryReport, measure
from hf_zero.trainer.accelerator import ZeroAccelerator
from hf_zero.trainer.adapters import is_adapter_model, load_adapters, save_adapters
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.compat import check_overrides
from hf_zero.trainer.hub import PushMixin


logger = logging.getLogger(__name__)

OVERRIDES = (
    "create_accelerator_and_postprocess",
    "save_model",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_best_model",
    "_push_from_checkpoint",
)


class ZeroTrainerMixin(PushMixin):
    """Makes any subclass of `Trainer` train with ZeRO: `class MyTrainer(ZeroTrainerMixin, TheirTrainer)`.

    Its arguments must carry the flags of `ZeroArgumentsMixin`. The model is sharded in place when it is first
    prepared, for training or evaluation; it is never wrapped.

    Raises:
        `ConfigError`: for a model or arguments that cannot be sharded.
    """

    args: ZeroArgumentsMixin

    def __init__(self, model=None, args=None, *pargs, **kwargs):
        if not isinstance(args, ZeroArgumentsMixin):
            raise ConfigError(
                f"args: {type(args).__name__} has no zero_stage; use ZeroTrainingArguments, or mix ZeroArgumentsMixin "
                "into your class"
            )
        if getattr(model, "hf_device_map", None):
            raise ConfigError("model: was loaded with device_map, which spreads it over devices; load it without")
        _refuse_optimizers(**{key: kwargs[key] for key in ("optimizers", "optimizer_cls_and_kwargs") if key in kwargs})
        super().__init__(model, args, *pargs, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        ZeroAccelerator.adopt(self.accelerator, self.args.zero_config(), self.args.device)

    @property
    def zero_engine(self) -> ZeroEngine | None:
        """The engine that holds the model, or `None` before it is first prepared."""
        return engine_of(self.model)

    @property
    def _zero_optimizer(self) -> ShardedOptimizer:
        return sharded_of(self.optimizer)

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds by tensor class, measured, beside what DDP would hold."""
        return measure(self.accelerator.shard(self.model), sharded_of(self.optimizer))

    # Saving: every rank writes its own ranges, so every rank must come here

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that `from_pretrained` loads: each rank its own byte ranges of the weights."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        engine = self.accelerator.shard(self.model)
        if is_adapter_model(self.model):
            save_adapters(engine, output_dir)
        else:
            save_pretrained(engine, output_dir)
        beside = (lambda: self._save_beside(output_dir)) if self.args.should_save else (lambda: None)
        together(engine.comm, f"saving to {output_dir}", beside)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside(self, output_dir: str) -> None:
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_state(self.zero_engine, self._zero_optimizer, output_dir)
        comm = self.zero_engine.comm
        together(comm, f"{output_dir}: saving the scheduler", on_first(comm, lambda: self._save_scheduler(output_dir)))

    def _save_scheduler(self, output_dir: str) -> None:
        if self.lr_scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns when a scheduler is saved without its optimizer
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.zero_engine.comm.barrier()  # rank 0 copies files that all ranks have written
        super()._push_from_checkpoint(checkpoint_folder)

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        """Reads each rank's ranges from the folder; nobody holds the whole model."""
        engine = self.accelerator.shard(self.model)
        (load_adapters if is_adapter_model(self.model) else load_weights)(engine, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not os.path.isdir(os.path.join(checkpoint, "zero")):
            if os.path.exists(os.path.join(checkpoint, OPTIMIZER_NAME)):
                raise CheckpointError(
                    f"{checkpoint}: {OPTIMIZER_NAME} in it was saved by Trainer and cannot be resumed from; remove "
                    "that file to go on from the weights with a new optimizer"
                )
            logger.warning("%s: has no optimizer state (save_only_model), so the optimizer starts anew", checkpoint)
            return
        load_state(self.zero_engine, self._zero_optimizer, checkpoint)
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        together(self.zero_engine.comm, f"{scheduler}: loading the scheduler", lambda: self._load_scheduler(scheduler))

    def _load_scheduler(self, path: str) -> None:
        if os.path.isfile(path):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))


check_overrides(ZeroTrainerMixin, Trainer, OVERRIDES)


def _refuse_optimizers(optimizers=(None, None), optimizer_cls_and_kwargs=None) -> None:
    """Refuses an optimizer that cannot run on shards before anything is done with the model."""
    if optimizers[0] is not None:
        refuse_non_elementwise(type(optimizers[0]))
    if optimizer_cls_and_kwargs is not None:
        refuse_non_elementwise(optimizer_cls_and_kwargs[0])


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with ZeRO. Takes `ZeroTrainingArguments`, and everything that `Trainer` takes."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with ZeRO. Takes `ZeroSeq2SeqTrainingArguments`."""
