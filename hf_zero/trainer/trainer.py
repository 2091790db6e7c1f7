"""`ZeroTrainer`: the Hugging Face `Trainer` over sharded models."""

import inspect
import io
import logging
import os
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_zero.accelerator import ZeroAccelerator
from hf_zero.checkpoint import (
    load_pretrained,
    load_state,
    load_weights,
    plan_weights,
    pretrained_class,
    save_pretrained,
    save_state,
)
from hf_zero.checkpoint.adapters import is_adapter_model, load_adapters, plan_prompts, refuse_adapters, save_adapters
from hf_zero.checkpoint.folders import restore_replaced
from hf_zero.checkpoint.foreign import carried, detect, load_foreign_state, load_foreign_weights
from hf_zero.checkpoint.foreign.trusted import load_small
from hf_zero.checkpoint.manifest import STATE_FOLDER
from hf_zero.checkpoint.quantized import refuse_quantized_model
from hf_zero.checkpoint.replacing import added
from hf_zero.checkpoint.table import TABLE_NAME
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, reraise, run_on_all_ranks
from hf_zero.comm.ranks import transport_errors
from hf_zero.compat import check_overrides
from hf_zero.engine import ZeroEngine, engine_of, materialize
from hf_zero.engine.access import named_writes
from hf_zero.engine.partition import refuse_what_cannot_be_sharded
from hf_zero.errors import CheckpointError, CommError, ConfigError
from hf_zero.optim import ShardedOptimizer, granularity_of, inner_optimizers, refuse_unknown, sharded_of
from hf_zero.planner import MemoryReport, measure
from hf_zero.trainer.arguments import ZeroArgumentsMixin, ZeroSeq2SeqTrainingArguments, ZeroTrainingArguments
from hf_zero.trainer.belonging import schedule_position
from hf_zero.trainer.checks import check_schedule
from hf_zero.trainer.hub import PushMixin
from hf_zero.trainer.hub_tokens import token_warning, without_tokens
from hf_zero.trainer.memory import TellMemory
from hf_zero.trainer.parallel import apart, arrange, refuse_divided
from hf_zero.trainer.position import Epochs, Position, epochs_of, leave_out
from hf_zero.trainer.resuming import CompareLoss, Resumed, chosen, refuse_damaged, resumed_from
from hf_zero.trainer.room import check_room, fallback_of, lack_of_room, save_with_room
from hf_zero.trainer.rotation import keep_best, rotation
from hf_zero.trainer.saving import Saver
from hf_zero.trainer.schedule import changes, show_rates, take_new_rates
from hf_zero.trainer.signals import StopOnSignal
from hf_zero.trainer.uneven import Supply, evened


logger = logging.getLogger(__name__)

OVERRIDES = (
    "create_accelerator_and_postprocess",
    "train",
    "set_initial_training_values",
    "_move_model_to_device",
    "_init_training_state",
    "_run_epoch",
    "get_batch_samples",
    "evaluation_loop",
    "_finalize_training",
    "_get_output_dir",
    "_save_checkpoint",
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
    prepared, for training or evaluation; it is never wrapped. In place of a model, its name on the Hub or its folder
    can be given: no rank then ever holds it whole.

    Attributes:
        leaves_model (`bool`): set it before `train` where `save_model` comes after it: whether the disk has room for
            that model too is then known before the first step.

    Raises:
        `ConfigError`: for a model or arguments that cannot be sharded.
    """

    args: ZeroArgumentsMixin
    arguments_class: type[ZeroArgumentsMixin] = ZeroTrainingArguments  # made where none are given
    leaves_model: bool = False

    def __init__(self, *args, **kwargs):
        given = _by_name(type(self), args, kwargs)
        settings, model = given.get("args"), given.get("model")
        if settings is None:
            settings = given["args"] = self._default_arguments(model)
        self._check_arguments(settings)
        _check_schedule(type(self), given)
        if isinstance(model, (str, os.PathLike)):
            given["model"] = self._model_of(model, settings)
        for name in ("model", "ref_model"):
            if isinstance(given.get(name), nn.Module):
                # a reference is frozen later, and so is the base of the adapter that TRL makes of `peft_config`
                is_ready = name == "model" and given.get("peft_config") is None
                _refuse_model(name, given[name], settings, is_ready=is_ready)
        _refuse_optimizers(**{key: given[key] for key in ("optimizers", "optimizer_cls_and_kwargs") if key in given})
        with transport_errors("making the trainer"):  # ranks take turns in it, where it prepares data
            try:
                super().__init__(**given)
            except ValueError as error:
                named = _named(self, error)
                if named is None:
                    raise
                raise named from error
        self.is_distributed_loading_by_transformers = False  # whose own ways to train it are not ours
        _refuse_model("model", self.model, self.args, is_ready=True)
        if is_adapter_model(self.model):
            refuse_adapters(self.model)

        if isinstance(model, (str, os.PathLike)) and self.args.world_size == 1 and self.args.zero_offload == "none":
            materialize(self.model)  # one process holds it whole anyway: it can be read and copied, as under Trainer
        show_rates(self.lr_scheduler)
        self.stop_on_signal = StopOnSignal(self)

    def _check_arguments(self, args) -> None:
        if not isinstance(args, ZeroArgumentsMixin):
            raise ConfigError(
                f"args: {type(args).__name__} has no zero_stage; use ZeroTrainingArguments, or mix ZeroArgumentsMixin "
                "into your class"
            )

    def _default_arguments(self, model) -> ZeroArgumentsMixin:
        """As Trainer's, where none are given."""
        return self.arguments_class(output_dir="tmp_trainer")

    def _model_of(self, name: str | os.PathLike, args: ZeroArgumentsMixin) -> nn.Module:
        """The model of this name or folder, its weights still in files."""
        settings = getattr(args, "model_init_kwargs", None) or {}
        return load_pretrained(pretrained_class(name, **settings), name, **settings)

    def create_accelerator_and_postprocess(self, **kwargs) -> None:
        with apart(self.model):
            super().create_accelerator_and_postprocess(**kwargs)
        arrange(self.accelerator, self.model)
        ZeroAccelerator.adopt(
            self.accelerator,
            self.args.zero_config(),
            self.args.device,
            trains=lambda model: model is self.model,  # `evaluate` prepares it too
        )
        self.accelerator.clips = bool(self.args.max_grad_norm)
        self._saver = Saver(in_background=self.args.zero_async_save)
        self.resumed = Resumed()
        self._start = Position(0, 0, 0)  # where this run's data begins
        self._data: Epochs | None = None  # None where batches are not known to follow an order, and before training

    def _move_model_to_device(self, model, device) -> None:
        """The engine moves what each rank keeps."""

    @property
    def zero_engine(self) -> ZeroEngine | None:
        """The engine that holds the model, or `None` before it is first prepared."""
        return engine_of(self.model)

    @property
    def _engine(self) -> ZeroEngine:
        """The engine that holds the model, which must have been prepared before."""
        engine = self.zero_engine
        assert engine is not None, "the model is not sharded yet"
        return engine

    @property
    def _zero_optimizer(self) -> ShardedOptimizer | None:
        return sharded_of(self.optimizer)

    @property
    def _prepared_optimizer(self) -> ShardedOptimizer:
        optimizer = self._zero_optimizer
        assert optimizer is not None, "the optimizer is not prepared yet"
        return optimizer

    def memory_report(self) -> MemoryReport:
        """Bytes that this rank holds by tensor class, measured, beside what DDP would hold."""
        return measure(self.accelerator.shard(self.model), sharded_of(self.optimizer))

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None, **kwargs):
        """As `Trainer.train`. `True` resumes from the newest checkpoint that is as it was saved. SIGTERM and SIGUSR1
        end the training after the step under way, with a checkpoint and the exit code 128 + the signal's number."""
        before = self.stop_on_signal.install()  # checkpoints are read for minutes before the first step
        own = (self.stop_on_signal, CompareLoss(self), TellMemory(self))
        for callback in own:  # only now: people list a trainer's callbacks
            self.add_callback(callback)
        try:
            with transport_errors("training"), named_writes():
                resume_from_checkpoint = self._checkpoint_of(resume_from_checkpoint)
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs)
        finally:
            for callback in own:
                self.remove_callback(callback)
            self.stop_on_signal.remove(before)

    def _checkpoint_of(self, given: str | os.PathLike | bool | None) -> str | os.PathLike | bool | None:
        """What Trainer is to resume from, looked through; notes where that run was."""
        if isinstance(given, (str, os.PathLike)):
            restore_replaced(Path(given).parent)
        if given is True:
            given = chosen(self.args, needs_config=self._has_config())
        elif given:
            refuse_damaged(Path(given), needs_config=self._has_config())
        self._warn_of_token(given)
        self.resumed = resumed_from(given or None)
        self._start = self.resumed.position
        return given

    def _warn_of_token(self, checkpoint: str | os.PathLike | bool | None) -> None:
        if isinstance(checkpoint, (str, os.PathLike)) and checkpoint and self.args.process_index == 0:
            warning = token_warning(checkpoint)
            if warning is not None:
                logger.warning("%s", warning)

    def _finalize_training(self, trial, num_train_samples, start_time, **kwargs):
        self._complete_checkpoint(trial)
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        self.args.save_total_limit = (
            None  # Trainer would delete every folder that looks like a checkpoint but the best
        )
        try:
            output = super()._finalize_training(trial, num_train_samples, start_time, **kwargs)
        finally:
            self.args.save_total_limit = limit
        if limit == 1 and best is not None and self.args.should_save:
            keep_best(super()._get_output_dir(trial), best)
        return output

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval", **kwargs
    ):
        """As in Trainer; a rank whose data ends before another's goes on with batches that do not count. For
        `bf16_full_eval` and `fp16_full_eval` the model is only shown in that dtype, and trains on as it was."""
        dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16 if self.args.bf16_full_eval else None
        engine, shown = self.accelerator.shard(self.model), nullcontext()
        engine.finish_updates()  # what is measured is what a checkpoint of now would hold
        if dtype is not None and not self.is_in_train:
            if self._zero_optimizer is not None:
                self._zero_optimizer.eval()  # schedule-free ones: Trainer does it when the model is shown already
            shown = engine.computing_in(dtype)
        with transport_errors(description), shown, evened(self, dataloader) as dataloader:
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix, **kwargs
            )

    # Where the run is in its data

    def set_initial_training_values(self, args, dataloader, **kwargs):
        """As in Trainer; a run that is resumed counts from where it is, whatever its batches were before."""
        self._supply = Supply(dataloader)
        values = super().set_initial_training_values(args, dataloader, **kwargs)
        epochs, per_epoch, examples, samples, per_step, in_epoch, steps = self._supply.longest(values)
        self._data = epochs_of(dataloader, args.gradient_accumulation_steps)
        if self._goes_on():
            self._start = start = self._start.within(self._data)
            leave_out(dataloader, start, self._data)
            if args.max_steps > 0:
                epochs = start.epochs_until(steps - start.step, self._data)
            else:
                steps = start.step + start.steps_until(args.num_train_epochs, self._data)
        return epochs, per_epoch, examples, samples, per_step, in_epoch, steps

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial, **kwargs
    ):
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial, **kwargs
        )
        if self._goes_on():
            return self._start.epoch, self._start.sample // self._data.per_step * self._data.accumulation
        return epochs, batches

    def _run_epoch(self, *, epoch, steps_in_epoch, num_update_steps_per_epoch, **kwargs):
        """As in Trainer; an epoch that is gone on with may be shorter, in batches of the present size."""
        if epoch == kwargs["epochs_trained"]:  # the first one
            check_room(self)
        if self._goes_on() and epoch == self._start.epoch:
            steps_in_epoch = self._data.batches(self._start.sample)
            num_update_steps_per_epoch = self._data.steps(self._start.sample)
        super()._run_epoch(
            epoch=epoch,
            steps_in_epoch=steps_in_epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            **kwargs,
        )

    def get_batch_samples(self, epoch_iterator, num_batches, device, **kwargs):
        """As in Trainer; where a rank has fewer batches than others all of them say so, and none waits."""
        batches = self._supply.next(epoch_iterator, num_batches, self._engine.comm, self.state.global_step)
        return super().get_batch_samples(batches, num_batches, device, **kwargs)

    def _goes_on(self) -> bool:
        return self._start.step > 0 and self._data is not None and not self.args.ignore_data_skip

    # Saving: every rank writes its own ranges, so every rank must come here

    def wait_for_checkpoint(self) -> Path | None:
        """Returns when what is written in the background is complete: the newest checkpoint, if there is one.

        Raises:
            `CheckpointError`: it could not be saved; on all ranks.
        """
        return self._saver.wait()

    def _complete_checkpoint(self, trial) -> None:
        """At the end of the training: a checkpoint of now that a thread could not save is saved once more."""
        if self._is_background_done():
            return
        last = self._saver.last
        if last is not None and last.name == f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}":
            with self._saver.in_foreground():
                self._save_checkpoint(self.model, trial)
        best = self.state.best_model_checkpoint
        if best is not None and not any(collect_from_all_ranks(self._engine.comm, best, lambda: os.path.isdir(best))):
            logger.warning("%s: could not be saved, so the best model is not loaded", best)
            self.state.best_model_checkpoint = None

    def _is_background_done(self) -> bool:
        """Waits as `wait_for_checkpoint`; what could not be saved is said. The same on all ranks."""
        try:
            self.wait_for_checkpoint()
        except CommError:
            raise
        except Exception as error:
            if self.args.process_index == 0:
                logger.warning("%s; earlier checkpoints stay, and what is in memory can still be saved", error)
            return False
        return True

    def _save_checkpoint(self, model, trial, **kwargs) -> None:
        """Saves a checkpoint; where the disk is full, into `zero_save_fallback`, or when there is room."""
        comm, fallback = self._engine.comm, self.args.zero_save_fallback
        lack_of_room(comm, self.wait_for_checkpoint)  # the thread has said it, and this checkpoint waits for room
        run_dir, name = super()._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        wanted = os.path.join(run_dir, name)
        folder = save_with_room(
            comm,
            wanted,
            lambda folder: self._write_checkpoint(model, trial, folder, **kwargs),
            self.stop_on_signal,
            what="the checkpoint",
            fallback=partial(fallback_of, fallback, run_dir, name) if fallback else None,
        )
        if folder != wanted and comm.rank == 0:
            logger.warning("%s: no room, so the checkpoint is in %s; to resume from it, name it", wanted, folder)

    def _write_checkpoint(self, model, trial, folder: str, **kwargs) -> None:
        """Lets Trainer write its files into a temporary folder, adds the tensors, and gives it its name."""
        self._prepared_optimizer.eval()  # the weights to save are those to evaluate; the next step turns back
        run_dir = os.path.dirname(folder)
        self._saver.begin(
            self._engine,
            None if self.args.save_only_model else self._zero_optimizer,
            folder,
            weights=(plan_prompts if is_adapter_model(self.model) else plan_weights)(self._engine),
            **({} if self.args.save_only_model else self._facts()),
        )
        failure: BaseException | None = None
        try:
            super()._save_checkpoint(model, trial, **kwargs)
            self._note_best(run_dir)
        except Exception as error:  # a full disk, say, where this rank writes a file of its own
            failure = error
        try:
            run_on_all_ranks(self._engine.comm, f"saving to {folder}", lambda: reraise(failure))
        except BaseException:
            self._saver.discard()
            raise
        # elsewhere there may be checkpoints of other runs
        is_own = Path(run_dir) == Path(super()._get_output_dir(trial))
        limit = self.args.save_total_limit if is_own else None
        self._saver.finish(rotation(run_dir, limit, self.state.best_model_checkpoint, newest=folder))

    def _note_best(self, run_dir: str) -> None:
        """The best checkpoint goes by its name here, not by that of the temporary folder or a former place."""
        if not self.state.best_global_step:
            return
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        path = os.path.join(run_dir, name)
        if self.state.best_global_step == self.state.global_step or os.path.isdir(path):
            self.state.best_model_checkpoint = path
            if self.args.should_save:
                current = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                self.state.save_to_json(os.path.join(self._saver.run_dir or run_dir, current, TRAINER_STATE_NAME))

    def _facts(self) -> dict:
        position = None
        if self._data is not None:
            position = self._start.after(self.state.global_step, self._data)
        return {
            "step": self.state.global_step,
            **self.accelerator.last_step.facts(self._engine),
            "extra": {
                "position": asdict(position) if position is not None else None,
                "accumulation": self.args.gradient_accumulation_steps,
                "schedule": schedule_position(self.lr_scheduler),
            },
        }

    def _get_output_dir(self, trial, **kwargs) -> str:
        return self._saver.run_dir or super()._get_output_dir(trial, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that `from_pretrained` loads: each rank its own byte ranges of the weights."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        engine = self.accelerator.shard(self.model)
        if self._zero_optimizer is not None:
            self._zero_optimizer.eval()
        if self._saver.is_saving:
            self._write_model(output_dir)
            return
        self._is_background_done()
        fallback = self.args.zero_save_fallback
        folder = save_with_room(
            engine.comm,
            output_dir,
            self._write_model,
            self.stop_on_signal,
            what="the model",
            fallback=partial(fallback_of, fallback, output_dir) if fallback else None,
        )
        self.saved_elsewhere = None
        if folder != output_dir:
            self.note_elsewhere(output_dir, folder)
        elif self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_model(self, output_dir: str) -> None:
        engine = self._engine
        if not self._saver.is_saving and not is_adapter_model(self.model):
            save_pretrained(engine, output_dir)
        with nullcontext(output_dir) if self._saver.is_saving else added(engine.comm, output_dir) as folder:
            if is_adapter_model(self.model):
                save_adapters(engine, folder)
            beside = (lambda: self._save_beside(folder)) if self.args.should_save else (lambda: None)
            run_on_all_ranks(engine.comm, f"saving to {output_dir}", beside)

    def _save_beside(self, output_dir: str | os.PathLike) -> None:
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(output_dir)
        buffer = io.BytesIO()  # torch's own writer says of a full disk only that it failed
        torch.save(without_tokens(self.args), buffer)
        Path(output_dir, TRAINING_ARGS_NAME).write_bytes(buffer.getvalue())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saver.is_saving:
            save_state(self._engine, self._prepared_optimizer, output_dir, extra={})
        comm = self._engine.comm
        run_on_all_ranks(
            comm, f"{output_dir}: saving the scheduler", on_first(comm, lambda: self._save_scheduler(output_dir))
        )

    def _save_scheduler(self, output_dir: str) -> None:
        if self.lr_scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns when a scheduler is saved without its optimizer
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _push_from_checkpoint(self, checkpoint_folder: str, **kwargs) -> None:
        if self._saver.is_saving:
            folder = os.path.join(super()._get_output_dir(None), os.path.basename(checkpoint_folder))
            if self._saver.folder == Path(os.path.abspath(folder)):  # else the disk has no room for what is pushed
                self._saver.push_later(lambda: self._push_from_checkpoint(folder, **kwargs))
        else:
            if self.is_world_process_zero():  # Trainer copies single files over those that the table is of
                Path(self.args.output_dir, TABLE_NAME).unlink(missing_ok=True)
            super()._push_from_checkpoint(checkpoint_folder, **kwargs)

    # Loading

    def _has_config(self) -> bool:
        """Whether a checkpoint of the model has a config in its folder."""
        return not is_adapter_model(self.model) and hasattr(getattr(self.model, "config", None), "save_pretrained")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._prepared_optimizer.eval()  # it was saved so: nothing is to be turned later
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        """Reads each rank's ranges from the folder; nobody holds the whole model."""
        engine = self.accelerator.shard(self.model)
        foreign = detect(folder)
        if foreign is not None and foreign.read_weights is not None:
            load_foreign_weights(engine, folder)
            return
        (load_adapters if is_adapter_model(self.model) else load_weights)(engine, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        foreign = detect(checkpoint)
        if foreign is not None:
            logger.info("%s: resuming from a checkpoint of %s", checkpoint, foreign.name)
            load_foreign_state(self._engine, self._prepared_optimizer, checkpoint)
        elif os.path.isdir(os.path.join(checkpoint, STATE_FOLDER)):
            load_state(self._engine, self._prepared_optimizer, checkpoint)
        else:
            logger.warning("%s: has no optimizer state (save_only_model), so the optimizer starts anew", checkpoint)
            return
        subject = f"{checkpoint}: loading the scheduler"
        run_on_all_ranks(self._engine.comm, subject, lambda: self._load_scheduler(checkpoint))

    def _load_scheduler(self, checkpoint: str) -> None:
        path = os.path.join(checkpoint, SCHEDULER_NAME)
        is_foreign = detect(checkpoint) is not None
        if not is_foreign and not os.path.isfile(path):
            raise CheckpointError(
                f"{path}: is missing, so the schedule would start anew; resume from another checkpoint"
            )
        saved = load_small(Path(path)) if os.path.isfile(path) else None
        groups = self.optimizer.param_groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # DeepSpeed drops groups without parameters, which leaves its schedule with fewer of them.
            if saved is not None and len(saved.get("base_lrs", groups)) == len(groups):
                given = list(getattr(self.lr_scheduler, "base_lrs", ()))
                self.lr_scheduler.load_state_dict(saved)
                self._tell_changes(checkpoint, saved, given)
                take_new_rates(self.lr_scheduler)
            elif is_foreign:
                num_steps = carried(checkpoint).num_steps or 0
                logger.warning("%s: does not fit; this run's schedule goes on at step %d", path, num_steps)
                for _ in range(num_steps):
                    self.lr_scheduler.step()

    def _tell_changes(self, checkpoint: str, saved: dict, given: list[float]) -> None:
        path = os.path.join(checkpoint, TRAINER_STATE_NAME)
        before = TrainerState.load_from_json(path).max_steps if os.path.isfile(path) else None
        found = changes(self.lr_scheduler, saved, given=given, num_steps=self.state.max_steps, num_steps_before=before)
        for sentence in found if self.args.should_log else ():
            logger.warning("%s: %s", checkpoint, sentence)


check_overrides(ZeroTrainerMixin, Trainer, OVERRIDES)


def _by_name(cls: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A trainer's arguments by name, in the order of the first class that names its model: `DPOTrainer` takes a
    reference model before the arguments, `Trainer` does not."""
    own = cls.__mro__.index(ZeroTrainerMixin) + 1
    signatures = [list(inspect.signature(base.__init__).parameters)[1:] for base in cls.__mro__[own:]]
    names = next(names for names in signatures if "model" in names)
    if len(args) > len(names):
        raise TypeError(f"{cls.__name__} takes at most {len(names)} arguments, {len(args)} were given")
    return {**dict(zip(names, args)), **kwargs}


def _named(trainer: Trainer, error: ValueError) -> ConfigError | None:
    """What a trainer refuses, in one line; `None` where it is not known what that is."""
    strategy = getattr(getattr(trainer, "args", None), "eval_strategy", "no")
    if "eval_dataset" in str(error) and strategy != "no" and getattr(trainer, "eval_dataset", None) is None:
        return ConfigError(
            f"eval_strategy {getattr(strategy, 'value', strategy)}: there is nothing to evaluate on; give the trainer "
            "an eval_dataset, or --eval_strategy no"
        )
    return None


def _check_schedule(cls: type, given: dict[str, Any]) -> None:
    """Tries the schedule where Trainer is going to make it: not where one is given, or a subclass makes its own."""
    optimizer, schedule = given.get("optimizers") or (None, None)
    makers = ("create_scheduler", "create_optimizer_and_scheduler")
    if schedule is not None or any(getattr(cls, name) is not getattr(Trainer, name) for name in makers):
        return
    kwargs: dict[str, Any] = (given.get("optimizer_cls_and_kwargs") or (None, {}))[1]
    rate = kwargs.get("lr") if optimizer is None else getattr(optimizer, "defaults", {}).get("lr")
    check_schedule({**vars(given["args"]), **({} if rate is None else {"learning_rate": float(rate)})})


def _refuse_model(name: str, model: nn.Module, args: ZeroArgumentsMixin, *, is_ready: bool) -> None:
    """Refuses a loaded model that cannot be sharded before anything is done with it.

    Args:
        name (`str`): of the trainer's argument.
        model (`nn.Module`): the model.
        args (`ZeroArgumentsMixin`): how it is to be sharded.
        is_ready (`bool`): what requires gradients now is what will be trained.
    """
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError(f"{name}: was loaded with device_map, which spreads it over devices; load it without")
    if args.zero_stage == 3:
        refuse_quantized_model(model)
    if engine_of(model) is None:
        refuse_divided(name, model, args)
        refuse_what_cannot_be_sharded(model, args.device, is_ready=is_ready)


def _refuse_optimizers(optimizers=(None, None), optimizer_cls_and_kwargs=None) -> None:
    """Refuses an optimizer that cannot run on shards before anything is done with the model."""
    if optimizers[0] is not None:
        for inner in inner_optimizers(optimizers[0]):
            granularity_of(inner)
    made_by = optimizer_cls_and_kwargs[0] if optimizer_cls_and_kwargs is not None else None
    if isinstance(made_by, type) and issubclass(made_by, torch.optim.Optimizer):  # a factory's is looked at when made
        refuse_unknown(made_by)


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """`transformers.Trainer` with ZeRO. Takes `ZeroTrainingArguments`, and everything that `Trainer` takes."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with ZeRO. Takes `ZeroSeq2SeqTrainingArguments`."""

    arguments_class = ZeroSeq2SeqTrainingArguments
