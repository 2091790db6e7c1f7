"""`--dry_run`: what a run would do, told by one process that trains and writes nothing."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from transformers import Trainer

from hf_zero.engine import engine_of
from hf_zero.engine.partition import partition
from hf_zero.errors import ConfigError
from hf_zero.recipes.plan import example_batch
from hf_zero.recipes.settings import Settings, yaml_text
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroTrainer
from hf_zero.trainer.card import MIB


# What a dry run does not do, whatever is asked of the run.
QUIET = {"push_to_hub": False, "report_to": "none", "resume_from_checkpoint": None}


def dry_run(settings: Settings, world_size: int | None) -> None:
    """Prints configuration, data, units and predicted memory.

    Data, model and trainer are made as the run would make them, so what it would refuse is refused here.

    Args:
        settings ([`Settings`]): Of the run.
        world_size (`int`, *optional*): How many processes a launcher has started.

    Raises:
        ConfigError: If it is one of several processes.
    """
    if (world_size or 1) > 1:
        raise ConfigError(
            f"--dry_run: one process tells it, and the launcher has started {world_size}; leave the launcher out, "
            "with --num_processes for the memory to expect"
        )
    task = TASKS[settings.task].load()
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder:
        # Trainer makes the output folder when it is made.
        training = replace(
            settings, training={**settings.training, **QUIET, "output_dir": folder}
        ).training_arguments()
        data = task.load_data(settings.arguments, training)
        model = task.load_model(settings.arguments, training, data)
        trainer = task.make_trainer(model, settings.arguments, training, data)
        _print_section("configuration", yaml_text(settings.non_default()).splitlines())
        _print_section("data", [*data.notes, "first row:", *_indented(data.sample)])
        _print_section("model", units_table(trainer.model))
        max_length = {**settings.training, **vars(settings.arguments)}["max_length"]
        _print_section("memory of each rank", predicted(trainer, settings.num_processes or 1, max_length))
    print("\ndry run: nothing was trained or written")


def units_table(model: nn.Module) -> list[str]:
    """The units that are gathered and reduced together, a line each; equal ones that follow one another share one.

    Args:
        model (`nn.Module`): Not sharded; its weights may still be in files.
    """
    parts = partition(model)
    specs = [parts.root, *(spec for stack in parts.stacks for spec in stack.units)]
    rows: list[tuple[list[str], tuple[int, int]]] = []
    for spec in specs:
        params = list(spec.params.values())
        counts = _numel(params), _numel(param for param in params if param.requires_grad)
        if len(rows) > 1 and rows[-1][1] == counts:
            rows[-1][0].append(spec.name)
        else:
            rows.append(([spec.name], counts))
    named = [(_span(names), len(names), *counts) for names, counts in rows]
    width = max(len(name) for name, *_ in named)
    total, trained = (sum(len(names) * counts[at] for names, counts in rows) for at in (0, 1))
    lines = [f"{name:<{width}}  {_per_unit(count, num, num_trained)}" for name, count, num, num_trained in named]
    return [*lines, f"in all {total:,} parameters in {len(specs)} units, {trained:,} of them trained"]


def predicted(trainer: ZeroTrainer, num_ranks: int, max_length: int | None) -> list[str]:
    """What each rank is going to hold, as the planner says, and a reference model beside it.

    Args:
        trainer ([`ZeroTrainer`]): That has not trained.
        num_ranks (`int`): How many ranks there would be.
        max_length (`int`, *optional*): What rows of tokens are cut to: the longest that a step may see.
    """
    from hf_zero.planner import predict_with

    args = trainer.args
    batch = _widest(trainer, next(iter(trainer.get_train_dataloader())), max_length)
    prediction = predict_with(
        trainer.model,
        args.zero_config(),
        num_ranks=num_ranks,
        batch=dict(batch),
        make_optimizer=_make_optimizer(trainer),
        gradient_checkpointing=args.gradient_checkpointing,
        on_cpu=args.device.type == "cpu",
    )
    width = f" x {batch['input_ids'].shape[1]} tokens" if "input_ids" in batch else ""
    of_batch = f"a micro-batch: {len(next(iter(batch.values())))} rows{width}"
    return [of_batch, *prediction.render().splitlines(), *_reference(trainer, num_ranks)]


def _widest(trainer: ZeroTrainer, batch: Mapping[str, Tensor], max_length: int | None) -> Mapping[str, Tensor]:
    """As many rows as in a batch, as long as they can become; a batch that is not of tokens stays."""
    if "input_ids" not in batch or max_length is None:
        return batch
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    num_rows, width = batch["input_ids"].shape
    longest = min(max_length, getattr(model.config, "max_position_embeddings", max_length))
    return example_batch(model, num_rows, max(width, longest))


def _reference(trainer: ZeroTrainer, num_ranks: int) -> list[str]:
    """The frozen model that a trainer compares with; its forward is over before the step has its peak."""
    reference, config = getattr(trainer, "ref_model", None), trainer.args.zero_config()
    if reference is None:
        return []
    engine = engine_of(reference)
    shapes = [info.shape for info in engine.param_infos()] if engine else [p.shape for p in reference.parameters()]
    itemsize = (config.compute_dtype or next(trainer.model.parameters()).dtype).itemsize
    nbytes = sum(shape.numel() for shape in shapes) * itemsize / (num_ranks if config.stage == 3 else 1)
    return [f"  {'the reference model, beside these':<32}  {nbytes / MIB:>12.2f} MiB"]


def _make_optimizer(trainer: ZeroTrainer) -> partial:
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    return partial(kind, **kwargs)


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _per_unit(count: int, numel: int, num_trained: int) -> str:
    trained = "" if num_trained == numel else f", {num_trained:,} of them trained"
    return f"{numel:>14,} parameters{' each' if count > 1 else ''}{trained}"


def _print_section(title: str, lines: list[str]) -> None:
    print(f"\n{title}", *(f"  {line}" for line in lines), sep="\n")


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
