"""The numbers of a run: loss, speed, MFU and peak memory in Trainer's log and in `training_log.jsonl`, and the page of
them, `report.html`, one file without links."""

import json
import math
import os
import re
import resource
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.agreement import on_first, run_on_all_ranks
from hf_zero.engine import require_engine
from hf_zero.engine.opaque import num_weights
from hf_zero.engine.partition import vocabulary_module
from hf_zero.planner.topology import known_devices
from hf_zero.recipes.data.rows import Data
from hf_zero.recipes.run_config import RunConfig, yaml_text
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.hub import precision_of


LOG_NAME = "training_log.jsonl"
MIB = 2**20
# Dense bf16 TFLOP/s from the vendors' data sheets, of the devices of `plan` and others. The first entry whose words
# occur in the device's name counts. Each of the two dies of an MI250X is a device.
PEAK_TFLOPS = {
    **{"H100 NVL": 835, "H100 PCIe": 756},
    **{name.upper(): device.bf16_tflops for name, device in known_devices().items()},
    **{"GH200": 989, "H20": 148, "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181},
    **{"L4": 121, "RTX 4090": 165, "RTX A6000": 155, "RTX 3090": 71, "MI325X": 1307, "MI300X": 1307, "MI250X": 191.5},
}
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of one number in configs


class Telemetry(TrainerCallback):
    """Adds `zero/...` metrics to the entries of Trainer's log before other callbacks see them, and writes each entry
    to `training_log.jsonl` on rank 0.

    Tokens are counted without padding. Speed metrics exclude the time of evaluation and saving. A resumed run
    continues the log of its checkpoint, and the last step is always logged.
    """

    def __init__(self, trainer: ZeroTrainer):
        self._trainer = trainer
        self._path = Path(trainer.args.output_dir) / LOG_NAME
        # Evaluations before training, which Trainer drops from its log. None during training.
        self._before: list[dict[str, Any]] | None = []
        self._hook: Any = None  # while it trains
        # tokens and rows since the last entry, on the device, so that no step waits for them
        self._counts: Tensor | None = None
        self._seconds = self._since = 0.0  # since the last entry; when the clock was last read
        self.memory: dict[str, int] = {}  # the largest value of each field of `MemoryReport`

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            state.log_history[:0] = self._before
        self._before = None
        if state.is_world_process_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write("w", state.log_history)
        self._counts = torch.zeros(2, dtype=torch.int64, device=args.device)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._seconds, self._since = 0.0, time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._measure_memory()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now
        # Trainer only logs at its interval, so curves would lack their end.
        if state.global_step >= state.max_steps and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    def on_evaluate(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    on_save = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        self._measure_memory()  # in a run of one step, optimizer state exists only after the step
        self._hook.remove()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs and self._counts is not None:
            found = self._metrics(args)
            logs.update(found)
            state.log_history[-1].update(found)
        entry = {**logs, "step": state.global_step}
        if self._before is not None:
            self._before.append(entry)
        elif state.is_world_process_zero:
            self._write("a", [entry])

    def _metrics(self, args) -> dict[str, float]:
        """Computes the metrics since the last entry. All ranks call it."""
        comm = require_engine(self._trainer.model).comm
        # Ranks that share sequences have counted the same batches.
        counts = [count / args.zero_sequence_parallel for count in self._counts.tolist()]
        own = [*counts, self._seconds, peak_nbytes(args.device)]
        ranks = comm.all_gather_vector(torch.tensor(own, dtype=torch.float64, device=comm.device))
        (num_tokens, num_rows), (seconds, peak) = ranks[:, :2].sum(0).tolist(), ranks[:, 2:].max(0).values.tolist()
        self._counts.zero_()
        self._seconds = 0.0
        found = {}
        if seconds > 0:
            unit, number = ("tokens", num_tokens) if num_tokens else ("rows", num_rows)
            found[f"zero/{unit}_per_second"] = number / seconds
        is_half = args.device.type == "cuda" and (args.bf16 or args.fp16)
        flops = peak_flops(torch.cuda.get_device_name(args.device)) if is_half and num_tokens and seconds > 0 else None
        if flops is not None:
            done = training_flops(self._trainer.model, num_tokens, num_rows)
            found["zero/mfu"] = done / seconds / (flops * len(ranks))
        found["zero/peak_memory_mib"] = peak / MIB
        return {name: float(f"{value:.6g}") for name, value in found.items()}

    def _measure_memory(self) -> None:
        for name, nbytes in asdict(self._trainer.memory_report()).items():
            self.memory[name] = max(nbytes, self.memory.get(name, 0))

    def _count(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            # TRL's trainers pass the batch as one argument.
            batch = kwargs or next((arg for arg in args if isinstance(arg, Mapping)), {"input_ids": args[0]})
            num_tokens, num_rows = counts_of(batch)
            self._counts[0] += num_tokens
            self._counts[1] += num_rows

    def _write(self, mode: str, entries: list[dict[str, Any]]) -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            for entry in entries:
                # JSON has no infinity and no NaN
                values = {
                    name: None if isinstance(value, float) and not math.isfinite(value) else value
                    for name, value in entry.items()
                }
                file.write(json.dumps(values) + "\n")


def counts_of(batch: Mapping[str, Any]) -> tuple[Tensor | int, Tensor | int]:
    """Counts the tokens of a batch without padding, and its rows, packed ones too, as numbers or 0-d tensors."""
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None:
        return 0, next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
    num_tokens = mask.sum() if isinstance(mask, Tensor) and mask.dim() == 2 else ids.numel()
    is_packed = isinstance(positions, Tensor) and positions.shape == ids.shape
    return num_tokens, (positions == 0).sum() if is_packed else ids.shape[0]


def peak_nbytes(device: torch.device) -> int:
    """Returns the peak memory: of the device's tensors or, on a CPU, the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes


def peak_flops(device_name: str) -> float | None:
    """Returns the dense bf16 FLOP/s of a device by the name that its driver gives it, or `None` if unknown."""
    words = device_name.replace("-", " ").split()
    for name, teraflops in PEAK_TFLOPS.items():
        parts = name.split()
        if any(words[at : at + len(parts)] == parts for at in range(len(words))):
            return teraflops * 1e12
    return None


def training_flops(model: nn.Module, num_tokens: float, num_rows: float) -> float:
    """Returns the FLOPs of forward and backward for a number of tokens in a number of rows.

    6 for each parameter that multiplies a token (4 if it is frozen), and 12 * layers * width of the heads * tokens in
    a row for attention (PaLM, arXiv 2204.02311, appendix B), without recomputation. Only the active experts of a
    mixture count, and an input embedding does not.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    embedding, head = (
        getattr(vocabulary_module(model, method), "weight", None)
        for method in ("get_input_embeddings", "get_output_embeddings")
    )
    num_experts = next((getattr(config, name) for name in NUM_EXPERTS if getattr(config, name, None)), None)
    share = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts if num_experts else 1.0
    per_token = 0.0
    for name, param in model.named_parameters():
        if param is not embedding or embedding is head:
            used = num_weights(param) * (share if ".experts." in f".{name}" else 1.0)
            per_token += used * (6 if param.requires_grad else 4)
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    if isinstance(layers, int) and isinstance(heads, int) and heads and num_rows:  # not of several towers
        head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
        per_token += 12 * layers * heads * head_dim * num_tokens / num_rows
    return num_tokens * per_token


# The report

REPORT_NAME = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
# Entries of time and progress; all other numbers have a curve.
HIDDEN = re.compile(r"(eval|train)_(runtime|.*_per_second|model_preparation_time)|train_loss|total_flos|epoch|step")
WIDTH, HEIGHT = 480, 200  # of a chart, in pixels
Log = Sequence[dict[str, Any]]


def write_report(
    trainer: ZeroTrainer, config: RunConfig, data: Data, telemetry: Telemetry, say: Callable[..., None]
) -> None:
    """Writes the report and the model card on rank 0. All ranks call it after training and saving."""
    comm = require_engine(trainer.model).comm
    memory = comm.all_gather_object(telemetry.memory)

    def write() -> None:
        args, folder, log = trainer.args, Path(trainer.args.output_dir), trainer.state.log_history
        base = getattr(trainer.model.config, "_name_or_path", "") or "a new model"
        values = {key: value for key, value in config.non_default().items() if key != "output_dir"}
        configuration, source = (without_folders(text, values) for text in (yaml_text(values), data.source))
        shown = ("ZeRO stage", args.zero_stage), ("ranks", args.world_size), ("precision", precision_of(trainer))
        time = [("training time", f"{entry['train_runtime']:.0f} s") for entry in log if "train_runtime" in entry]
        page = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True).render(
            title=folder.name,
            summary=f"{config.task}: {without_folders(base, base)} on {source}",
            facts=[*shown, ("steps", trainer.state.global_step), *time],
            curves=[(title, [*curve.values()][-1], _chart(curve)) for title, curve in curves_of(log).items()],
            memory=memory_table(memory),
            notes=[without_folders(note, values) for note in data.notes],
            configuration=configuration,
        )
        write_whole(folder / REPORT_NAME, page.encode())
        longest = max(map(len, re.findall("`+", configuration)), default=0)  # a value may have a fence, too
        fence = "`" * max(3, longest + 1)
        trainer.card_sections = {"Recipe": f"{fence}yaml\n{configuration}{fence}"}
        trainer.create_model_card()
        say(f"report: {folder / REPORT_NAME}")

    run_on_all_ranks(comm, f"writing {REPORT_NAME}", on_first(comm, write))


def without_folders(text: str, values: Any) -> str:
    """Replaces each local path among the values by its last part, since others may read the page."""
    for path in sorted(set(_paths(values)), key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _paths(item)
    elif isinstance(value, str) and os.sep in value and (os.path.isabs(value) or os.path.exists(value)):
        yield value


def curves_of(log: Log) -> dict[str, dict[int, float]]:
    """Returns the numbers that were logged by step, by their names in the log."""
    curves: dict[str, dict[int, float]] = {}
    for entry in log:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and not HIDDEN.fullmatch(name):
                curves.setdefault(name, {})[entry["step"]] = value
    return curves


def memory_table(memory: Sequence[dict[str, int]]) -> list[list[str]]:
    """Returns rows with the MiB of each rank, and those of plain data parallelism (DDP). The first row has titles."""
    rows = [["between backward and optimizer step", *(f"rank {rank}" for rank in range(len(memory))), "DDP"]]
    for name in (name for name in memory[0] if not name.startswith("ddp_")):
        nbytes = [*(report[name] for report in memory), memory[0].get(f"ddp_{name}", 0)]
        if any(nbytes):
            rows.append([name.removesuffix("_nbytes"), *(f"{each / MIB:.2f}" for each in nbytes)])
    return rows


def _chart(curve: dict[int, float]) -> str:
    """Draws a curve over the steps of the run as an SVG element, and writes the range of both axes."""
    last, low, high = max(curve) or 1, min(curve.values()), max(curve.values())
    places = [
        f"{WIDTH * step / last:.1f},{HEIGHT * (high - value) / ((high - low) or 1.0):.1f}"
        for step, value in curve.items()
    ]
    labels = ((0, -6, f"{high:.4g}"), (0, HEIGHT + 16, f"{low:.4g}"), (WIDTH - 60, HEIGHT + 16, f"step {last}"))
    texts = "".join(f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in labels)
    # a marker shows a curve of one point
    dot = '<marker id="dot" refX="2" refY="2" markerWidth="4" markerHeight="4"><circle cx="2" cy="2" r="2"/></marker>'
    line = f'<polyline marker-start="url(#dot)" points="{" ".join(places)}"/>'
    return f'<svg viewBox="-8 -24 {WIDTH + 16} {HEIGHT + 48}">{dot}{line}{texts}</svg>'


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Returns a shell command that runs the trained model on an input of a pipeline of transformers."""
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
