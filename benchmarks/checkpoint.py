"""Compares saving and loading: hf_zero beside DDP, FSDP2, torch's distributed checkpoint and DeepSpeed.

    python -m benchmarks.checkpoint --size medium --rounds 3 --json out.json

See `benchmarks/README.md` for what each number means and how it is measured.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from operator import truediv
from pathlib import Path
from statistics import median

from benchmarks.checkpoint_modes import CHECKPOINTS
from benchmarks.compare import rotated
from benchmarks.launch import attempt, set_environment
from benchmarks.modes import is_installed
from benchmarks.report import Report, markdown, mib, print_failures, worst
from benchmarks.workload import SIZES, Workload


SECONDS = ("stall", "complete", "durable", "pretrained", "pretrained_durable")
LOADS = ("weights", "resumed")


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so gigabytes of files are removed
    set_environment(options.threads)
    report = Report(options)
    workload = Workload(size=options.size, dtype=options.dtype, seq=options.seq, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder:
        measurement = Measurement(workload, options, Path(folder))
        raw = measurement.raw
        measurement.count()
        for number in range(options.rounds):
            measurement.time_round(number)
            report.results[options.dtype] = {"raw": raw, "summary": summarize(raw)}
            report.write()
    summary = report.results[options.dtype]["summary"]
    millions = workload.shape.num_parameters / 1e6
    print(f"\n## {options.dtype}: {options.size} ({millions:.1f} M), {options.num_processes} ranks, AdamW\n")
    print(f"{saves_table(summary['modes'])}\n\n{loads_table(summary['modes'])}\n\n{ratios_table(summary['ratios'])}")
    print_failures(raw)
    return 1 if any(entry["error"] for entry in raw.values()) else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(CHECKPOINTS), help="comma-separated; default: %(default)s")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--num_processes", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=32, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one mode's saves, or one load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: the temporary folder")
    parser.add_argument("--json", type=Path, help="write raw numbers, medians and ratios here")
    parser.add_argument("--smoke", action="store_true", help="a model of 0.1 M, one round: does it run?")
    options = parser.parse_args(argv)
    options.modes = [name.strip() for name in options.modes.split(",") if name.strip()]
    if unknown := [name for name in options.modes if name not in CHECKPOINTS]:
        parser.error(f"unknown mode {unknown[0]!r}; the modes are {', '.join(CHECKPOINTS)}")
    options.modes = [name for name in options.modes if is_installed(name)]
    if options.smoke:
        options.size, options.rounds = "smoke", 1
    for path, folder in ((options.json, options.json and options.json.parent), (options.folder, options.folder)):
        if folder and not folder.is_dir():
            parser.error(f"{path}: there is no folder {folder}")
    return options


class Measurement:
    """All modes, in fresh ranks for each task, under one folder. `raw` has what was measured so far."""

    def __init__(self, workload: Workload, options: argparse.Namespace, folder: Path) -> None:
        self._workload, self._options, self._folder = workload, options, folder
        self.raw: dict[str, dict] = {name: {"error": None, "memory": None, "rounds": []} for name in options.modes}

    def count(self) -> None:
        """The memory that saves take."""
        for name, entry in self.raw.items():
            with self._new_folder() as folder:
                entry["memory"] = self._run(name, "count_save", folder)

    def time_round(self, number: int) -> None:
        """Each mode saves, and loads what it saved; its files are removed."""
        for name in rotated(list(self.raw), number):
            with self._new_folder() as folder:
                if saves := self._run(name, "time_saves", folder):
                    settings = {"check": number == 0, "next_step": saves[0]["next_step"]}
                    load = self._run(name, "load", Path(folder, "durable"), **settings)
                    if load:
                        self.raw[name]["rounds"].append({"saves": saves, "load": load})

    def _new_folder(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(dir=self._folder)

    def _run(self, name: str, task: str, folder: str | Path, **settings) -> list | None:
        spec = {"mode": name, "workload": self._workload.to_dict(), "folder": str(folder), **settings}
        group = {"num_processes": self._options.num_processes, "timeout": self._options.timeout}
        return attempt(self.raw[name], f"{name} {task}", f"benchmarks.checkpoint_worker:{task}", spec, **group)


def summarize(raw: dict[str, dict]) -> dict[str, dict]:
    """A summary per mode that has results, and the ratios of hf_zero to each other mode."""
    modes = {name: _summarize_mode(entry) for name, entry in raw.items() if not entry["error"]}
    return {"modes": modes, "ratios": _ratios(modes)}


def _summarize_mode(entry: dict) -> dict:
    rounds, last = [_round_times(**measured) for measured in entry["rounds"]], entry["rounds"][-1]["saves"]
    seconds = {key: [values[key] for values in rounds] for key in rounds[0]}
    return {
        "seconds_per_round": seconds,
        "seconds": {key: median(values) for key, values in seconds.items()},
        "folder_nbytes": last[0]["second"]["folder_nbytes"],
        "pretrained_nbytes": last[0]["second"]["pretrained_nbytes"],
        "extra": _extra(entry["memory"]),
        "checks": _checks(**entry["rounds"][0]),
    }


def _round_times(saves: list[dict], load: list[dict]) -> dict[str, float]:
    """Of one round; a moment is when the last rank has come to it. Some load weights and state at once."""

    def last(save: str, mark: str) -> float:
        return max(rank[save]["seconds"].get(mark, 0.0) for rank in saves)

    return {
        "stall": last("second", "stall"),
        "complete": last("second", "complete"),
        "durable": last("durable", "complete"),
        "pretrained": last("second", "pretrained"),
        "pretrained_durable": last("durable", "pretrained"),
        **{key: max(rank["seconds"][key] for rank in load) for key in LOADS if key in load[0]["seconds"]},
    }


def _extra(ranks: list[dict]) -> dict[str, float | None]:
    """Bytes of tensors above rest of the rank that takes most: at the peak, and still held after the second save."""
    spans = [rank["tensors"] for rank in ranks]
    if not all(spans):
        return {"tensors": None, "tensors_kept": None}
    return {
        "tensors": max(span["peak_nbytes"] - span["start_nbytes"] for span in spans),
        "tensors_kept": max(span["end_nbytes"] - span["start_nbytes"] for span in spans),
    }


def _checks(saves: list[dict], load: list[dict]) -> dict[str, float]:
    """Losses after a load against those of the run that saved: NaN and large values mean that it does not resume."""
    checks = {
        "load": worst(
            abs(mine - theirs)
            for rank, saved in zip(load, saves, strict=True)
            for mine, theirs in zip(rank["losses"], saved["losses"], strict=True)
        )
    }
    if (pretrained := load[0]["pretrained_loss"]) is not None:
        checks["plain from_pretrained"] = abs(pretrained - saves[0]["losses"][0])
    return checks


def _ratios(modes: dict[str, dict]) -> dict[str, dict]:
    """hf_zero over each peer: medians of the rounds' ratios."""
    if "hf_zero" not in modes:
        return {}
    ours, ratios = modes["hf_zero"]["seconds_per_round"], {}
    for name, summary in modes.items():
        theirs = summary["seconds_per_round"]
        if name != "hf_zero":
            ratios[name] = {key: median(map(truediv, ours[key], theirs[key])) for key in ours.keys() & theirs.keys()}
    return ratios


def saves_table(modes: dict[str, dict]) -> str:
    """Seconds of the second save and of the flushed one; memory of the rank that takes most, in MiB."""
    header = ["save", "stall s", "complete s", "flushed s", "from_pretrained s", "flushed s"]
    header += ["extra tensors MiB", "kept", "checkpoint MiB", "model"]
    rows = []
    for name, summary in modes.items():
        sizes = [summary["extra"]["tensors"], summary["extra"]["tensors_kept"]]
        sizes += [summary["folder_nbytes"], summary["pretrained_nbytes"]]
        rows.append([name, *(_seconds(summary["seconds"][key]) for key in SECONDS), *map(mib, sizes)])
    return markdown(header, rows)


def loads_table(modes: dict[str, dict]) -> str:
    """Seconds in fresh ranks; differences of losses after the load, which show whether it is right."""
    rows = [
        [name, *(_seconds(summary["seconds"].get(key)) for key in LOADS), f"{summary['checks']['load']:.1e}"]
        for name, summary in modes.items()
    ]
    return markdown(["load", "weights s", "full state s", "loss difference"], rows)


def ratios_table(ratios: dict[str, dict]) -> str:
    """hf_zero over every other mode; below 1 hf_zero is better."""
    keys = (*SECONDS, *LOADS)
    rows = [[name, *(f"{found[key]:.3f}" if key in found else "-" for key in keys)] for name, found in ratios.items()]
    return markdown(["hf_zero / mode", *(key.replace("_", " ") for key in keys)], rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.{2 if value >= 1 else 3}f}"


if __name__ == "__main__":
    sys.exit(main())
