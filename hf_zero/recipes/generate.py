"""The tool `generate`: answers a file of prompts with the model of a folder, in one process or in several.

Which prompts are answered together depends only on the file and `batch_size`, so every number of processes gives the
same answers.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm

from hf_zero.checkpoint.folders import write_whole
from hf_zero.comm.ranks import transport_errors
from hf_zero.errors import ConfigError, DataError
from hf_zero.recipes.data.formats import PROMPTS, format_of
from hf_zero.recipes.data.images import image_column
from hf_zero.recipes.data.rows import BadRow, Rows, plural
from hf_zero.recipes.data.sources import check_path, load_rows
from hf_zero.recipes.generation import GenerationArguments, TextGenerator, load_generator
from hf_zero.recipes.launch import run_on
from hf_zero.recipes.models import takes_images
from hf_zero.recipes.parser import option, refuse_less
from hf_zero.recipes.tasks import SourceArguments
from hf_zero.trainer.checks import check_output_dir


POSITIONAL = (("folder", "a model or an adapter: a folder, or a hub id"),)


@dataclass
class Arguments(GenerationArguments):
    """Keys of `generate`."""

    prompts: str | None = option(None, "File of rows with a column prompt (text or messages), or of lines of text.")
    output: str | None = option(None, "JSONL file to write: the rows in order, each with its answer.")
    output_column: str = option("completion", "Column of the answers.")
    overwrite: bool = option(False, "Replace output if it exists.")
    batch_size: int = option(8, "Number of prompts that a process answers together.")
    num_processes: int | None = option(None, "Number of processes to start on this machine. Omit it under torchrun.")
    zero_stage: Literal[0, 1, 2, 3] = option(
        3, "3: the processes share the parameters; 0 to 2: each process holds all of them."
    )

    def __post_init__(self):
        super().__post_init__()
        refuse_less(self, batch_size=1)


def run(folder: str, arguments: Arguments) -> None:
    """Answers the prompts, and writes all answers at the end."""
    for name in ("prompts", "output"):
        if not getattr(arguments, name):
            raise ConfigError(f"{name}: not set; name a file with --{name}")
    check_path(arguments.prompts, "prompts")
    output = Path(arguments.output).expanduser()
    if output.exists() and not arguments.overwrite:
        raise ConfigError(f"output {arguments.output}: exists; give another, or --overwrite")
    check_output_dir(str(output.parent), name="output")
    output.parent.mkdir(parents=True, exist_ok=True)
    run_on(arguments.num_processes, answer_file, folder, arguments)


def answer_file(folder: str, arguments: Arguments) -> None:
    """Answers the prompts. All ranks call it; rank 0 writes."""
    with transport_errors("generate"):
        # without cpu, every rank of a machine without accelerator would take itself for the only one
        state = PartialState(cpu=arguments.use_cpu or not torch.accelerator.is_available())
        with state.main_process_first():
            rows = load_rows(SourceArguments(train_file=arguments.prompts), "train")
        is_sharded = arguments.zero_stage == 3 and state.num_processes > 1
        generator = load_generator(folder, arguments, state.device, is_sharded=is_sharded)
        found = list(_read(rows, generator, arguments))
        answers = _answers([tokens for _, tokens in found], generator, arguments, state)
        if state.is_main_process:
            lines = [{**row, arguments.output_column: answers[index]} for index, (row, _) in enumerate(found)]
            text = "".join(f"{json.dumps(line, ensure_ascii=False, default=str)}\n" for line in lines)
            write_whole(Path(arguments.output).expanduser(), text.encode())
            print(f"{arguments.output}: {plural(len(lines), 'answer')}", flush=True)
        state.destroy_process_group()


def _read(rows: Rows, generator: TextGenerator, arguments: Arguments) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yields each row with the token ids of its prompt. Raises [`DataError`], naming the first row that cannot be
    answered."""
    form = None if arguments.prompts.endswith(".txt") else format_of((PROMPTS,), rows)
    column = image_column(rows) if takes_images(generator.model.config) else None
    if column is not None:
        raise DataError(f"{rows.source}: column {column!r}: generate does not read images; leave it out")
    for index, raw in enumerate(rows.data):
        try:
            row = rows.read(raw)
            row = {"prompt": row["text"]} if form is None else row
            if arguments.output_column in row:
                raise BadRow(f"has a column {arguments.output_column!r} already; name another with --output_column")
            prompt = row["prompt"] if form is None else form.read(row)["prompt"]
            tokens = generator.tokens(generator.prompt_of(prompt))
            if (room := generator.room(tokens)) < arguments.max_new_tokens:
                said = f"the prompt has {plural(len(tokens), 'token')}, which leaves {room}"
                raise BadRow(f"{said}; set less --max_new_tokens")
        except BadRow as error:
            raise DataError(f"{rows.where(index, raw)}: {error}; correct it") from error
        yield row, tokens


def _answers(
    prompts: list[list[int]], generator: TextGenerator, arguments: Arguments, state: PartialState
) -> dict[int, str]:
    """Returns the answers of all ranks, by the position of the prompt. Long prompts come first, for their memory."""
    order, size = sorted(range(len(prompts)), key=lambda index: -len(prompts[index])), arguments.batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    answers: dict[int, str] = {}
    is_shown = state.is_main_process and sys.stderr.isatty()
    for first in tqdm(range(0, len(batches), state.num_processes), disable=not is_shown):
        number = first + state.process_index
        batch = batches[min(number, len(batches) - 1)]  # a rank without a batch keeps in step with the others
        transformers.set_seed(arguments.seed + number)
        answers.update(zip(batch, generator.generate([prompts[index] for index in batch]), strict=True))
    return {index: text for each in gather_object([answers]) for index, text in each.items()}
