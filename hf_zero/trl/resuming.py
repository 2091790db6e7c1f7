"""What TRL's trainers hold beside model and optimizer, and would lose when a run goes on from a checkpoint."""

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
from hf_zero.checkpoint.trusted import load_archive
from hf_zero.comm.agreement import collect_from_all_ranks, run_on_all_ranks
from hf_zero.engine import require_engine
from hf_zero.trainer import ZeroTrainerMixin


logger = logging.getLogger(__name__)

OVERRIDES = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_get_train_sampler")
REFERENCE = "reference"  # the folder in `STATE_FOLDER` with the weights of a reference that follows the policy
GENERATED = "generated_{}.pt"  # the file in it with what a rank has generated and not trained on to the end


class ResumingTrlMixin(ZeroTrainerMixin):
    """The part of `ZeroTrlTrainerMixin` that makes a resumed run equal to the unbroken one. TRL starts anew with the
    reference model, with generated answers that are not used up, with the order of the prompts and with the number of
    tokens."""

    def _facts(self) -> dict:
        facts = super()._facts()
        held = {name: getattr(self, name, None) for name in ("_total_train_tokens", "_step")}
        facts["extra"]["trl"] = {**held, "generation": self._generation()}
        return facts

    def _generation(self) -> dict[str, int] | None:
        """Returns what must be as it was for answers to be used further; `None` for trainers that generate none,
        or keep answers in another way."""
        if not isinstance(self, (DistillationTrainer, GRPOTrainer, RLOOTrainer)):
            return None
        args: Any = self.args
        steps = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)
        every = steps * getattr(self, "num_iterations", 1)
        return {"every": every, "rows": args.per_device_train_batch_size, "ranks": args.world_size}

    def _save_optimizer_and_scheduler(self, output_dir: str, **kwargs) -> None:
        super()._save_optimizer_and_scheduler(output_dir, **kwargs)
        folder = Path(output_dir, STATE_FOLDER)
        if (reference := self._following()) is not None:
            save_pretrained(require_engine(reference), folder / REFERENCE)
        generation = self._generation()
        if generation is not None and self._step % generation["every"]:
            path = folder / GENERATED.format(self.args.process_index)
            run_on_all_ranks(self._engine.comm, f"saving to {path}", lambda: self._save_generated(path))

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
        """Returns the reference model that follows the policy, if there is one."""
        callbacks = self.callback_handler.callbacks
        return next((each.ref_model for each in callbacks if isinstance(each, SyncRefModelCallback)), None)

    def _load_reference(self, reference: nn.Module, folder: Path) -> None:
        if all(collect_from_all_ranks(self._engine.comm, f"looking at {folder}", folder.is_dir)):
            load_model(require_engine(reference), str(folder))
        elif self.args.should_log:
            logger.warning("%s: is missing, so the reference model follows from its first weights on", folder)

    def _save_generated(self, path: Path) -> None:
        # prompts with images are no plain values; they are logged again with the next answers
        logs = {} if getattr(self, "_is_vlm", False) else self._logs
        text = json.dumps(logs, default=_plain, skipkeys=True)  # a column of the user's may hold anything
        buffer = io.BytesIO()  # torch's own writer says of a full disk only that it failed
        torch.save({"inputs": self._buffered_inputs, "logs": text}, buffer)
        path.write_bytes(buffer.getvalue())

    def _read_generated(self, path: Path) -> str | None:
        """Takes back what `_save_generated` wrote, on all ranks or on none. Returns why not."""
        saved: list = []

        def read() -> str | None:
            try:
                content = load_archive(path, self.accelerator.device)
                saved.extend((content["inputs"], json.loads(content["logs"])))
            except Exception as error:  # whatever it is: the answers can be generated anew
                return str(error)
            return None

        problems = collect_from_all_ranks(self._engine.comm, f"reading {path}", read)
        if not any(problems):
            self._buffered_inputs, logs = saved
            _refill(self._logs, logs)
        return next(filter(None, problems), None)

    def _go_on_with_generated(self, checkpoint: str, step: int, before: dict[str, int]) -> None:
        """Goes on in the middle of the steps that share answers, with the same answers where ranks and batches are the
        same."""
        now = self._generation()
        if now is not None and now["every"] == before["every"]:
            self._step = step
        if step % before["every"] == 0:
            return
        problem: str | None = f"was saved with {before}, and now there are {now}"
        if now == before:
            path = Path(checkpoint, STATE_FOLDER, GENERATED.format(self.args.process_index))
            problem = self._read_generated(path)
        if problem is not None and self.args.should_log:
            logger.warning(
                "%s: %s; it was saved between steps that share answers, and new ones are generated for those left",
                *(checkpoint, problem),
            )

    def _get_train_sampler(self, *args, **kwargs):
        """Makes the sampler as TRL does. One that repeats prompts knows the order of each epoch, which TRL draws one
        after the other: a run that went on would see the first one again."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle and not hasattr(sampler, "set_epoch"):
            sampler.set_epoch = partial(_go_to_epoch, sampler)
        return sampler


def _go_to_epoch(sampler: RepeatSampler, epoch: int) -> None:
    sampler.generator.manual_seed(sampler.seed)
    for _ in range(epoch):
        torch.randperm(sampler.num_samples, generator=sampler.generator)


def _plain(value: Any) -> Any:
    """Returns what JSON has no word for as lists, numbers or text."""
    if isinstance(value, deque):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _refill(logs: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name in saved.keys() & logs.keys():
        kinds = saved[name] if isinstance(saved[name], Mapping) else None  # such as the rewards, by function
        for kind, rows in [(None, saved[name])] if kinds is None else kinds.items():
            (logs[name] if kind is None else logs[name][kind]).extend(rows)
