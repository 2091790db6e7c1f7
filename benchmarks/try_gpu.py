"""Tries a machine with a GPU in the minutes that there are: the most telling first, and what was found stays.

    python -m benchmarks.try_gpu --seconds 560 --output found
    python -m benchmarks.try_gpu --seconds 200 --output more --steps 1.5b,8b   # what there was no time for
    python -m benchmarks.try_gpu --device cpu --output found                   # tries the program itself

Needs torch, transformers, pytest, pytest-xdist and pytest-timeout, no installation, and no network. Each step is a
process of its own, which is ended when its time is up. The folder gets `log.txt`, all that the steps say as they say
it; `found.json`, what came of each, written after each; and the page of `hf-zero check`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import describe_machine


ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 15  # what is left of the time when no further step is begun
PATIENCE_SECONDS = 10.0  # in which a step that was interrupted says what it has
NUM_LINES = 12  # of a step's last words, that are printed and kept
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Step:
    """One step: `python -m` this. On a CPU, where it only tries the program, with other arguments."""

    module: str
    arguments: str
    seconds: float  # at most, on a GPU
    on_cpu: str
    is_measured: bool = False  # whether it writes raw numbers to the file behind --json


_PYTEST = "--tier all -m gpu -v --timeout 60 -p no:cacheprovider -n {workers}"


def _tests(files: str, seconds: float) -> Step:
    paths = " ".join(f"tests/gpu/test_{name}.py" for name in files.split())
    # `check` is a step of its own
    arguments = f"{paths} {_PYTEST} --deselect tests/gpu/test_parity.py::test_the_check_passes"
    return Step("pytest", arguments, seconds, "tests/gpu/test_memory.py --tier all -v -k 'cpu and slots'")


def _shape(name: str, seconds: float) -> Step:
    asked = f"--shapes {name} --warmup 3 --steps 6"
    return Step("benchmarks.gpu", asked, seconds, "--dry --shapes dry --modes hf_zero-3", True)


# In this order: do real NCCL, autograd's device thread and page-locking work at all, is it right, is it right while
# streams are late, how fast is it.
STEPS = {
    "smoke": _tests("backends memory", 120),  # its processes import everything anew
    "check": Step("hf_zero.recipes", "check --output_dir {output}", 180, "check --use_cpu --output_dir {output}"),
    "parity": _tests("parity", 200),
    "0.5b": _shape("0.5b", 150),
    "features": _tests("features", 200),
    "divided": _tests("divided", 200),
    "1.5b": _shape("1.5b", 150),
    "8b": _shape("8b", 240),
}


def main(argv: list[str] | None = None) -> int:
    begin = time.monotonic()
    options = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the step under way
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background ignore it, and so steps
    options.output.mkdir(parents=True, exist_ok=True)
    report: dict = {"machine": describe_machine(), "steps": {}}
    with open(options.output / "log.txt", "a", encoding="utf-8") as log:
        for name in options.steps:
            left = options.seconds - (time.monotonic() - begin)
            report["steps"][name] = found = _run(name, left, options, log)
            print(
                f"\n## {name}: {found['end']} after {found['seconds']:.0f} s\n" + "\n".join(found["said"]), flush=True
            )
            _write(report, options.output / "found.json")
    ends = [found["end"] for found in report["steps"].values()]
    return 0 if all(end == "done" for end in ends) else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.try_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=560, help="for all of it (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", default=",".join(STEPS), help="which, in which order (default: %(default)s)")
    options = parser.parse_args(argv)
    options.steps = options.steps.split(",")
    unknown = [name for name in options.steps if name not in STEPS]
    if unknown:
        parser.error(f"--steps: {unknown[0]!r} is not one of {', '.join(STEPS)}")
    return options


def _run(name: str, left: float, options: argparse.Namespace, log) -> dict:
    """Runs a step in the time that is left, and returns how it ended and what it said last."""
    step, begin = STEPS[name], time.monotonic()
    if left < LEAST_SECONDS:
        return {"end": "left out, for want of time", "seconds": 0.0, "said": []}
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder, "numbers.json")
        log.write(f"\n## {name}\n")
        log.flush()
        where = Path(log.name).stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-m", step.module, *_arguments(step, options, numbers)],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            process.wait(min(step.seconds, left) if options.device == "cuda" else left)
            end = "done" if process.returncode == 0 else f"failed, exit code {process.returncode},"
        except subprocess.TimeoutExpired:
            end = "its time was up"
        finally:
            _end(process)
        with open(log.name, encoding="utf-8", errors="replace") as said:
            said.seek(where)
            lines = [line.rstrip() for line in said if line.strip()]
        wrong = [line for line in lines if re.match(r"(FAILED|ERROR)\b", line)]
        found = {"end": end, "seconds": time.monotonic() - begin, "said": [*wrong, *lines[-NUM_LINES:]]}
        return found | ({"numbers": json.loads(numbers.read_text())} if numbers.exists() else {})


def _arguments(step: Step, options: argparse.Namespace, numbers: Path) -> list[str]:
    workers = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    text = step.arguments if options.device == "cuda" else step.on_cpu
    words = [word.format(output=options.output.resolve(), workers=workers) for word in shlex.split(text)]
    return words + (["--json", str(numbers)] if step.is_measured else [])


def _end(process: subprocess.Popen) -> None:
    """Interrupts what is left of a step, so that it says what it has, then ends it with all that it has started."""
    for number, patience in ((signal.SIGINT, PATIENCE_SECONDS), (signal.SIGKILL, None)):
        if number is signal.SIGKILL or process.poll() is None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue


def _write(report: dict, path: Path) -> None:
    """Writes what there is so far; a file that is whole takes the place of the last."""
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(whole, path)


if __name__ == "__main__":
    sys.exit(main())
