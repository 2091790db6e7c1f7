"""What one rank does for `benchmarks.checkpoint`: train until there is optimizer state, then save, or load."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.checkpoint_modes import CHECKPOINTS, Marks
from benchmarks.worker import Stepper, optional_meter
from benchmarks.workload import Workload


_CHECK_STEPS = 2  # after a save or a load: the first loss depends on the weights, the second on the optimizer too


class Saver:
    """Trains one mode and saves it again and again, each time into a fresh folder."""

    def __init__(self, spec: dict, rank: int) -> None:
        _quiet()
        self.root, self.rank = Path(spec["folder"]), rank
        kind = CHECKPOINTS[spec["mode"]]
        _warm_up(spec, rank)
        self.stepper = Stepper.build(kind.training, Workload(**spec["workload"]), rank)
        self.stepper.run(1)  # makes optimizer state
        self.checkpoint = kind(self.stepper.mode)

    def save(self, name: str, *, durable: bool = False, convert: bool = False) -> dict:
        folder = self.root / name
        if self.rank == 0:
            folder.mkdir()
            os.sync()  # earlier writes do not slow this save down
        dist.barrier()
        marks = Marks(folder, durable=durable)
        wait = self.checkpoint.save(folder, marks)
        marks.seconds["stall"] = marks.now()
        if wait:
            wait()
        dist.barrier()
        marks("complete")
        if convert and self.checkpoint.converts:
            self.convert(folder, marks)
        elif self.rank == 0:
            marks.seconds.setdefault("pretrained", marks.seconds["complete"])
        dist.barrier()
        model = sum(path.stat().st_size for path in self.checkpoint.pretrained(folder).glob("*.safetensors"))
        total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return {"seconds": marks.seconds, "folder_nbytes": total, "pretrained_nbytes": model}

    def convert(self, folder: Path, marks: Marks) -> None:
        if self.rank == 0:
            self.checkpoint.convert(folder)
            marks("pretrained")
        dist.barrier()

    def remove(self, name: str) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.root / name)
        dist.barrier()


def time_saves(spec: dict, rank: int) -> dict:
    """Two saves as they are (the second may reuse buffers), then one that is flushed to disk."""
    saver, results = Saver(spec, rank), {}
    for name in ("first", "second"):
        results[name] = saver.save(name, convert=name == "second")
        saver.remove(name)
    results["durable"] = saver.save("durable", durable=True, convert=True)
    saver.checkpoint.close()
    results["next_step"] = len(saver.stepper.losses)
    saver.stepper.run(_CHECK_STEPS)
    return results | {"losses": saver.stepper.losses[-_CHECK_STEPS:]}


def count_save(spec: dict, rank: int) -> dict:
    """The tensors that two saves make above the state at rest; untimed."""
    with optional_meter() as meter:
        mark = meter.mark if meter else lambda name: None
        saver = Saver(spec, rank)
        dist.barrier()
        mark("begin")
        saver.save("first")
        saver.remove("first")
        saver.save("second")
        mark("end")
        saver.checkpoint.close()
    return {"tensors": meter.span("begin", "end").to_dict() if meter else None}


def load(spec: dict, rank: int) -> dict:
    """Fresh ranks: seconds until the weights are sharded and ready, and until the run can continue."""
    _quiet()
    workload, folder, kind = Workload(**spec["workload"]), Path(spec["folder"]), CHECKPOINTS[spec["mode"]]
    small = _warm_up(spec, rank)
    Stepper.build(kind.training, small, rank).run(1)
    if rank == 0:
        os.sync()
    dist.barrier()
    marks = Marks(folder)
    mode = kind.load(folder, workload, marks)
    dist.barrier()
    marks("resumed")
    result = {"seconds": marks.seconds}
    if spec["check"]:
        stepper = Stepper(mode, rank, first_step=spec["next_step"])
        stepper.run(_CHECK_STEPS)
        result |= {"losses": stepper.losses, "pretrained_loss": None}
        # DeepSpeed patches the construction of modules
        if rank == 0 and kind.training != "deepspeed-3":
            result["pretrained_loss"] = _pretrained_loss(kind.pretrained(folder), workload, spec["next_step"])
    return result


def _pretrained_loss(folder: Path, workload: Workload, step: int) -> float:
    """Rank 0's next loss of the model that plain `from_pretrained` loads; NaN if it misses weights."""
    from transformers import LlamaForCausalLM

    model, info = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        return math.nan
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=workload.dtype == "bf16")
    with torch.no_grad(), bf16:
        losses = [model(**batch).loss.item() for batch in workload.micro_batches(0, step)]
    return sum(losses) / len(losses)


def _warm_up(spec: dict, rank: int) -> Workload:
    """Saves and loads a tiny model, because the first time includes imports; returns its workload."""
    from transformers import LlamaForCausalLM

    small, folder = Workload(**(spec["workload"] | {"size": "smoke"})), Path(spec["folder"]).parent / "warm"
    if rank == 0:
        small.build_model().save_pretrained(folder)  # writes nothing on other ranks
    dist.barrier()
    LlamaForCausalLM.from_pretrained(folder)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return small


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
