"""What was measured of a run, kept beside its report: a run that has nothing left to train measures nothing."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.folders import write_whole
from hf_zero.recipes.step_trace import Moment, Step


MEASURED_NAME = "measured.json"


@dataclass(frozen=True)
class Measured:
    """What the watchers of a run have found.

    Args:
        memory (`list[dict[str, int]]`): by rank, the largest values of the fields of `MemoryReport`, in bytes.
        step ([`Step`], *optional*): the step that was watched.
        planned (`dict[str, int]`): what was told of the memory of a rank before the first step, by the same fields.
    """

    memory: list[dict[str, int]]
    step: Step | None
    planned: dict[str, int] = field(default_factory=dict)

    def kept(self, path: Path, *, is_trained: bool) -> "Measured":
        """Writes it to a file; where nothing was trained, reads there what was measured before.

        Args:
            path (`Path`): The file.
            is_trained (`bool`): Whether there was a step to train.
        """
        if is_trained:
            write_whole(path, json.dumps(asdict(self)).encode())
            return self
        try:
            return _of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return self  # there is none, or it was damaged: the report does without it


def _of(content: dict[str, Any]) -> Measured:
    step = content["step"]
    if step is not None:
        moments = [[Moment(**moment) for moment in moments] for moments in step["moments"]]
        step = Step(step["number"], moments, step["sent_nbytes"], step.get("shares_memory", False))
    return Measured(content["memory"], step, content.get("planned", {}))
