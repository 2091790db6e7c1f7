"""What a recipe says at its end: memory against data parallelism, and how to use what it left."""

import json
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hf_zero.trainer.card import MEMORY_CLASSES, MIB


def memory_table(per_rank: Sequence[dict[str, int]], zero_stage: int) -> str:
    """Draws the bytes of each tensor class, as measured.

    Args:
        per_rank (`Sequence[dict[str, int]]`): One dict per rank, with the fields of `MemoryReport`, in bytes.
        zero_stage (`int`): Named in the heading.

    Returns:
        `str`: Lines of equal width: the largest rank, what plain data parallelism (DDP) would hold, and their ratio.
        Our buffers are counted, those of DDP are not.
    """
    lines = [f"{'MiB per rank, measured':24}{f'ZeRO stage {zero_stage}':>14}{'DDP':>10}{'ratio':>8}"]
    totals = [0, 0]
    *classes, (buffer_title, buffer_name) = MEMORY_CLASSES
    for title, name in classes:
        held = max(report[name] for report in per_rank)
        ddp = max(report[f"ddp_{name}"] for report in per_rank)
        totals = [totals[0] + held, totals[1] + ddp]
        lines.append(_memory_line(title, held, ddp))
    buffers = max(report[buffer_name] for report in per_rank)
    lines.append(f"{buffer_title:24}{buffers / MIB:>14.1f}{'-':>10}{'-':>8}")
    totals[0] += buffers
    lines.append(_memory_line("total", *totals))
    return "\n".join(lines)


def _memory_line(title: str, held: int, ddp: int) -> str:
    return f"{title:24}{held / MIB:>14.1f}{ddp / MIB:>10.1f}{held / max(ddp, 1):>8.2f}"


def usage_command(folder: str, text: str | list | dict, pipeline_task: str = "text-classification") -> str:
    """Writes a command that runs the trained model on a text, to be pasted into a shell as it is.

    Args:
        folder (`str`): Where the model was saved.
        text (`str`, `list` or `dict`): An example text, messages of a chat, or whatever else the pipeline takes.
        pipeline_task (`str`): As `transformers.pipeline` calls it.

    Returns:
        `str`: The command, with this Python.
    """
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = Path(os.path.relpath(python))
    # JSON strings are Python strings too, and their double quotes survive inside the shell's single ones.
    shown = textwrap.shorten(text, 60, placeholder="") if isinstance(text, str) else text
    task, folder, text = (json.dumps(item, ensure_ascii=False) for item in (pipeline_task, folder, shown))
    code = f"from transformers import pipeline; print(pipeline({task}, {folder})({text}))"
    return f"{shlex.quote(str(python))} -c {shlex.quote(code)}"
