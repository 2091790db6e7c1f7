"""State of TRL's trainers besides model and optimizer that TRL would lose when a run resumes."""

import io
import json
import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer, SyncRefModelCallback
from trl.trainer.utils import RepeatSampler

from hf_zero.checkpoint import save_pretrained
from hf_zero.checkpoint.adapters import load_model
from hf_zero.checkpoint.manifest import STATE_FOLDER, run_of
from hf_zero.checkpoint.trusted import load_safely
from hf_zero.comm.agreement import collect_from_all_ranks
from hf_zero.engine import require_engine
from hf_zero.trainer import ZeroTrainerMixin


logger = logging.getLogger(__name__)

OVERRIDES = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_get_train_sampler")
REFERENCE = "reference"  # folder in `STATE_FOLDER`: weights of a reference model that is synced with the policy
GENERATED = "generated_{}.pt"  # file in `STATE_FOLDER`: generated completions of a rank that are still in use


class ResumingTrlMixin(ZeroTrainerMixin):
    """The part of `ZeroTrlTrainerMixin` that makes a resumed run equal to an uninterrupted one. TRL does not save the
    reference model, generated completions that are still in use, the order of the prompts and the number of tokens."""

    def _facts(self) -> dict:
        facts = super()._facts()
        held = {name: getattr(self, name, None) for name in ("_total_train_tokens", "_step")}
        facts["extra"]["trl"] = {**held, "generation": self._generation()}
        return facts

    def _generation(self) -> dict[str, int] | None:
        """Returns the settings that must be unchanged to reuse saved completions, or `None` for trainers that generate
        none or keep them in another way."""
        if not isinstance(self, (DistillationTrainer, GRPOTrainer, RLOOTrainer)):
            return None
        args: Any = self.args
        steps = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)
        every = steps * getattr(self, "num_iterations", 1)
        return {"every": every, "rows": args.per_device_train_batch_size, "ranks": args.world_size}

    def _save_other_models(self, folder: Path) -> None:
        if (reference := self._following()) is not None:
            save_pretrained(require_engine(reference), folder / STATE_FOLDER / REFERENCE)

    def _save_optimizer_and_scheduler(self, output_dir: str, **kwargs) -> None:
        super()._save_optimizer_and_scheduler(output_dir, **kwargs)
        generation = self._generation()
        if generation is not None and self._step % generation["every"]:
            self._save_generated(Path(output_dir, STATE_FOLDER, GENERATED.format(self.args.process_index)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None, **kwargs) -> None:
        super()._load_optimizer_and_scheduler(checkpoint, **kwargs)
        if checkpoint is None:
            return
        if (reference := self._following()) is not None:
            self._load_reference(reference, Path(checkpoint, STATE_FOLDER, REFERENCE))
        if (run := run_of(checkpoint)) is not None:
            held = run.extra.get("trl") or {}
            if held.get("_total_train_tokens") is not None:
                self._total_train_tokens = held["_total_train_tokens"]
            if held.get("generation") is not None:
                self._go_on_with_generated(checkpoint, held["_step"], held["generation"])

    def _following(self) -> nn.Module | None:
        """Returns the reference model that is synced with the policy, if there is one."""
        callbacks = self.callback_handler.callbacks
        return next((each.ref_model for each in callbacks if isinstance(each, SyncRefModelCallback)), None)

    def _load_reference(self, reference: nn.Module, folder: Path) -> None:
        if all(collect_from_all_ranks(self._engine.comm, f"looking at {folder}", folder.is_dir)):
            load_model(require_engine(reference), str(folder))
        elif self.args.should_log:
            logger.warning("%s: is missing; the reference model restarts from its initial weights", folder)

    def _save_generated(self, path: Path) -> None:
        # prompts with images are not JSON values; they are logged again with the next completions
        logs = {} if getattr(self, "_is_vlm", False) else self._logs
        text = json.dumps(logs, default=_plain, skipkeys=True)  # user columns may have values of any type
        buffer = io.BytesIO()  # the error of torch's own file writer does not mention a full disk
        torch.save({"inputs": self._buffered_inputs, "logs": text}, buffer)
        path.write_bytes(buffer.getvalue())

    def _read_generated(self, path: Path) -> str | None:
        """Loads the file of `_save_generated`, on all ranks or on none. Returns the error of a rank, if any."""
        saved: list = []

        def read() -> str | None:
            try:
                content = load_safely(path, self.accelerator.device)
                saved.extend((content["inputs"], json.loads(content["logs"])))
            except Exception as error:  # not fatal: completions can be generated again
                return str(error)
            return None

        problems = collect_from_all_ranks(self._engine.comm, f"reading {path}", read)
        if not any(problems):
            self._buffered_inputs, logs = saved
            _refill(self._logs, logs)
        return next(filter(None, problems), None)

    def _go_on_with_generated(self, checkpoint: str, step: int, before: dict[str, int]) -> None:
        """Resumes between steps that share completions: reuses the saved ones if ranks and batches are unchanged."""
        now = self._generation()
        if now is not None and now["every"] == before["every"]:
            self._step = step
        if step % before["every"] == 0:
            return
        problem: str | None = f"was saved with {before}, now {now}"
        if now == before:
            path = Path(checkpoint, STATE_FOLDER, GENERATED.format(self.args.process_index))
            problem = self._read_generated(path)
        if problem is not None and self.args.should_log:
            logger.warning(
                "%s: %s; it was saved between steps that share completions, so the remaining steps generate new ones",
                *(checkpoint, problem),
            )

    def _get_train_sampler(self, *args, **kwargs):
        """Creates the sampler like TRL, and adds `set_epoch` to one that repeats prompts. TRL draws the epochs' orders
        one after another, so a resumed run would repeat the first epoch's order."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle and not hasattr(sampler, "set_epoch"):
            sampler.set_epoch = partial(_go_to_epoch, sampler)
        return sampler


def _go_to_epoch(sampler: RepeatSampler, epoch: int) -> None:
    sampler.generator.manual_seed(sampler.seed)
    for _ in range(epoch):
        torch.randperm(sampler.num_samples, generator=sampler.generator)


def _plain(value: Any) -> Any:
    """Converts values that JSON does not support to lists, numbers or text."""
    if isinstance(value, deque):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _refill(logs: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name in saved.keys() & logs.keys():
        kinds = saved[name] if isinstance(saved[name], Mapping) else None  # for example rewards by function
        for kind, rows in [(None, saved[name])] if kinds is None else kinds.items():
            (logs[name] if kind is None else logs[name][kind]).extend(rows)
