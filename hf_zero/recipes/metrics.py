"""Metrics that are logged in training: speed, utilization and memory, in a JSON Lines file and on the screen."""

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import IntervalStrategy

from hf_zero.engine import require_engine
from hf_zero.engine.opaque import num_weights
from hf_zero.engine.partition import vocabulary_module
from hf_zero.planner.topology import known_devices
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MIB, NO_METRICS


LOG_NAME = "training_log.jsonl"
NOT_SHOWN = (
    *("total_flos", "step", "zero/seconds", "zero/tokens_per_second_per_rank"),
    *("zero/peak_memory_mib", "zero/exchanged_mib_per_step"),
)
# Dense bf16 (without sparsity) in TFLOP/s, from the vendors' data sheets: of the devices that `plan` knows, and of
# others. The first name that is part of the device's name counts. An MI250X is two dies, each a device.
PEAK_TFLOPS = {
    **{"H100 NVL": 835, "H100 PCIe": 756},
    **{name.upper(): device.bf16_tflops for name, device in known_devices().items()},
    **{"GH200": 989, "H20": 148, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181},
    **{"L4": 121, "RTX 4090": 165, "RTX A6000": 155, "RTX 3090": 71, "MI325X": 1307, "MI300X": 1307, "MI250X": 191.5},
}
# What configurations call the number of experts.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Telemetry(TrainerCallback):
    """Adds the metrics `zero/...` to the entries of Trainer's log before other callbacks see them.

    Tokens are those that the model is trained on: padding is not counted. Time goes by except in evaluating and
    saving. What is exchanged is what a rank sends of parameters and gradients in a step, or reads of the memory of
    others.
    """

    def __init__(self, trainer: ZeroTrainer):
        self._trainer = trainer
        self._hook: Any = None  # while it trains
        self._counts: Tensor | None = None  # tokens and rows since the last entry, on the device: nobody waits for it
        self._seconds = self._total_seconds = 0.0  # since the last entry; since the start
        self._since = 0.0  # when the clock was last read
        self._num_steps, self._exchanged = 0, 0  # steps since the last entry, and the bytes exchanged in them
        self._exchanged_before = 0  # when the step began

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._counts = torch.zeros(2, dtype=torch.int64, device=args.device)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        last = next((entry for entry in reversed(state.log_history) if "zero/seconds" in entry), {})
        self._seconds, self._total_seconds = 0.0, last.get("zero/seconds", 0.0)
        self._since = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        self._hook.remove()

    def on_step_begin(self, args, state, control, **kwargs):
        self._exchanged_before = self._exchanged_so_far()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now
        self._num_steps += 1
        self._exchanged += self._exchanged_so_far() - self._exchanged_before

    def _exchanged_so_far(self) -> int:
        return sum(require_engine(self._trainer.model).comm.counters.unit_nbytes.values())

    def on_evaluate(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    on_save = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs or self._counts is None:
            return  # of an evaluation, or the summary at the end
        comm = require_engine(self._trainer.model).comm
        # ranks that share sequences are given the same batches, and have all counted them
        counts = [count / args.zero_sequence_parallel for count in self._counts.tolist()]
        own = [*counts, self._exchanged, self._seconds, *memory_in_use(args.device)]
        ranks = comm.all_gather_vector(torch.tensor(own, dtype=torch.float64, device=comm.device))
        (num_tokens, num_rows, exchanged), slowest = ranks[:, :3].sum(0).tolist(), float(ranks[:, 3].max())
        per_step = exchanged / len(ranks) / max(1, self._num_steps)
        self._counts.zero_()
        self._seconds, self._num_steps, self._exchanged = 0.0, 0, 0
        self._total_seconds += slowest
        found = {"zero/seconds": self._total_seconds, **self._speed(args, num_tokens, num_rows, slowest, len(ranks))}
        found["zero/memory_mib"], found["zero/peak_memory_mib"] = (ranks[:, 4:].max(0).values / MIB).tolist()
        found["zero/exchanged_mib_per_step"] = per_step / MIB
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
        is_half = args.device.type == "cuda" and (args.bf16 or args.fp16)
        if is_half and (peak := peak_flops(torch.cuda.get_device_name(args.device))) is not None:
            flops = training_flops(self._trainer.model, num_tokens, num_rows)
            found["zero/mfu"] = flops / seconds / (peak * num_ranks)
        return found

    def _count(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            # TRL's trainers call the model with their loss function, which takes the batch as it is
            batch = kwargs or next((arg for arg in args if isinstance(arg, Mapping)), {"input_ids": args[0]})
            num_tokens, num_rows = counts_of(batch)
            self._counts[0] += num_tokens
            self._counts[1] += num_rows


def counts_of(batch: Mapping[str, Any]) -> tuple[Tensor | int, Tensor | int]:
    """Counts the tokens of a batch without padding, and its rows, packed ones too, in numbers or 0-d tensors."""
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None:
        return 0, next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    is_padded = isinstance(mask, Tensor) and mask.dim() == 2
    if not isinstance(positions, Tensor) or positions.shape != ids.shape:
        return (mask.sum() if is_padded else ids.numel()), ids.shape[0]
    return (mask.sum() if is_padded else ids.numel()), (positions == 0).sum()


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Returns the bytes in use now and at their peak: of the device's tensors, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    resident, peak = psutil.Process().memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident, max(peak if sys.platform == "darwin" else 1024 * peak, resident)  # there it is in bytes


class TrainingLog(TrainerCallback):
    """Writes Trainer's log to a file on rank 0. A resumed run continues the log of its checkpoint.

    The last step is logged, whatever `logging_steps` is. What was evaluated before it trains goes into Trainer's
    history too, as of step 0.
    """

    def __init__(self, trainer: Trainer):
        self._path = Path(trainer.args.output_dir) / LOG_NAME
        self._before: list[dict[str, Any]] | None = []  # None from the beginning of the training on

    def on_log(self, args, state, control, logs=None, **kwargs):
        entry = {**logs, "step": state.global_step}
        if self._before is not None:
            self._before.append(entry)
        elif state.is_world_process_zero:
            self._write("a", [entry])

    def on_step_end(self, args, state, control, **kwargs):
        # Trainer logs by its interval alone: the end of a curve would be missing, and of a short run all of it
        if state.global_step >= state.max_steps and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            state.log_history[:0] = self._before
        self._before = None
        if state.is_world_process_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write("w", state.log_history)

    def _write(self, mode: str, entries: list[dict[str, Any]]) -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            for entry in entries:
                file.write(json.dumps({name: _known(value) for name, value in entry.items()}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads the entries of a log, oldest first, without a last line that was cut off."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def _known(value: Any) -> Any:
    """Replaces numbers that are not finite by `None`, since JSON has none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress(ProgressCallback):
    """Trainer's progress bar, which prints log entries as readable lines."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line_of(logs, state.global_step, state.max_steps))


def line_of(logs: Mapping[str, Any], step: int, max_steps: int) -> str:
    """Returns a line for an entry of the log."""
    names = [name for name in logs if name not in NOT_SHOWN and not NO_METRICS.match(name)]
    return "  ".join([f"step {step}/{max_steps}", *(_shown(name, logs[name], logs) for name in names)])


def _shown(name: str, value: Any, logs: Mapping[str, Any]) -> str:
    if name == "zero/tokens_per_second":
        each = logs.get("zero/tokens_per_second_per_rank", value)
        return f"{_short(value)} tokens/s" + ("" if each == value else f" ({_short(each)} per rank)")
    if name == "zero/memory_mib":
        return f"memory {value:.0f} MiB (peak {logs.get('zero/peak_memory_mib', value):.0f})"
    if name == "zero/mfu":
        return f"MFU {value:.1%}"
    words = name.removeprefix("zero/").replace("learning_rate", "lr").replace("_", " ")
    return f"{words} {value:.4g}" if isinstance(value, float) else f"{words} {value}"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations per second of a device, by its driver's name for it; `None` where it is not known."""
    words = device_name.replace("-", " ").split()
    for name, teraflops in PEAK_TFLOPS.items():
        parts = name.split()
        if any(words[at : at + len(parts)] == parts for at in range(len(words))):
            return teraflops * 1e12
    return None


def training_flops(model: nn.Module, num_tokens: float, num_rows: float) -> float:
    """Returns the floating-point operations of forward and backward for a number of tokens in so many rows.

    6 for each parameter that a token is multiplied by, 2 of them for its weight gradient where it has one, and 12 *
    layers * width of the heads * tokens in a row for attention (PaLM, arXiv:2204.02311, appendix B). What is computed
    twice because activations are not kept does not count. Of a mixture's experts those count that a token goes
    through. An input embedding is looked up, not multiplied by.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    looked_up = _looked_up(model)
    share = _expert_share(config)
    per_token = 0.0
    for name, param in model.named_parameters():
        if param is not looked_up:
            used = num_weights(param) * (share if ".experts." in f".{name}" else 1.0)
            per_token += used * (6 if param.requires_grad else 4)
    row_length = num_tokens / num_rows if num_rows else 0.0
    return num_tokens * (per_token + 12 * _attention_width(config) * row_length)


def _looked_up(model: nn.Module) -> nn.Parameter | None:
    """Returns the weight of the input embedding, or `None` if the output layer shares it."""
    embedding, head = (
        getattr(vocabulary_module(model, method), "weight", None)
        for method in ("get_input_embeddings", "get_output_embeddings")
    )
    return None if embedding is head else embedding


def _expert_share(config: object) -> float:
    total = next((getattr(config, name) for name in NUM_EXPERTS if getattr(config, name, None)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return used / total if total and used else 1.0


def _attention_width(config: object) -> int:
    """The width of all attention heads of all layers."""
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
        return 0
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return layers * heads * head_dim
