"""Before the first step: a check of disk space, and a report of the memory that each rank holds."""

import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm
from transformers.trainer_utils import SaveStrategy

from hf_zero.checkpoint import plan_weights
from hf_zero.checkpoint.adapters import is_adapter_model
from hf_zero.checkpoint.folders import make_folder
from hf_zero.comm.agreement import collect_from_all_ranks, on_first, run_on_all_ranks
from hf_zero.errors import CheckpointError, size_text
from hf_zero.planner import checkpoint_nbytes, render_classes, tensor_classes


if TYPE_CHECKING:
    from hf_zero.trainer.trainer import ZeroTrainerMixin


def check_room(trainer: "ZeroTrainerMixin") -> None:
    """Checks before the first step that all ranks share the output folder and that its disk has enough free space. All
    ranks must call it. Raises [`CheckpointError`] if one checkpoint plus the final model, if saved, do not fit."""
    args = trainer.args
    saves = args.save_strategy != SaveStrategy.NO
    if not saves and not trainer.leaves_model:
        return
    engine, folder = trainer._engine, Path(args.output_dir)
    comm, subject = engine.comm, f"looking at {folder}"
    # a new name, since network file systems cache lookups
    probe = folder / comm.broadcast_object(f"_probe-{secrets.token_hex(8)}")

    def create() -> None:
        make_folder(folder)
        probe.touch()

    def look() -> tuple[int | None, int]:
        size = checkpoint_nbytes(engine, tensor_classes(engine, trainer._prepared_optimizer))
        return (shutil.disk_usage(folder).free if probe.exists() else None), size

    run_on_all_ranks(comm, subject, on_first(comm, create))
    try:
        free, sizes = zip(*collect_from_all_ranks(comm, subject, look))
    finally:
        if comm.rank == 0:
            with suppress(OSError):
                probe.unlink()
    if None in free:
        raise CheckpointError(
            f"{folder}: rank {free.index(None)} does not see the files that rank 0 writes there; use a folder on "
            "storage that all hosts share"
        )
    # an adapter is small, and its size is unknown until PEFT writes it
    model = 0 if is_adapter_model(trainer.model) else plan_weights(engine).files.nbytes
    # ranks that update full parameters have unequal state, of which the smallest is a lower bound
    checkpoint = model if args.save_only_model else min(sizes)
    needed = saves * (checkpoint + model * trainer.saves_itself()) + model * trainer.leaves_model
    if min(free) < needed:
        raise CheckpointError(
            f"{folder}: the run will save at least {size_text(needed)}, but {size_text(min(free))} are free; free "
            "space there or set another output_dir"
        )


def tell_memory(trainer: "ZeroTrainerMixin") -> None:
    """Prints a memory report to stderr on rank 0, one line per tensor class: purpose, dtype, bytes per rank."""
    engine, optimizer = trainer._engine, trainer._prepared_optimizer
    ranks = f"{engine.comm.num_ranks} rank{'s' if engine.comm.num_ranks > 1 else ''}"
    if engine.comm.num_replicas > 1:
        ranks += f" in shard groups of {engine.comm.shard_group.num_ranks}"
    lines = render_classes(tensor_classes(engine, optimizer))  # on every rank, so that an error occurs on all
    late = "".join(f"\n  plus the state of {name} after the first step" for name in optimizer.late_state)
    if trainer.is_world_process_zero():
        text = f"hf_zero: stage {engine.stage} over {ranks}; each holds, besides activations:\n{lines}{late}"
        tqdm.write(text, file=sys.stderr)
