"""`ZeroTrainer`: the Hugging Face `Trainer` for sharded models."""

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler
from transformers import Seq2SeqTrainer, Trainer
from transformers.optimization import AdafactorSchedule
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy

from hf_zero.accelerator import ZeroAccelerator
from hf_zero.activation import SequenceParallel, chunked_loss_of, refuse_undividable
from hf_zero.checkpoint import load_pretrained, pretrained_class
from hf_zero.checkpoint.adapters import is_adapter_model, refuse_adapters
from hf_zero.checkpoint.folders import recover
from hf_zero.checkpoint.manifest import MANIFEST_NAME, run_of
from hf_zero.checkpoint.pretrained import refuse_quantizer
from hf_zero.comm import Comm, DistributedComm
from hf_zero.comm.agreement import run_on_all_ranks
from hf_zero.comm.ranks import transport_errors
from hf_zero.compat import check_overrides, replaced
from hf_zero.engine import (
    MemoryReport,
    ShardedModel,
    ZeroEngine,
    engine_of,
    gathered,
    materialize,
    require_engine,
)
from hf_zero.engine.memory import measure
from hf_zero.engine.partition import refuse_what_cannot_be_sharded
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.optim import ShardedOptimizer, granularity_of, inner_optimizers, refuse_unknown, sharded_of
from hf_zero.trainer.arguments import ZeroArgumentsMixin
from hf_zero.trainer.checkpoints import Checkpoints
from hf_zero.trainer.hub import describe_zero, hub_errors, log_failures, without_private_files
from hf_zero.trainer.place import Place, WholeStream, dealt_to_groups, seed_alike, skipping_dealt_batches
from hf_zero.trainer.resumable import chosen, fault_of, rotate
from hf_zero.trainer.signals import StopOnSignal
from hf_zero.trainer.start import check_room, tell_memory
from hf_zero.trainer.tensor_parallel import refuse_settings_of_divided
from hf_zero.trainer.training_arguments import ZeroSeq2SeqTrainingArguments, ZeroTrainingArguments
from hf_zero.trainer.uneven import in_step


if TYPE_CHECKING:  # gives type checkers a base class; at run time, the user chooses the trainer
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)

OVERRIDES = (
    *("create_accelerator_and_postprocess", "_move_model_to_device", "train"),
    *("_get_dataloader", "_get_train_sampler", "get_total_train_batch_size", "set_initial_training_values"),
    *("_init_training_state", "_load_from_checkpoint", "_load_optimizer_and_scheduler"),
    *("_run_epoch", "get_batch_samples", "compute_loss", "floating_point_ops", "_track_num_input_tokens"),
    *("evaluation_loop", "prediction_step"),
    *("_save_checkpoint", "_get_output_dir", "save_model", "_save", "_save_optimizer_and_scheduler"),
    *("_finalize_training", "_load_best_model"),
    *("init_hf_repo", "create_model_card", "push_to_hub", "_push_from_checkpoint", "_finish_current_push"),
)
# These methods do not call `super()`, so overrides in classes behind the mixin would be ignored.
REPLACED = ("save_model", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model")
LOADING = REPLACED[2:]  # the counterparts of an overridden `_save`


class ZeroTrainerMixin(_Trainer):
    """Makes any subclass of `Trainer` train with ZeRO: `class MyTrainer(ZeroTrainerMixin, TheirTrainer)`.

    The arguments must have the flags of `ZeroArgumentsMixin`. The model is sharded in place when it is first prepared
    for training or evaluation; it is never wrapped. `model` may also be a name on the Hub or a folder: then no rank
    ever holds the full model.

    The overridden methods are defined in the order in which Trainer calls them.

    Attributes:
        leaves_model (`bool`): Set it before `train` if `save_model` is called after it. The disk space for the final
            model is then checked before the first step.
        summed_losses (`tuple[type, ...]`): Classes whose `compute_loss` is a sum over tokens, which sequence
            parallelism requires.
        chunked_losses (`tuple[type, ...]`): Classes whose `compute_loss` does not read logits if there are none.

    Raises:
        `ConfigError`: If the model cannot be sharded or an argument is not supported.
    """

    args: ZeroArgumentsMixin
    accelerator: ZeroAccelerator
    hub_model_id: str | None
    arguments_class: type[ZeroArgumentsMixin] = ZeroTrainingArguments  # default if no `args` are passed
    leaves_model: bool = False
    summed_losses: tuple[type, ...] = (Trainer,)
    chunked_losses: tuple[type, ...] = (Trainer,)
    _predicts_loss_only: bool = False
    card_sections: Mapping[str, str] = MappingProxyType({})  # more of the model card: Markdown by title

    def __init_subclass__(cls, **kwargs):
        """Rejects base classes in an order in which methods of `Trainer` precede those of the mixin."""
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(ZeroTrainerMixin):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigError(
                f"{cls.__name__}({bases}): methods of Trainer would precede those of ZeroTrainerMixin; use the order "
                "(ZeroTrainerMixin, TheirTrainer) or (TheirTrainer, ZeroTrainer)"
            )

    def __init__(self, *args, **kwargs):
        given = _by_name(type(self), args, kwargs)
        settings, model = given.get("args"), given.get("model")
        if settings is None:
            settings = given["args"] = self._default_arguments(model)
        self._check_arguments(settings)
        _refuse_replaced(type(self))
        _refuse_loss(type(self), settings, given.get("compute_loss_func"))
        if isinstance(model, (str, os.PathLike)):
            given["model"] = self._model_of(model, settings)
        for name in ("model", "ref_model"):
            if isinstance(given.get(name), nn.Module):
                # TRL freezes the reference model, and with `peft_config` the base model, later
                is_ready = name == "model" and given.get("peft_config") is None
                _refuse_model(name, given[name], settings, is_ready=is_ready)
        _refuse_optimizers(**{key: given[key] for key in ("optimizers", "optimizer_cls_and_kwargs") if key in given})
        self._place = Place(self)
        with transport_errors("creating the trainer"):  # it may prepare data, for which ranks wait for each other
            super().__init__(**given)
        self.is_distributed_loading_by_transformers = False  # disables Trainer's own handling of such models
        self._mixed_mesh_grads = False  # otherwise Trainer reads `p.grad`, which is not there
        _refuse_model("model", self.model, self.args, is_ready=True)
        if is_adapter_model(self.model) and not self.saves_itself():
            tell = logger.warning if self.args.process_index == 0 else lambda _: None
            refuse_adapters(self.model, tell if self.args.save_strategy == SaveStrategy.NO else None)
        if isinstance(model, (str, os.PathLike)) and self.args.world_size == 1 and self.args.zero_offload == "none":
            materialize(self.model)  # a single process holds the full model, readable as in a plain Trainer
        if type(self.lr_scheduler) is AdafactorSchedule:
            self.lr_scheduler = ShardedAdafactorSchedule(self.lr_scheduler.optimizer, self.lr_scheduler.base_lrs[0])
        self.stop_on_signal = StopOnSignal(self)

    def _check_arguments(self, args) -> None:
        if not isinstance(args, ZeroArgumentsMixin):
            raise ConfigError(
                f"args: {type(args).__name__} has no zero_stage; use ZeroTrainingArguments, or mix ZeroArgumentsMixin "
                "into your class"
            )

    def _default_arguments(self, model) -> ZeroArgumentsMixin:
        return self.arguments_class(output_dir="tmp_trainer")

    def _model_of(self, name: str | os.PathLike, args: ZeroArgumentsMixin) -> nn.Module:
        """Loads the model of this name or folder. The weights stay in files until they are sharded."""
        settings = getattr(args, "model_init_kwargs", None) or {}
        return load_pretrained(pretrained_class(name, **settings), name, **settings)

    @classmethod
    def behind(cls, name: str) -> type:
        """Returns the class behind this mixin that defines the method `name`: `Trainer` or a subclass."""
        first = cls.__mro__.index(ZeroTrainerMixin) + 1
        return next(base for base in cls.__mro__[first:] if name in vars(base))

    @classmethod
    def saves_itself(cls) -> bool:
        """Returns whether the class behind the mixin overrides `_save`, and therefore writes the weights itself."""
        return cls.behind("_save") is not Trainer

    @classmethod
    def may_drop_logits(cls) -> bool:
        """Returns whether the loss can be computed without all logits."""
        return cls.behind("compute_loss") in cls.chunked_losses

    @property
    def place_model_on_device(self) -> bool:
        """Always `False`, whatever `Trainer` sets: the engine moves the shards, and the full model is never moved."""
        return False

    @place_model_on_device.setter
    def place_model_on_device(self, value: object) -> None:
        pass

    @property
    def _engine(self) -> ZeroEngine:
        """The engine of the model, which must be prepared."""
        return require_engine(self.model)

    @property
    def _zero_optimizer(self) -> ShardedOptimizer | None:
        return sharded_of(self.optimizer)

    @property
    def _prepared_optimizer(self) -> ShardedOptimizer:
        optimizer = self._zero_optimizer
        assert optimizer is not None, "the optimizer is not prepared yet"
        return optimizer

    def memory_report(self) -> MemoryReport:
        """Measures the memory that this rank holds, see [`ShardedModel.memory`]."""
        return measure(self.accelerator.shard(self.model))

    def wait_for_checkpoint(self) -> Path | None:
        """Waits for the checkpoint that is being saved in the background, and returns the newest checkpoint, if any.

        Raises:
            `CheckpointError`: On all ranks, if the checkpoint could not be saved.
        """
        return self._checkpoints.wait()

    # Before the first step

    def create_accelerator_and_postprocess(self, **kwargs) -> None:
        tp_size = getattr(self.model, "_tp_size", None)
        # hidden from accelerate, which would expect FSDP along the other axis of ranks
        with nullcontext() if tp_size is None else replaced(self.model, _tp_size=None):
            super().create_accelerator_and_postprocess(**kwargs)
        self.accelerator = ZeroAccelerator.adopt(
            self.accelerator,
            self.args.zero_config(),
            self.args.device,
            trains=lambda model: model is self.model,  # also if `evaluate` prepares it first
        )
        if tp_size is not None and tp_size > 1:
            self.accelerator.give_neighbours_same(tp_size, "tp")
        self.accelerator.drops_logits = False  # `compute_loss` decides for each step
        self._gather_by_setting()  # Trainer has stored the method of accelerate's own class
        self.accelerator.clips = lambda: bool(self.args.max_grad_norm)  # callbacks may change it
        self._checkpoints = Checkpoints(self, in_background=self.args.zero_async_save)

    def _gather_by_setting(self) -> None:
        gather = self.accelerator.gather_for_metrics
        self.gather_function = partial(gather, use_gather_object=self.args.eval_use_gather_object)

    def _move_model_to_device(self, model, device) -> None:
        """Does nothing: the engine moves the shards."""

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Trains like `Trainer.train`. `resume_from_checkpoint=True` resumes from the newest intact checkpoint.
        SIGTERM and SIGUSR1 stop training after the current step, with a checkpoint and exit code 128 + signal
        number."""
        self.add_callback(self.stop_on_signal)  # not in `__init__`: it does not show in the user's list of callbacks
        try:
            # handle signals before the first step too: reading a checkpoint may take minutes
            with self.stop_on_signal.received(), transport_errors("training"):
                checkpoint = self._checkpoint_of(resume_from_checkpoint)
                run = run_of(checkpoint) if checkpoint else None
                self._place.resume(run)
                output = super().train(checkpoint, *args, **kwargs)
                if (engine := engine_of(self.model)) is not None:
                    engine.finish_updates()  # raises errors of the last steps that arrive late from the device
                return output
        finally:
            self.remove_callback(self.stop_on_signal)

    def _checkpoint_of(self, given: str | os.PathLike | bool | None) -> Any:
        """Checks the checkpoint to resume from, and returns its path."""
        if given is True:
            return chosen(self.args)
        if given:
            recover(Path(given).parent)
            if (fault := fault_of(Path(given), reads_tensors=False)) is not None:
                raise fault  # before anything is loaded
        return given

    def _get_dataloader(
        self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None, **kwargs
    ):
        """Creates a loader like Trainer. Streams are split over ranks by batches, not by files. Ranks that share
        batches seed their workers alike."""
        streams = getattr(sys.modules.get("datasets"), "IterableDataset", ())  # imported, if the user has a stream
        if isinstance(dataset, streams):
            dataset = WholeStream(dataset)
        loader = super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key, **kwargs
        )
        if is_training:
            seed_alike(loader, self.accelerator.num_sharing)
        return loader

    def _get_train_sampler(self, *args, **kwargs) -> Sampler | None:
        return dealt_to_groups(super()._get_train_sampler(*args, **kwargs), self.accelerator.num_sharing)

    def get_total_train_batch_size(self, args, **kwargs) -> int:
        """Counts the rows of a step like Trainer. Rows that ranks share count once."""
        return super().get_total_train_batch_size(args, **kwargs) // self.args.zero_sequence_parallel

    def set_initial_training_values(self, args, dataloader, **kwargs):
        """Computes Trainer's numbers of epochs and steps; a resumed run may have another batch size than before."""
        return self._place.counted(super().set_initial_training_values(args, dataloader, **kwargs), args, dataloader)

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs
    ) -> tuple[int, int]:
        place = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        if self.state.global_step and self.state.global_step >= max_steps:  # Trainer's loop would train one more step
            return num_train_epochs, 0
        return self._place.first_batch(*place)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._checkpoints.load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._checkpoints.load_optimizer(checkpoint)
        theirs = super()._load_optimizer_and_scheduler
        if theirs.__func__ is not Trainer._load_optimizer_and_scheduler:  # GRPO's loads more, and calls Trainer's
            with replaced(Trainer, _load_optimizer_and_scheduler=lambda *_, **__: None):
                theirs(checkpoint)

    # Steps

    def _run_epoch(self, *, epoch, **kwargs):
        is_first = epoch == kwargs["epochs_trained"]
        if is_first:
            check_room(self)
            tell_memory(self)
        self._place.begin_epoch(epoch, skips=kwargs["steps_trained_in_current_epoch"] if is_first else 0)
        with skipping_dealt_batches():
            super()._run_epoch(epoch=epoch, **kwargs)

    def get_batch_samples(self, epoch_iterator, num_batches, device, **kwargs):
        """Takes batches like Trainer. All ranks raise [`DataError`] if a rank has fewer than others."""
        batches = self._place.next(epoch_iterator)
        samples, num_items = super().get_batch_samples(batches, num_batches, device, **kwargs)
        self._place.took(len(samples))
        return samples, num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, **kwargs):
        """Computes the loss like Trainer. Logits that nothing reads may not be computed."""
        is_last = type(self).compute_loss is ZeroTrainerMixin.compute_loss  # otherwise a subclass may read the outputs
        is_read = return_outputs and not (self._predicts_loss_only and is_last)
        is_read = is_read or type(self).behind("compute_loss") is not Trainer  # an override may read logits
        chunked = chunked_loss_of(self.model)
        if return_outputs:  # passed only if true, as in Trainer: an override behind the mixin may not accept it
            kwargs["return_outputs"] = return_outputs
        with nullcontext() if is_read or chunked is None else replaced(chunked, is_active=True):
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **kwargs)

    def floating_point_ops(self, inputs, **kwargs) -> int:
        """Estimates this rank's operations like Trainer. Ranks that share sequences also share the operations."""
        return super().floating_point_ops(inputs, **kwargs) // self.args.zero_sequence_parallel

    def _track_num_input_tokens(self, inputs, **kwargs) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs, **kwargs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.args.zero_sequence_parallel

    # Evaluation

    def evaluation_loop(self, dataloader, description, *args, **kwargs):
        """Evaluates like Trainer. All ranks raise [`DataError`] if they have different numbers of rows. With
        `bf16_full_eval` or `fp16_full_eval` the model computes in that dtype during the evaluation."""
        dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16 if self.args.bf16_full_eval else None
        engine, shown, whole = self.accelerator.shard(self.model), nullcontext(), nullcontext()
        # sentence-transformers' evaluator runs a different number of forwards on each rank
        if self.saves_itself() and getattr(self, "evaluator", None) is not None:
            whole = gathered(self.model)
        engine.finish_updates()  # evaluate the weights that a checkpoint would save now
        if dtype is not None and not self.is_in_train:
            if self._zero_optimizer is not None:
                self._zero_optimizer.eval()  # for schedule-free optimizers: Trainer calls it only after the cast
            shown = ShardedModel(self.model).computing_in(dtype)
        if self.accelerator.num_sharing > 1:
            self._gather_by_setting()  # Seq2SeqTrainer gathers from all ranks, which would repeat shared rows
        with transport_errors(description), shown, whole:
            output = super().evaluation_loop(in_step(dataloader, description), description, *args, **kwargs)
        self._gather_by_setting()  # Trainer applies the setting only once
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs) -> Any:
        engine = engine_of(self.model)  # None before the model is prepared: sequences are not split yet
        sequences = None if engine is None or prediction_loss_only else SequenceParallel.of(engine)
        # if logits are needed, every rank computes full sequences
        full = nullcontext() if sequences is None else replaced(sequences, is_active=False)
        with full, replaced(self, _predicts_loss_only=bool(prediction_loss_only)):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # Checkpoints

    def _save_checkpoint(self, model, trial, **kwargs) -> None:
        write = partial(super()._save_checkpoint, model, trial, **kwargs)
        self._checkpoints.save(super()._get_output_dir(trial), write)

    def _save_other_models(self, folder: Path) -> None:
        """Saves further models of a subclass into a checkpoint. All ranks must call it."""

    def _facts(self) -> dict:
        """Returns the manifest's record of this run."""
        last = self.accelerator.last_step.facts(self._engine)
        return {"step": self.state.global_step, **last, "extra": {"place": self._place.facts()}}

    def _get_output_dir(self, trial, **kwargs) -> str:
        """Returns the folder of checkpoints; during a save, the temporary folder."""
        current = self._checkpoints.current
        return super()._get_output_dir(trial, **kwargs) if current is None else str(current.path.parent)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model for `from_pretrained`. Each rank writes its own byte ranges of the weights."""
        self._checkpoints.save_model(output_dir if output_dir is not None else self.args.output_dir)
        if self.args.push_to_hub and not _internal_call and self._checkpoints.current is None:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | os.PathLike | None = None, state_dict=None) -> None:
        """Writes the files other than the weights, which all ranks write. Called on ranks that save files; a subclass
        may override it to add files."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        if self.saves_itself():
            super()._save(str(output_dir))
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(output_dir)
        torch.save(self.args, Path(output_dir, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._checkpoints.save_schedule(output_dir)

    def _finalize_training(self, trial, num_train_samples, start_time, **kwargs):
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            logger.warning("hf_zero: the last checkpoint is saved again: %s", error)
            self._save_checkpoint(self.model, trial)
            self._checkpoints.wait()
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        # otherwise Trainer deletes everything that looks like a checkpoint except the best
        with replaced(self.args, save_total_limit=None):
            output = super()._finalize_training(trial, num_train_samples, start_time, **kwargs)
        if limit == 1 and best is not None and self.args.should_save:
            rotate(super()._get_output_dir(trial), 1, None, best)
        return output

    def _load_best_model(self) -> None:
        self._prepared_optimizer.eval()  # matches the mode in which the checkpoint was saved
        self._checkpoints.load_weights(self.state.best_model_checkpoint)

    # The Hub: all ranks call each method, and rank 0 sends the requests

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Creates the repository on rank 0, and broadcasts its name, which all ranks read before each push."""
        create = partial(super().init_hf_repo, *args, **kwargs)

        def act() -> None:
            with hub_errors(f"creating {self.args.hub_model_id or os.path.basename(self.args.output_dir)}"):
                create()

        comm = self._ranks()
        run_on_all_ranks(comm, "creating the repository", act)
        self.hub_model_id = comm.broadcast_object(self.hub_model_id)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the card of `Trainer` or its subclass, with tags and a section on ZeRO."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            describe_zero(self)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Pushes like `Trainer.push_to_hub`. All ranks save the model, and rank 0 uploads it."""
        name = self.hub_model_id or self.args.hub_model_id or self.args.output_dir
        # The other ranks do not wait for the upload, which may exceed the timeout of a collective.
        retry = f"from {self.args.output_dir} (to retry, use `hf-zero push`)"
        with hub_errors(f"pushing to {name} {retry}"), without_private_files():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str, **kwargs) -> None:
        """Copies the weights of a complete checkpoint and starts a background upload, on rank 0."""
        if self._checkpoints.current is not None:
            folder = os.path.join(super()._get_output_dir(None), os.path.basename(checkpoint_folder))
            self._checkpoints.push = lambda: self._push_from_checkpoint(folder, **kwargs)
            return
        if self.is_world_process_zero():  # Trainer overwrites files that the manifest lists
            Path(self.args.output_dir, MANIFEST_NAME).unlink(missing_ok=True)
        push = partial(super()._push_from_checkpoint, checkpoint_folder, **kwargs)

        def act() -> None:
            earlier = getattr(self, "push_in_progress", None)
            if earlier is not None and earlier.is_done():  # Trainer forgets it now
                log_failures(earlier)
            with hub_errors(f"pushing {checkpoint_folder}"), without_private_files():
                push()

        run_on_all_ranks(self._ranks(), f"pushing {checkpoint_folder}", act)

    def _finish_current_push(self, **kwargs: Any) -> None:
        """Waits for background uploads, and logs a warning for each failure."""
        super()._finish_current_push(**kwargs)
        push = getattr(self, "push_in_progress", None)  # set on rank 0 once there is a repository
        if push is not None:
            log_failures(push)

    def _ranks(self) -> Comm:
        """Returns the communicator, also before the model is prepared."""
        engine = engine_of(self.model)
        if engine is not None:
            return engine.comm
        if dist.is_available() and dist.is_initialized():
            return DistributedComm(dist.group.WORLD, self.args.device, float(self.args.ddp_timeout))
        return Comm(torch.device("cpu"), float(self.args.ddp_timeout))


check_overrides(ZeroTrainerMixin, Trainer, OVERRIDES)


def _by_name(cls: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns a trainer's arguments by name, in the order of the first class whose signature has `model`: in
    `DPOTrainer` the reference model precedes the arguments, in `Trainer` it does not exist."""
    own = cls.__mro__.index(ZeroTrainerMixin) + 1
    signatures = [list(inspect.signature(base.__init__).parameters)[1:] for base in cls.__mro__[own:]]
    names = next(names for names in signatures if "model" in names)
    if len(args) > len(names):
        raise TypeError(f"{cls.__name__} takes at most {len(names)} arguments, but {len(args)} were given")
    return {**dict(zip(names, args)), **kwargs}


def _refuse_replaced(cls: type[ZeroTrainerMixin]) -> None:
    """Raises for a class whose overrides of saving or loading would silently not be called."""
    behind = cls.__mro__[cls.__mro__.index(ZeroTrainerMixin) : cls.__mro__.index(Trainer)]
    for theirs in [theirs for theirs in behind if theirs not in ZeroTrainerMixin.__mro__]:
        refused = [name for name in REPLACED if not (name in LOADING and cls.saves_itself())]
        name = next((name for name in refused if name in vars(theirs)), None)
        if name is not None:
            raise ConfigError(
                f"{theirs.__name__}.{name}: would not be called, since ZeroTrainerMixin saves and loads on all ranks; "
                f"if it calls super().{name}, put it first: class Mine({theirs.__name__}, ZeroTrainer)"
            )


def _refuse_loss(cls: type[ZeroTrainerMixin], args: ZeroArgumentsMixin, compute_loss_func: Callable | None) -> None:
    """Raises [`ConfigError`] for a loss that needs logits that are not computed on this rank."""
    is_asked = args.zero_chunked_loss == "auto" and args.label_smoothing_factor and compute_loss_func is None
    if is_asked and args.process_index == 0:
        logger.warning("chunked_loss: label smoothing computes all logits at once")
    if args.zero_chunked_loss == "on" and compute_loss_func is not None:
        raise ConfigError(
            "zero_chunked_loss: compute_loss_func computes the loss from all logits; use auto or off, or remove "
            "compute_loss_func"
        )
    if args.zero_chunked_loss == "on" and not cls.may_drop_logits():
        raise ConfigError(
            f"zero_chunked_loss: {_name_of(cls.behind('compute_loss'))} overrides compute_loss, which may read "
            "logits; use auto or off"
        )
    if args.zero_sequence_parallel > 1 and compute_loss_func is not None:
        raise ConfigError(
            "zero_sequence_parallel: compute_loss_func computes the loss from all logits; use one of them"
        )
    known = (ZeroTrainerMixin, *cls.summed_losses)
    theirs = [base for base in cls.__mro__ if "compute_loss" in vars(base) and base not in known]
    if args.zero_sequence_parallel > 1 and theirs:
        raise ConfigError(
            f"zero_sequence_parallel: {_name_of(theirs[0])} overrides compute_loss, which would receive only a part "
            "of the logits; remove zero_sequence_parallel or compute_loss"
        )


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def _refuse_model(name: str, model: nn.Module, args: ZeroArgumentsMixin, *, is_ready: bool) -> None:
    """Raises for a model that cannot be sharded, before it is modified. With `is_ready`, the parameters that require
    gradients now are those that will be trained."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError(f"{name}: was loaded with device_map, which spreads it over devices; load it without")
    if args.zero_stage == 3:
        settings = getattr(getattr(model, "config", None), "quantization_config", None)
        refuse_quantizer(type(model).__name__, settings)
    if engine_of(model) is None:
        refuse_settings_of_divided(name, model, args)
        if args.zero_sequence_parallel > 1 and name == "model":
            refuse_undividable(model, args.zero_sequence_parallel)
        refuse_what_cannot_be_sharded(model, args.device, is_ready=is_ready)


def _refuse_optimizers(optimizers=(None, None), optimizer_cls_and_kwargs=None) -> None:
    """Raises for an optimizer that cannot run on shards, before the model is modified."""
    if optimizers[0] is not None:
        for inner in inner_optimizers(optimizers[0]):
            granularity_of(inner)
    made_by = optimizer_cls_and_kwargs[0] if optimizer_cls_and_kwargs is not None else None
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):  # a factory's result is checked later
        refuse_unknown(made_by)


class ShardedAdafactorSchedule(AdafactorSchedule):
    """Adafactor's schedule, which reports the learning rates of the parameters that this rank updates. The stock class
    reads gradients, which the step has released."""

    def get_lr(self) -> list[float]:
        optimizer = self.optimizer
        rates = []
        for group, base in zip(optimizer.param_groups, self.base_lrs):
            state = optimizer.state.get(group["params"][0], {})
            rates.append(optimizer._get_lr(group, state) if group.get("relative_step") and "step" in state else base)
        return rates


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with ZeRO. Takes `ZeroTrainingArguments` and all arguments of `Trainer`."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with ZeRO. Takes `ZeroSeq2SeqTrainingArguments`."""

    arguments_class = ZeroSeq2SeqTrainingArguments
