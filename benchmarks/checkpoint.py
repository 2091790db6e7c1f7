"""Compares saving and loading: hf_zero beside DDP, FSDP2, torch's distributed checkpoint and DeepSpeed.

    python -m benchmarks.checkpoint --size medium --rounds 3 --json out.json

See `benchmarks/README.md` for what each figure means and how it is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoint_names import SAVING_MODES, why_left_out
from benchmarks.checkpoint_report import print_report, summarize
from benchmarks.compare import rotated
from benchmarks.launch import LEFT_BY_PEERS, remove_shared_memory, run_group, shared_memory_files
from benchmarks.machine import describe_machine, one_line
from benchmarks.workload import SIZES, Workload
from tests.distributed import RemoteError


_WORKER = "benchmarks.checkpoint_worker"


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: gigabytes of files are removed then too
    # Set before the server process starts: ranks inherit it.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = vars(options) | {"json": None, "folder": None}
    report = {"machine": describe_machine(), "settings": settings, "results": {}}
    print(one_line(report["machine"]))
    modes = _present_modes(options.modes)
    failed = False
    for dtype in ("fp32", "bf16") if options.dtype == "both" else (options.dtype,):
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder:
            raw: dict[str, dict] = {}
            for _ in Measurement(_workload(options, dtype), options, Path(folder), raw).run(modes):
                # After each round, so that a run that is broken off keeps what it has.
                report["results"][dtype] = {"raw": raw, "summary": summarize(raw)}
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
        print_report(dtype, raw, report["results"][dtype]["summary"], options)
        failed = failed or any(entry["error"] or entry["load_errors"] for entry in raw.values())
    return 1 if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(SAVING_MODES), help="comma-separated; default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "both"), default="fp32")
    parser.add_argument("--num_processes", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=2, help="steps beside an asynchronous save (default: %(default)s)"
    )
    parser.add_argument("--warmup", type=int, default=1, help="steps before the first save (default: %(default)s)")
    parser.add_argument(
        "--page_cache", choices=("warm", "cold", "both"), default="warm", help="before loads (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one mode's saves, or one load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: the temporary folder")
    parser.add_argument("--json", type=Path, help="write raw numbers, medians and ratios here")
    parser.add_argument("--smoke", action="store_true", help="a model of 0.1 M, one round: does it run?")
    options = parser.parse_args(argv)
    options.modes = [name.strip() for name in options.modes.split(",") if name.strip()]
    for name in options.modes:
        if name not in SAVING_MODES:
            parser.error(f"unknown mode {name!r}; the modes are {', '.join(SAVING_MODES)}")
    if options.smoke:
        options.size, options.rounds = "smoke", 1
    for path, folder in ((options.json, options.json and options.json.parent), (options.folder, options.folder)):
        if folder and not folder.is_dir():
            parser.error(f"{path}: there is no folder {folder}")
    return options


def _workload(options: argparse.Namespace, dtype: str) -> Workload:
    return Workload(size=options.size, dtype=dtype, seq=options.seq, seed=options.seed)


def _present_modes(names: list[str]) -> list[str]:
    """The modes that can run here; says which are left out."""
    reasons = {name: why_left_out(name) for name in dict.fromkeys(names)}
    for name, reason in reasons.items():
        if reason:
            print(f"{name}: left out, {reason}", file=sys.stderr)
    return [name for name, reason in reasons.items() if not reason]


class Measurement:
    """All modes of one dtype, in fresh ranks each time, under one folder."""

    def __init__(self, workload: Workload, options: argparse.Namespace, folder: Path, raw: dict) -> None:
        self.workload, self.options, self.folder = workload, options, folder
        self.raw = raw

    def run(self, modes: list[str]) -> Iterator[int]:
        """Memory once, then round by round: each mode saves, loads what it saved, and its files are removed.

        Yields after each round; `raw` has, per mode, what was measured so far.
        """
        self.raw |= {name: {"error": None, "load_errors": {}, "memory": None, "rounds": []} for name in modes}
        for name in modes:
            with self._folder_of(name) as folder:
                self.raw[name]["memory"] = self._ranks(name, "count_save", folder)
        for number in range(self.options.rounds):
            for name in rotated(modes, number):
                with self._folder_of(name) as folder:
                    self._round(name, Path(folder), check=number == 0)
            yield number

    def _round(self, name: str, folder: Path, *, check: bool) -> None:
        saves = self._ranks(name, "time_saves", folder)
        if saves is None:
            return
        loads: dict[str, list] = {}
        self.raw[name]["rounds"].append({"saves": saves, "loads": loads})
        caches = ("warm", "cold") if self.options.page_cache == "both" else (self.options.page_cache,)
        for loader in SAVING_MODES[name].loaders:
            for cache in caches:
                settings = {"loader": loader, "evict": cache == "cold", "next_step": saves[0]["next_step"]}
                settings["check"] = check and cache == caches[0]
                settings["is_first_loader"] = loader == SAVING_MODES[name].loaders[0]
                ranks = self._ranks(name, "load", folder / "durable", **settings)
                if ranks is not None:
                    loads.setdefault(loader, {})[cache] = ranks

    def _folder_of(self, name: str) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self.folder)

    def _ranks(self, name: str, task: str, folder: str | Path, **settings) -> list | None:
        """What the ranks of one task return. A mode that fails is left out from then on, the others go on; a way to
        load that fails leaves the mode's saves and its other ways alone."""
        entry, start, before = self.raw[name], time.monotonic(), shared_memory_files()
        label = f"{task} {settings['loader']}" if "loader" in settings else task
        if entry["error"] or label in entry["load_errors"]:
            return None
        spec = {"mode": name, "workload": self.workload.to_dict(), "folder": str(folder)}
        spec |= {"steps": self.options.steps, "warmup": self.options.warmup, **settings}
        try:
            return run_group(
                f"{_WORKER}:{task}", spec, num_processes=self.options.num_processes, timeout=self.options.timeout
            )
        except RemoteError as error:
            print(f"{name} {self.workload.dtype} {label}: {error}", file=sys.stderr)
            if "loader" in settings:
                entry["load_errors"][label] = str(error)
            else:
                entry["error"] = f"{label}: {error}"
            return None
        finally:
            left = remove_shared_memory(before, LEFT_BY_PEERS)
            if left:
                entry.setdefault("left_in_shared_memory", []).extend(left)
            free = f"{shutil.disk_usage(self.folder).free / 2**30:.0f} GiB free"
            seconds = f"{time.monotonic() - start:.1f} s in all"
            print(f"  {self.workload.dtype} {name} {label}: {seconds}, {free}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
