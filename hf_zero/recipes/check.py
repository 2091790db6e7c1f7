"""The tool `check`: trains a tiny model on this machine in all ways, compares, measures, and says what is wrong."""

import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hf_zero.comm.distributed import LAUNCH_ORDER
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.recipes import env
from hf_zero.recipes.launch import launch
from hf_zero.recipes.metrics import read_log
from hf_zero.recipes.page import Table, page_html
from hf_zero.recipes.parser import option
from hf_zero.recipes.probed_ranks import FAILED, OK, SKIPPED, Outcome
from hf_zero.recipes.probes import run_probes
from hf_zero.recipes.settings import launched_world_size
from hf_zero.trainer.checks import check_output_dir


POSITIONAL = ()

ON_CPUS = 2  # processes, where nothing else is asked for
DEADLINE_SECONDS = 600.0  # for all probes, which take a minute or two
PAGE_NAME = "check.html"
SANITIZER = "TORCH_CUDA_SANITIZER"
# What of `env` says which software this is.
VERSIONS = ("hf_zero", "python", "system", "torch", "transformers", "backend")


@dataclass
class Arguments:
    """Keys of `check`."""

    num_processes: int | None = option(
        None,
        "How many processes to start on this machine; by default one for each device, or 2 on CPUs. Leave it out "
        "under torchrun.",
    )
    use_cpu: bool = option(False, "Tries the CPUs of a machine that has other devices.")
    output_dir: str | None = option(None, f"A folder to which the page {PAGE_NAME} goes.")
    sanitize: bool = option(False, "Switches torch's CUDA sanitizer on, which looks for races between streams.")


def run(arguments: Arguments) -> None:
    """Prints one line for each probe, then what follows from them. Raises [`HfZeroError`] where one has failed."""
    launched = launched_world_size(arguments.num_processes)
    device_type = _device_type(arguments.use_cpu)
    num_processes = launched or arguments.num_processes or _num_devices(device_type)
    _refuse(arguments, device_type, launched)
    is_first = os.environ.get("RANK", "0") == "0"
    begin, facts = time.monotonic(), dict(env.facts())
    cpus = f"CPUs ({facts['processors']} processors)"
    where = f"{num_processes} process(es) on {cpus if device_type == 'cpu' else facts.get('device 0', device_type)}"
    if is_first:
        print("; ".join(f"{name} {facts[name]}" for name in VERSIONS if name in facts))
        print(f"{where}; {facts.get('backend')}", flush=True)
    # a GPU's matrix products then take the same way each time; read when CUDA starts
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault(LAUNCH_ORDER, "1")  # groups of ranks have communicators of their own
    if launched:
        with _last_resort():
            outcomes = run_probes(device_type, None)
    else:
        outcomes = _in_processes(num_processes, device_type, arguments.sanitize)
    if is_first:
        _conclude(outcomes, where, facts, time.monotonic() - begin, arguments)
    failed = [outcome.name for outcome in outcomes if outcome.status == FAILED]
    if failed:
        raise HfZeroError(f"check: {len(failed)} of {len(outcomes)} probes failed ({', '.join(failed)})")


def _device_type(use_cpu: bool) -> str:
    found = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and hasattr(torch.get_device_module(found), "Stream") else "cpu"


def _num_devices(device_type: str) -> int:
    return ON_CPUS if device_type == "cpu" else torch.accelerator.device_count()


def _refuse(arguments: Arguments, device_type: str, launched: int | None) -> None:
    if arguments.sanitize and device_type != "cuda":
        found = f"and the device is {device_type}"
        raise ConfigError(f"--sanitize: looks for races between streams of CUDA, {found}; leave it out")
    if arguments.sanitize and launched and SANITIZER not in os.environ:
        raise ConfigError(f"--sanitize: torch reads {SANITIZER} when it starts; give torchrun {SANITIZER}=1")
    asked, there = arguments.num_processes, _num_devices(device_type)
    if device_type != "cpu" and asked is not None and not launched and asked > there:
        raise ConfigError(
            f"--num_processes {asked}: each process needs a device of its own, and there are {there}; give at most "
            f"{there}, or --use_cpu"
        )
    if arguments.output_dir is not None:
        check_output_dir(arguments.output_dir)


def _in_processes(num_processes: int, device_type: str, sanitizes: bool) -> list[Outcome]:
    """Runs the probes in processes of their own, also where it is one: it may end in any way."""
    sanitizer = {SANITIZER: "1"} if sanitizes else {}
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder, patch.dict(os.environ, sanitizer):
        journal, failure = Path(folder, "journal"), None
        try:
            with _deadline():
                launch(num_processes, run_probes, device_type, str(journal))
        except HfZeroError as error:
            failure = " ".join(str(error).split())
        return _outcomes(journal, failure)


def _late() -> str:
    return f"not done {DEADLINE_SECONDS:.0f} s after the start of all probes, and ended"


@contextmanager
def _deadline() -> Iterator[None]:
    """Raises [`HfZeroError`] in the main thread when the time is up; the launcher then ends its processes."""

    def give_up(number: int, frame: Any) -> None:
        raise HfZeroError(_late())

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _last_resort() -> Iterator[None]:
    """Ends this process when the time is up, wherever it waits; its launcher then ends the others."""

    def end() -> None:
        said = f"check: {_late()}; the last line of the first rank names the probe before it"
        print(said, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(DEADLINE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _outcomes(journal: Path, failure: str | None) -> list[Outcome]:
    """Reads what was found until a process ended, however it did."""
    entries = read_log(journal) if journal.exists() else []  # without a line that the end has cut off
    outcomes = [Outcome(**entry) for entry in entries if "status" in entry]
    if failure is not None:
        name = next((entry["begins"] for entry in entries[-1:] if "begins" in entry), "processes")
        outcomes.append(Outcome(name, FAILED, failure))
        print(outcomes[-1].line(), flush=True)
    return outcomes


def _conclude(
    outcomes: list[Outcome], where: str, facts: dict[str, str], seconds: float, arguments: Arguments
) -> None:
    """Prints the conclusion, and the line for a bug report where something is wrong; writes the page if asked."""
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in (OK, FAILED, SKIPPED)}
    text = f"{counts[OK]} probes passed, {counts[FAILED]} failed, {counts[SKIPPED]} were skipped, in {seconds:.0f} s"
    print(f"\n{text}: {'do not trust this machine with a run' if counts[FAILED] else 'nothing wrong was found'}")
    if counts[FAILED]:
        failed = [f"{outcome.name}: {outcome.text}" for outcome in outcomes if outcome.status == FAILED]
        versions = [f"{name} {facts[name]}" for name in VERSIONS if name in facts]
        print(f"for a bug report: {'; '.join([*failed, where, *versions])}")
    if arguments.output_dir is not None:
        page = Path(arguments.output_dir, PAGE_NAME)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_page(outcomes, text, where, facts, _command(arguments)), encoding="utf-8")
        print(f"page: {page}")


def _command(arguments: Arguments) -> str:
    """Returns the command that makes the same check again."""
    given = [(f"--{name}", value) for name, value in vars(arguments).items() if value not in (None, False)]
    flags = [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in given]
    return " ".join(["hf-zero check", *flags])


def _page(outcomes: list[Outcome], text: str, where: str, facts: dict[str, str], command: str) -> str:
    failed = any(outcome.status == FAILED for outcome in outcomes)
    rows = [[outcome.name, outcome.status, outcome.text] for outcome in outcomes]
    return page_html(
        title="hf-zero check",
        kind="probes of a machine",
        summary=f"{where}. {text}.",
        results=[("result", "something is wrong" if failed else "nothing wrong was found")],
        facts=[(name, facts[name]) for name in VERSIONS if name in facts],
        tables=[Table("probes", "Probes", ["probe", "result", "what was found"], rows)],
        command=command,
        configuration="\n".join(f"{name}: {value}" for name, value in facts.items()),
    )
