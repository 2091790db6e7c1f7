"""Saves a trainer's checkpoints: Trainer writes into a temporary folder, which gets its name when everything is in
it."""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_zero.checkpoint import Checkpoint, Snapshots, plan_state, save_pretrained, save_state
from hf_zero.checkpoint.adapters import is_adapter_model, plan_model, save_adapters
from hf_zero.checkpoint.manifest import remove_manifest
from hf_zero.checkpoint.staging import added
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, run_on_all_ranks
from hf_zero.compat import check_overrides
from hf_zero.errors import CheckpointError, CommError
from hf_zero.trainer.batches import BatchesMixin
from hf_zero.trainer.disk_space import rotate
from hf_zero.trainer.hub import PushMixin, without_tokens
from hf_zero.trainer.resumable import schedule_position
from hf_zero.trainer.signals import StopOnSignal
from hf_zero.trainer.whole import plan_parameters, saves_whole, with_whole_values


logger = logging.getLogger(__name__)

OVERRIDES = (
    "_finalize_training",
    "_get_output_dir",
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_push_from_checkpoint",
)


class Saver:
    """The checkpoint that is being saved, and the one that a thread is still writing, after a copy, where it writes
    `in_background`."""

    def __init__(self, *, in_background: bool):
        self.snapshots = Snapshots() if in_background else None  # None: `finish` returns when it is complete
        self.current: Checkpoint | None = None  # while Trainer writes its files
        self.last: Path | None = None  # what was written last, complete or not
        self.push: Callable[[], None] | None = None  # an upload that waits until the checkpoint is complete
        self._written: Checkpoint | None = None  # until it is waited for
        self._newest: Path | None = None  # until one is complete

    @contextmanager
    def saving(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Leads what Trainer saves into a checkpoint that was begun, and gives it up where that fails."""
        self.push = None  # of a checkpoint that could not be saved
        self.current = checkpoint
        try:
            yield
        except BaseException:
            self.push = None
            checkpoint.discard()
            raise
        finally:
            self.current = None

    def finish(self, checkpoint: Checkpoint, after: Callable[[], None]) -> None:
        """Writes the tensors and gives the checkpoint its name, here or in the background; then comes `after`."""
        self.last = checkpoint.folder
        checkpoint.finish(self.snapshots, after)
        self._written = checkpoint
        if self.snapshots is None:
            self.wait()

    def wait(self) -> Path | None:
        """Waits until the checkpoint is complete, and uploads it if that was requested. Raises [`CheckpointError`], on
        all ranks, where it could not be saved."""
        written, self._written = self._written, None
        push, self.push = self.push, None
        if written is not None:
            written.wait()
            self._newest = written.folder
            if push is not None:
                push()
        return self._newest


class SavingMixin(PushMixin, BatchesMixin):
    """The part of `ZeroTrainerMixin` that saves. Every rank writes its own ranges, so all ranks call each method."""

    stop_on_signal: StopOnSignal
    _saver: Saver

    def wait_for_checkpoint(self) -> Path | None:
        """Waits until the checkpoint in the background is complete, and returns the newest checkpoint, if there is
        one.

        Raises:
            `CheckpointError`: it could not be saved; on all ranks.
        """
        return self._saver.wait()

    def _complete_checkpoint(self, trial) -> None:
        """Saves the last checkpoint once more, at the end of the training, if a thread could not save it."""
        if self._is_background_done():
            return
        last = self._saver.last
        if last is not None and last.name == _checkpoint_name(self.state.global_step):
            with mock.patch.object(self._saver, "snapshots", None):  # to return when it is complete, or raise
                self._save_checkpoint(self.model, trial)
        best = self.state.best_model_checkpoint
        if best is not None and not any(collect_from_all_ranks(self._engine.comm, best, lambda: os.path.isdir(best))):
            logger.warning("%s: could not be saved, so the best model is not loaded", best)
            self.state.best_model_checkpoint = None

    def _is_background_done(self) -> bool:
        """Waits as `wait_for_checkpoint` does, and reports a checkpoint that could not be saved. All ranks get the
        same."""
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
        """Lets Trainer write its files into a temporary folder, adds the tensors, and gives it its name."""
        self.wait_for_checkpoint()
        run_dir = super()._get_output_dir(trial)
        folder = os.path.join(run_dir, _checkpoint_name(self.state.global_step))
        self._prepared_optimizer.eval()  # the weights to save are those to evaluate; the next step turns back
        engine, state = self._engine, None
        if not self.args.save_only_model:
            state = plan_state(engine, self._prepared_optimizer, **self._facts())
        weights = plan_parameters(engine) if saves_whole(type(self)) else plan_model(engine)
        checkpoint = Checkpoint.begin(engine, folder, weights, state)

        def write() -> None:
            super(SavingMixin, self)._save_checkpoint(model, trial, **kwargs)
            self._note_best(run_dir, checkpoint.path)

        with self._saver.saving(checkpoint):
            run_on_all_ranks(engine.comm, f"saving to {folder}", write)
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        self._saver.finish(checkpoint, partial(rotate, run_dir, limit, best, folder))

    def _note_best(self, run_dir: str, saved: Path) -> None:
        """Gives the best checkpoint the name that it has here, not that of the temporary folder `saved`."""
        if not self.state.best_global_step:
            return
        path = os.path.join(run_dir, _checkpoint_name(self.state.best_global_step))
        if self.state.best_global_step == self.state.global_step or os.path.isdir(path):
            self.state.best_model_checkpoint = path
            if self.args.should_save:
                self.state.save_to_json(str(saved / TRAINER_STATE_NAME))

    def _facts(self) -> dict:
        position = self._position()
        return {
            "step": self.state.global_step,
            **self.accelerator.last_step.facts(self._engine),
            "extra": {
                "position": asdict(position) if position is not None else None,
                "pass": self._pass.facts() if self._pass is not None else None,
                "accumulation": self.args.gradient_accumulation_steps,
                "schedule": schedule_position(self.lr_scheduler),
            },
        }

    def _get_output_dir(self, trial, **kwargs) -> str:
        saved = self._saver.current
        return super()._get_output_dir(trial, **kwargs) if saved is None else str(saved.path.parent)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that `from_pretrained` loads. Each rank writes its own byte ranges of the weights."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        self.accelerator.shard(self.model)
        if self._zero_optimizer is not None:
            self._zero_optimizer.eval()
        if self._saver.current is not None:
            self._write_model(output_dir)
            return
        self._is_background_done()
        self._write_model(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_model(self, output_dir: str) -> None:
        engine, is_apart, is_whole = self._engine, self._saver.current is None, saves_whole(type(self))
        is_adapter = is_adapter_model(self.model) and not is_whole
        if is_apart and not is_adapter and not is_whole:
            save_pretrained(engine, output_dir)
        with added(engine.comm, output_dir) if is_apart else nullcontext(output_dir) as folder:
            if is_adapter:
                save_adapters(engine, folder)
            beside = (lambda: self._save_beside(folder)) if self.args.should_save else (lambda: None)
            if is_whole:
                beside = with_whole_values(engine, lambda: self._save_beside(folder))
            run_on_all_ranks(engine.comm, f"saving to {output_dir}", beside)

    def _save_beside(self, folder: str | os.PathLike) -> None:
        """Calls `_save`. Raises [`CheckpointError`] where a subclass's own writes weights, which all ranks write."""
        weights = {path: path.stat() for path in Path(folder).glob("*.safetensors")}
        self._save(folder)
        for path, before in weights.items():
            now = path.stat()
            if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
                raise CheckpointError(
                    f"{path.name}: was written by {type(self).__name__}._save, and all ranks write it; let _save call "
                    "super()._save, and write files of other names"
                )

    def _save(self, output_dir: str | os.PathLike | None = None, state_dict=None) -> None:
        """Writes what lies beside the weights, which all ranks write. A rank that saves files calls it, and so a
        subclass's own, which may add files."""
        output_dir = output_dir if output_dir is not None else self.args.output_dir
        if saves_whole(type(self)):
            with mock.patch.object(self, "args", without_tokens(self.args)):
                super()._save(str(output_dir))
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(output_dir)
        buffer = io.BytesIO()  # torch's own writer says of a full disk only that it failed
        torch.save(without_tokens(self.args), buffer)
        Path(output_dir, TRAINING_ARGS_NAME).write_bytes(buffer.getvalue())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saver.current is None:
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
        if self._saver.current is not None:
            folder = os.path.join(super()._get_output_dir(None), os.path.basename(checkpoint_folder))
            self._saver.push = lambda: self._push_from_checkpoint(folder, **kwargs)
        else:
            if self.is_world_process_zero():  # Trainer copies single files over those in the manifest
                remove_manifest(Path(self.args.output_dir))
            super()._push_from_checkpoint(checkpoint_folder, **kwargs)

    def _finalize_training(self, trial, num_train_samples, start_time, **kwargs):
        self._complete_checkpoint(trial)
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        # else Trainer deletes all that looks like a checkpoint but the best
        with mock.patch.object(self.args, "save_total_limit", None):
            output = super()._finalize_training(trial, num_train_samples, start_time, **kwargs)
        if limit == 1 and best is not None and self.args.should_save:
            rotate(super()._get_output_dir(trial), 1, None, best)
        return output


check_overrides(SavingMixin, Trainer, OVERRIDES)


def _checkpoint_name(step: int) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{step}"
