"""What is measured while a run trains, added to what Trainer logs: speed, utilization, memory."""

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_zero.recipes.data.tokens import IGNORED
from hf_zero.recipes.flops import peak_flops, training_flops
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MIB


class Telemetry(TrainerCallback):
    """Adds `zero/...` to the entries of the training's log, before those who report them see them.

    Tokens are those that the model is trained on: padding is not counted. Time goes by except in evaluating and
    saving.

    Args:
        trainer ([`ZeroTrainer`]): Whose log it is.
    """

    @classmethod
    def attach(cls, trainer: ZeroTrainer) -> "Telemetry":
        """Makes one, and puts it before all other callbacks of the trainer."""
        telemetry = cls(trainer)
        trainer.callback_handler.callbacks.insert(0, telemetry)
        return telemetry

    def __init__(self, trainer: ZeroTrainer):
        self._trainer = trainer
        self._hook: Any = None  # while it trains
        self._counts: Tensor | None = None  # tokens and rows since the last entry, on the device: nobody waits for it
        self._seconds = self._total_seconds = 0.0  # since the last entry; since the start
        self._since = 0.0  # when the clock was last read

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._counts = torch.zeros(2, dtype=torch.int64, device=args.device)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        last = next((entry for entry in reversed(state.log_history) if "zero/seconds" in entry), {})
        self._seconds, self._total_seconds = 0.0, last.get("zero/seconds", 0.0)
        self._since = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        self._hook.remove()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def on_evaluate(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    def on_save(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs or self._counts is None:
            return  # of an evaluation, or the summary at the end
        comm = self._trainer._engine.comm
        own = [*self._counts.tolist(), self._seconds, *memory_in_use(args.device)]
        ranks = comm.all_gather_vector(torch.tensor(own, dtype=torch.float64, device=comm.device))
        (num_tokens, num_rows), slowest = ranks[:, :2].sum(0).tolist(), float(ranks[:, 2].max())
        self._counts.zero_()
        self._seconds = 0.0
        self._total_seconds += slowest
        found = {"zero/seconds": self._total_seconds, **self._speed(args, num_tokens, num_rows, slowest, len(ranks))}
        found["zero/memory_mib"], found["zero/peak_memory_mib"] = (ranks[:, 3:].max(0).values / MIB).tolist()
        found = {name: float(f"{value:.6g}") for name, value in found.items()}
        logs.update(found)
        state.log_history[-1].update(found)

    def _speed(self, args, num_tokens: float, num_rows: float, seconds: float, num_ranks: int) -> dict[str, float]:
        if seconds <= 0:
            return {}
        if not num_tokens:
            return {"zero/rows_per_second": num_rows / seconds}
        found = {
            "zero/tokens_per_second": num_tokens / seconds,
            "zero/tokens_per_second_per_rank": num_tokens / seconds / num_ranks,
        }
        peak = device_peak(args.device) if args.bf16 or args.fp16 else None
        if peak is not None:
            flops = training_flops(self._trainer.model, num_tokens, num_rows)
            found["zero/mfu"] = flops / seconds / (peak * num_ranks)
        return found

    def _count(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            num_tokens, num_rows = counts_of(kwargs or {"input_ids": args[0]})
            self._counts[0] += num_tokens
            self._counts[1] += num_rows


def counts_of(batch: Mapping[str, Any]) -> tuple[Tensor | int, Tensor | int]:
    """The tokens of a batch without padding, and its rows; where rows are packed, those that they are packed of.

    Args:
        batch (`Mapping[str, Any]`): What the model is called with.

    Returns:
        `tuple`: 0-d tensors on the batch's device, or numbers.
    """
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None:
        return 0, next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    is_padded = isinstance(mask, Tensor) and mask.dim() == 2
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return (mask.sum() if is_padded else ids.numel()), ids.shape[0]
    tails = _padded_tails(ids, positions, batch.get("labels"))
    num_tokens = mask.sum() if is_padded else ids.numel() - tails.sum()
    return num_tokens, (positions == 0).sum() - (tails > 0).sum()


def _padded_tails(ids: Tensor, positions: Tensor, labels: Tensor | None) -> Tensor:
    """How many tokens at the end of each sequence of packed rows are padding: a part of its own, of one token all
    along, of which the loss counts none."""
    if labels is None:
        return torch.zeros_like(ids[:, 0])
    lengths = (positions == 0).flip(1).int().argmax(1) + 1  # of the last parts
    in_last = torch.arange(ids.shape[1], 0, -1, device=ids.device) <= lengths[:, None]
    is_content = (ids != ids[:, -1:]) | (labels != IGNORED)
    return torch.where((in_last & is_content).any(1), 0, lengths)


def device_peak(device: torch.device) -> float | None:
    """Dense bf16 operations per second of a device, where it is known."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes in use now, and at most so far: of the device's tensors, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        resident = peak  # a system without /proc
    return resident, max(peak, resident)
