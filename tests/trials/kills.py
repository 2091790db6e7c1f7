"""Ranks are killed at random times, and at chosen calls of the operating system inside saves."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.trials.runs import NUM_RANKS, Run, incomplete_in, is_equal, steps_in
from tests.trials.table import Count


CALLS = ("posix_fallocate", "ftruncate", "pwrite", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
AT_RANDOM, AT_CALLS, NAMED = "kills at random times", "kills at calls inside saves", "survivors name who has ended"


@dataclass
class KillAt:
    """Kills the rank at one call, before it is made or after.

    Args:
        victims (`tuple[int, ...]`): ranks.
        call (`str`): of `os`.
        index (`int`): which of the calls.
        after (`bool`): whether it is made.
    """

    victims: tuple[int, ...]
    call: str
    index: int
    after: bool

    def __call__(self, rank: int) -> None:
        if rank in self.victims:
            real, made = getattr(os, self.call), []

            def deadly(*args, **kwargs):
                made.append(None)
                if len(made) != self.index + 1:
                    return real(*args, **kwargs)
                if self.after:
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(os, self.call, deadly)


@dataclass
class CountCalls:
    """Writes how often a rank makes each call.

    Args:
        folder (`str`): where to.
    """

    folder: str

    def __call__(self, rank: int) -> None:
        made = dict.fromkeys(CALLS, 0)
        leave = os._exit
        for call in CALLS:
            setattr(os, call, _counted(getattr(os, call), made, call))

        def write(code: int) -> None:
            with open(f"{self.folder}/calls-{rank}", "w", encoding="utf-8") as file:
                json.dump(made, file)
            leave(code)

        os._exit = write


def _counted(real, made: dict[str, int], call: str):
    def counted(*args, **kwargs):
        made[call] += 1
        return real(*args, **kwargs)

    return counted


@dataclass
class _Measured:
    """Of an undisturbed run: how long it trains, and how often each rank makes each call."""

    seconds: float
    calls: list[dict[str, int]]


def _measure(folder: Path) -> _Measured:
    folder.mkdir(parents=True)
    run = Run.start(folder, CountCalls(str(folder)))
    run.wait_for_training()
    began = time.monotonic()
    run.end()
    seconds = time.monotonic() - began
    return _Measured(seconds, [json.loads((folder / f"calls-{rank}").read_text()) for rank in range(NUM_RANKS)])


def kills(root: Path, whole: Path, num_trials: int, generator: random.Random) -> dict[str, Count]:
    """Half of them at random times, half at calls.

    Args:
        root (`Path`): an empty folder.
        whole (`Path`): of a run that ended undisturbed.
        num_trials (`int`): ranks to be killed, or pairs of them.
        generator (`random.Random`): decides when.
    """
    counts = {AT_RANDOM: Count(), AT_CALLS: Count(), NAMED: Count()}
    measured = _measure(root / "measured")
    folder, number, open_trials, known = root / "0", 0, [], set()
    for trial in range(num_trials * 5):
        is_over = counts[AT_RANDOM].trials + counts[AT_CALLS].trials >= num_trials
        if is_over and not open_trials:
            break
        kind = None if is_over else (AT_RANDOM, AT_CALLS)[trial % 2]
        before = steps_in(folder / "out")
        run, victims = _disturbed(folder, kind, measured, generator)
        has_ended = run.end()
        count = counts[kind or AT_RANDOM]
        if any(run.codes[victim] == -signal.SIGKILL for victim in victims):
            count.trials += 1
            open_trials.append(kind)
            _look_at_survivors(run, victims, counts[NAMED])
        _judge(count, folder / "out", before, has_ended, known)
        if run.codes == [0] * NUM_RANKS:
            for each in open_trials:
                counts[each].survived += is_equal(folder, whole)
                counts[each].lost += not is_equal(folder, whole)
            number, open_trials = number + 1, []
            folder = root / str(number)
        elif not victims:
            raise RuntimeError(f"{folder}: a run that nothing disturbed ended with {run.codes}: {run.last_line(0)}")
    return counts


def _disturbed(folder: Path, kind: str | None, measured: _Measured, generator: random.Random) -> tuple[Run, list[int]]:
    """A run, and those of its ranks that are killed or will be."""
    victims = generator.choice([[0], [1], [0, 1]]) if kind else []
    in_background = generator.random() < 0.5
    if kind == AT_CALLS:
        call, index = generator.choice(list(_calls(measured, victims)))
        return Run.start(
            folder, KillAt(tuple(victims), call, index, generator.random() < 0.5), in_background=in_background
        ), victims
    run = Run.start(folder, in_background=in_background)
    if kind == AT_RANDOM:
        run.wait_for_training()
        time.sleep(generator.uniform(0, measured.seconds))
        for victim in victims:
            if run.processes[victim].is_alive():
                run.processes[victim].kill()
    return run, victims


def _calls(measured: _Measured, victims: list[int]) -> Iterator[tuple[str, int]]:
    """Every call, and up to six of its turns, so that frequent ones are not chosen more often than others."""
    for call, number in measured.calls[victims[0]].items():
        yield from ((call, index) for index in range(0, number, max(1, number // 6)))


def _look_at_survivors(run: Run, victims: list[int], named: Count) -> None:
    for rank in set(range(NUM_RANKS)) - set(victims):
        if run.codes[rank] == 0:
            continue  # it had ended before
        line = run.last_line(rank)
        is_named = any(f"rank {victim}" in line for victim in victims)  # what gloo says by itself has no ranks
        named.trials += 1
        named.survived += is_named
        named.unnoticed += not is_named
        if not is_named:
            print(f"  says no name: {line[:200]}", flush=True)


def _judge(count: Count, out: Path, before: list[int], has_ended: bool, known: set[str]) -> None:
    after, wrong = steps_in(out), [each for each in incomplete_in(out) if each not in known]
    known.update(wrong)  # counted once, although it stays
    count.hung += not has_ended
    count.incomplete += bool(wrong)
    count.lost += bool(before) and (not after or after[-1] < before[-1])
    for each in wrong:
        print(f"  incomplete: {each}", flush=True)
