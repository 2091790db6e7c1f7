"""A checkpoint is damaged: bits flip, numbers change, files go, are emptied or swapped. Then the run goes on.

There is an older checkpoint that is whole, so a run can come to its end whatever happens to the newest one.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_zero.checkpoint.manifest import DISPENSABLE, MANIFEST_NAME
from tests.distributed import RemoteError, run_ranks
from tests.trials.runs import NUM_RANKS, NUM_STEPS, SETTINGS
from tests.trials.table import Count


OLDER, NEWEST = NUM_STEPS - 3, NUM_STEPS - 2
BITS, NUMBERS, FILES = "bits that flip", "numbers that change in the manifest", "files missing, emptied or swapped"


def damage(root: Path, whole: Path, num_flips: int, generator: random.Random) -> dict[str, Count]:
    """Flips of every file in turn, and every edit and every way to lose a file once.

    Args:
        root (`Path`): an empty folder.
        whole (`Path`): of a run that ended undisturbed.
        num_flips (`int`): bits, one at a time.
        generator (`random.Random`): decides where in a file.
    """
    source = root / "source"
    run_ranks(_train_to, NUM_RANKS, str(source), NEWEST, timeout=120)
    names = sorted(path.relative_to(_newest(source)) for path in _newest(source).rglob("*") if path.is_file())
    flips = [_flip(names[index % len(names)], generator.random()) for index in range(num_flips)]
    return {
        BITS: _trials(root, source, whole, flips),
        NUMBERS: _trials(root, source, whole, [(name, _edit(edit)) for name, edit in EDITS.items()]),
        FILES: _trials(root, source, whole, list(_ways(names))),
    }


Damage = tuple[str, Callable[[Path], None]]  # what it is, and does to the newest checkpoint


def _newest(source: Path) -> Path:
    return source / f"checkpoint-{NEWEST}"


def _flip(name: Path, where: float) -> Damage:
    def flip(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        bit = int(where * 8 * len(content))
        if content:
            content[bit // 8] ^= 1 << bit % 8
        (checkpoint / name).write_bytes(content)

    return f"a bit of {name}", flip


def _first_scalars(run: dict) -> dict:
    return next(iter(run["scalars"].values()))


EDITS: dict[str, Callable[[dict], None]] = {
    "double rate": lambda run: run["groups"][0].update(lr=2 * run["groups"][0]["lr"]),
    "other betas": lambda run: run["groups"][0].update(betas=[0.5, 0.6]),
    "much decay": lambda run: run["groups"][0].update(weight_decay=0.9),
    "large eps": lambda run: run["groups"][0].update(eps=0.1),
    "nan step": lambda run: _first_scalars(run).update(step=float("nan")),
    "far step": lambda run: _first_scalars(run).update(step=_first_scalars(run)["step"] + 1000),
    "other sample": lambda run: run["extra"]["place"].update(batch=run["extra"]["place"]["batch"] - 1),
    "other loss": lambda run: run.update(loss=0.0),
}


def _edit(edit: Callable[[dict], None]) -> Callable[[Path], None]:
    def write(checkpoint: Path) -> None:
        path = checkpoint / MANIFEST_NAME
        manifest = json.loads(path.read_text())
        edit(manifest["run"])
        path.write_text(json.dumps(manifest, indent=1) + "\n")

    return write


def _ways(names: list[Path]) -> Iterator[Damage]:
    for name in names:
        older = Path("..", f"checkpoint-{OLDER}", name)
        if name.name not in DISPENSABLE:  # which people are told to delete
            yield f"{name} missing", lambda checkpoint, name=name: (checkpoint / name).unlink()
        yield f"{name} empty", lambda checkpoint, name=name: (checkpoint / name).write_bytes(b"")
        yield (
            f"{name} of another step",
            lambda checkpoint, name=name, older=older: shutil.copy(checkpoint / older, checkpoint / name),
        )


def _trials(root: Path, source: Path, whole: Path, damages: list[Damage]) -> Count:
    count = Count()
    for what, does in damages:
        folder = root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        before = {path: path.read_bytes() for path in _newest(folder).rglob("*") if path.is_file()}
        does(_newest(folder))
        if before == {path: path.read_bytes() for path in _newest(folder).rglob("*") if path.is_file()}:
            continue  # a file that is empty cannot be emptied
        _judge(count, what, folder, whole)
    return count


def _judge(count: Count, what: str, folder: Path, whole: Path) -> None:
    count.trials += 1
    try:
        began, is_same, refused = run_ranks(_go_on, NUM_RANKS, str(folder), str(whole), timeout=60)[0]
    except RemoteError as error:
        count.hung += error.kind == "Timeout"
        count.refused += error.kind != "Timeout"
        return
    if refused:
        count.refused += 1
        return
    count.survived += is_same
    count.lost += not is_same
    if began == NEWEST:
        count.unnoticed += 1
        print(f"  unnoticed: {what}{'' if is_same else ', and the weights differ'}", flush=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """What the run says goes nowhere: it would hide what the trials have found."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _trainer(folder: str, steps: int, callbacks=()):
    from tests import models
    from tests.trainer.harness import Rows, make, seed_everything

    seed_everything()
    parts = {"callbacks": list(callbacks)}
    trainer = make(3, folder, models.build("bert"), Rows("bert"), parts=parts, **SETTINGS | {"save_total_limit": None})
    if steps < NUM_STEPS:
        trainer.add_callback(_stop_after(steps))
    return trainer


def _stop_after(steps: int):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= steps

    return Stop()


def _train_to(folder: str, steps: int) -> None:
    with _quiet():
        _trainer(folder, steps).train()


def _go_on(folder: str, whole: str) -> tuple[int, bool, str]:
    """At which step it went on, whether it ended as the unbroken run, and how it was refused instead."""
    import torch
    from transformers import TrainerCallback

    from tests.compare import weights_of

    class Note(TrainerCallback):
        began = 0

        def on_train_begin(self, args, state, control, **kwargs):
            self.began = state.global_step

    note = Note()
    try:
        with _quiet():
            trainer = _trainer(folder, NUM_STEPS, [note])
            trainer.train(resume_from_checkpoint=True)
    except Exception as error:
        return note.began, False, f"{type(error).__name__}: {error}"
    weights, expected = weights_of(trainer.model), torch.load(f"{whole}/weights.pt", weights_only=True)
    is_same = all(torch.equal(weights[name], value) for name, value in expected.items())
    return note.began, is_same, ""
