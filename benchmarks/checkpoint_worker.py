"""What one rank does: train to where there is optimizer state, then save several times, or load what was saved."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import counters
from benchmarks.checkpoint_modes import Checkpoint, Marks, loader_of
from benchmarks.checkpoint_names import SAVING_MODES
from benchmarks.process_memory import ProcessMemory, trim_heap
from benchmarks.worker import Stepper
from benchmarks.workload import Workload
from tests.tensor_meter import MeterError, TensorMeter


_CHECK_STEPS = 2  # after a save or a load: the first loss is the weights', the second the optimizer's too


def _implementation(name: str) -> type[Checkpoint]:
    module, _, attribute = SAVING_MODES[name].implementation.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Saver:
    """Trains one mode and saves it again and again, each time into a fresh folder."""

    def __init__(self, spec: dict, rank: int) -> None:
        self.root, self.rank, self.steps = Path(spec["folder"]), rank, spec["steps"]
        _warm_transformers(spec, rank)
        self.stepper = Stepper.build(SAVING_MODES[spec["mode"]].training, Workload(**spec["workload"]), rank)
        self.stepper.run(spec["warmup"])
        self.checkpoint = _implementation(spec["mode"])(self.stepper.mode)

    def save(self, name: str, *, durable: bool = False, convert: bool = False, between=None) -> dict:
        """One save; `between` is called after `save` returned and before the wait for its end."""
        folder = self.folder(name)
        if self.rank == 0:
            folder.mkdir()
            os.sync()  # what was written before is not this save's burden
        dist.barrier()
        marks, io = Marks(folder, durable=durable), _io()
        with self.watch(folder, marks):
            handle = self.checkpoint.save(folder, marks)
            marks.seconds["stall"] = time.perf_counter() - marks.start
            result = {"between": between(marks)} if between else {}
            handle.wait()
            dist.barrier()
            marks("complete")
        result |= {name: value - io[name] for name, value in _io().items()}
        if convert and self.checkpoint.converts:
            self.convert(folder, marks)
        dist.barrier()
        sizes = {"folder_nbytes": _size(folder), "pretrained_nbytes": _weights_size(self.checkpoint, folder)}
        return {"seconds": marks.seconds, **result, **sizes}

    def convert(self, folder: Path, marks: Marks) -> None:
        if self.rank == 0:
            self.checkpoint.convert(folder)
            marks("pretrained")
        dist.barrier()

    @contextmanager
    def watch(self, folder: Path, marks: Marks):
        """Notes when a folder's weights appear under their name, for a mode that renames whole files."""
        if not self.checkpoint.watched or self.rank != 0:
            yield
            return
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.005):
                if (folder / "model.safetensors").exists() and (folder / "config.json").exists():
                    return marks("pretrained")

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if "pretrained" not in marks.seconds:
            marks("pretrained")

    def folder(self, name: str) -> Path:
        return self.root / name

    def remove(self, name: str) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder(name))
        dist.barrier()

    def save_while_training(self, expected: float) -> dict:
        """Seconds that a save takes from training in all, whatever it still does after it has returned."""
        rest = sum(self.stepper.run(self.steps)) / self.steps
        steps = max(self.steps, math.ceil(_largest(expected) / _largest(rest)) + 1)

        def train(marks: Marks) -> dict:
            self.stepper.run(steps)
            elapsed = time.perf_counter() - marks.start
            return {"steps": steps, "rest_step_seconds": rest, "lost_seconds": elapsed - steps * rest}

        result = self.save("training", between=train)
        self.remove("training")
        return result


def time_saves(spec: dict, rank: int) -> dict:
    """Two saves as they are (buffers may be kept between them), one while training goes on, one flushed to disk."""
    _quiet()
    saver, results = Saver(spec, rank), {}
    for name in ("first", "second"):
        results[name] = saver.save(name, convert=name == "second")
        saver.remove(name)
    if SAVING_MODES[spec["mode"]].is_async:
        results["training"] = saver.save_while_training(results["second"]["seconds"]["complete"])
    results["durable"] = saver.save("durable", durable=True, convert=True)
    saver.checkpoint.close()
    results["next_step"], before = len(saver.stepper.losses), len(saver.stepper.losses)
    saver.stepper.run(_CHECK_STEPS)
    return results | {"losses": saver.stepper.losses[before:]}


def count_save(spec: dict, rank: int) -> dict:
    """The untimed pass: the memory that two saves (and, apart, a conversion) take above the state at rest."""
    _quiet()
    meter, reason = TensorMeter(), None
    try:
        meter.start()
    except MeterError as error:
        meter, reason = None, str(error)
    try:
        result = _count(spec, rank, meter)
    finally:
        if meter:
            meter.stop()
    spans = {"save": ("begin", "end"), "convert": ("end", "converted")}
    for name, (first, last) in spans.items():
        result[name]["tensors"] = meter.span(first, last).to_dict() if meter else None
    return result | {"meter_unavailable": reason}


def _count(spec: dict, rank: int, meter: TensorMeter | None) -> dict:
    mark = meter.mark if meter else lambda name: None
    saver = Saver(spec, rank)
    trim_heap()
    dist.barrier()
    mark("begin")
    with ProcessMemory() as memory:
        saver.save("first")
        saver.remove("first")
        saver.save("second")
    mark("end")
    with ProcessMemory() as converting:
        if saver.checkpoint.converts:
            saver.convert(saver.folder("second"), Marks(saver.folder("second")))
    mark("converted")
    saver.remove("second")
    saver.checkpoint.close()
    return {"save": memory.to_dict(), "convert": converting.to_dict()}


def load(spec: dict, rank: int) -> dict:
    """Fresh ranks: seconds until the weights are sharded and ready, and until the run can go on."""
    _quiet()
    workload, folder = Workload(**spec["workload"]), Path(spec["folder"])
    implementation = _implementation(spec["mode"])
    loader = loader_of(implementation, spec["loader"])
    _warm_imports(spec, rank)
    if spec["evict"] and rank == 0:
        _evict(folder)
    if rank == 0:
        os.sync()
    trim_heap()
    dist.barrier()
    with ProcessMemory(sample=False) as memory:
        marks = Marks(folder)
        mode = loader(folder, workload, marks)
        dist.barrier()
        marks("resumed")
    result = {"seconds": marks.seconds, "memory": memory.to_dict()}
    if spec["check"]:
        stepper = Stepper(mode, rank, first_step=spec["next_step"])
        stepper.run(_CHECK_STEPS)
        result["losses"] = stepper.losses
        result["pretrained_loss"] = _pretrained_loss(implementation, spec, rank) if spec["is_first_loader"] else None
    return result


def _pretrained_loss(implementation: type[Checkpoint], spec: dict, rank: int) -> float | None:
    """Rank 0's next loss of what plain `from_pretrained` makes of the folder; NaN where it misses weights."""
    if rank != 0 or spec["mode"].startswith("deepspeed"):  # DeepSpeed patches what builds modules
        return None
    from transformers import LlamaForCausalLM

    folder, workload = implementation.pretrained(Path(spec["folder"])), Workload(**spec["workload"])
    model, info = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        return math.nan
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=workload.dtype == "bf16")
    with torch.no_grad(), bf16:
        losses = [model(**batch).loss.item() for batch in workload.micro_batches(rank, spec["next_step"])]
    return sum(losses) / len(losses)


def _warm_transformers(spec: dict, rank: int) -> Workload:
    """`save_pretrained` and `from_pretrained` import much at first; returns the workload it was done with."""
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


def _warm_imports(spec: dict, rank: int) -> None:
    """A tiny model goes through `from_pretrained` and the mode beforehand: what is imported once is not the load."""
    small = _warm_transformers(spec, rank)
    Stepper.build(SAVING_MODES[spec["mode"]].training, small, rank).run(1)


def _evict(folder: Path) -> None:
    """Drops clean pages of the folder's files, so that they are read from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _io() -> dict[str, int]:
    return {"written_nbytes": counters.written_nbytes(), "dirtied_nbytes": counters.dirtied_nbytes()}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _weights_size(checkpoint: Checkpoint, folder: Path) -> int:
    """Bytes of safetensors in the folder that `from_pretrained` is given."""
    return sum(path.stat().st_size for path in checkpoint.pretrained(folder).glob("*.safetensors"))


def _largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _quiet() -> None:
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
