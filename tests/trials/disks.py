"""Disks fill, or files may not grow: in the middle of a training, until there is room again."""

import random
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.trials.runs import Run, incomplete_in, is_equal, steps_in
from tests.trials.table import Count


FULL, LIMITED = "disks that fill (tmpfs)", "files that may not grow (ulimit -f)"
FULL_SECONDS = 12.0  # then there is room again


@dataclass
class LimitFiles:
    """No file that a rank writes may be longer than this.

    Args:
        nbytes (`int`): the limit.
    """

    nbytes: int

    def __call__(self, rank: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def disks(root: Path, whole: Path, num_trials: int, generator: random.Random) -> dict[str, Count]:
    """Half of them with a limit to the length of files, half with a small file system, where one can be mounted.

    Args:
        root (`Path`): an empty folder.
        whole (`Path`): of a run that ended undisturbed.
        num_trials (`int`): how many.
        generator (`random.Random`): decides how much room there is.
    """
    largest = max(path.stat().st_size for path in (whole / "out").rglob("*") if path.is_file())
    needed = sum(path.stat().st_size for path in (whole / "out").rglob("*") if path.is_file())
    counts = {LIMITED: Count()}
    for trial in range(num_trials - num_trials // 2):
        fault = LimitFiles(int(generator.uniform(0.01, 0.99) * largest))
        run = Run.start(root / f"limited-{trial}", fault, in_background=generator.random() < 0.5)
        _judge(counts[LIMITED], run, whole, has_ended=run.end())
    for trial in range(num_trials // 2):
        folder = root / f"full-{trial}"
        folder.mkdir(parents=True)
        if not _mount(folder, int(generator.uniform(0.3, 1.05) * needed)):
            print(f"  {FULL}: not tried, since this user cannot mount a tmpfs", flush=True)
            break
        try:
            run = Run.start(folder, in_background=generator.random() < 0.5)
            run.wait_for_training()
            deadline = time.monotonic() + FULL_SECONDS
            while any(process.is_alive() for process in run.processes) and time.monotonic() < deadline:
                time.sleep(0.05)
            before = steps_in(folder / "out")
            subprocess.run(["mount", "-o", f"remount,size={10 * needed}", str(folder)], check=True)
            _judge(counts.setdefault(FULL, Count()), run, whole, has_ended=run.end(), before=before)
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
    return counts


def _mount(folder: Path, nbytes: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _judge(count: Count, run: Run, whole: Path, *, has_ended: bool, before: list[int] = ()) -> None:
    """The run is gone on with, now that there is room, if it has not come to its end."""
    count.trials += 1
    out, wrong = run.folder / "out", incomplete_in(run.folder / "out")
    before = before or steps_in(out)
    if not has_ended:
        count.hung += 1
        return
    if any(run.codes):
        count.refused += 1
        is_said = any("Error: " in run.last_line(rank) for rank in range(len(run.codes)))
        count.unnoticed += not is_said
        run = Run.start(run.folder)
        count.hung += not run.end()
    wrong += incomplete_in(out)
    after = steps_in(out)
    is_lost = (
        any(run.codes) or (bool(before) and (not after or after[-1] < before[-1])) or not is_equal(run.folder, whole)
    )
    count.incomplete += bool(wrong)
    count.lost += is_lost
    count.survived += not is_lost
    for each in (*wrong, *([f"ended with {run.codes}: {run.last_line(0)[:300]}"] if is_lost else [])):
        print(f"  {each}", flush=True)
