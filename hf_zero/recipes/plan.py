"""The tool `plan` and the key `--dry_run`: one process predicts the memory of each rank, and trains nothing."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from hf_zero.config import choose
from hf_zero.engine import engine_of
from hf_zero.engine.partition import partition
from hf_zero.errors import ConfigError
from hf_zero.planner import Prediction, advise, predict_with
from hf_zero.planner.advice import GIB
from hf_zero.recipes.cluster import ClusterArguments, time_of
from hf_zero.recipes.data import Data
from hf_zero.recipes.data.preferences import ANSWERS
from hf_zero.recipes.empty_models import (
    adapted,
    cast_batch,
    empty_model,
    example_batch,
    optimizer_of,
    quantized,
    reference_line,
)
from hf_zero.recipes.freezing import FreezingArguments, check_freezing, freeze_parameters
from hf_zero.recipes.loading import DTYPES, load_config, resolve_config
from hf_zero.recipes.lora import AdapterArguments, QuantizationArguments, check_adapter, check_quantization
from hf_zero.recipes.planned_run import PlannedRun, RowArguments, as_on_device, has_fused_head, planned, read_run
from hf_zero.recipes.settings import Settings, yaml_text
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroArgumentsMixin, ZeroTrainer


POSITIONAL = ("model", "a hub id, a folder, or a config.json; weights are not needed")
# What is not done where nothing is trained, whatever is asked of the run.
QUIET = {
    **{"push_to_hub": False, "report_to": "none", "resume_from_checkpoint": None},
    **{"precompute_ref_log_probs": False, "use_vllm": False},  # where the trainer has them
}
# What only the device of the run may know, beside.
NO_DEVICE = {"use_cpu": True, "bf16": False, "fp16": False, "zero_autocast": False, "tf32": None}


@dataclass
class DeviceArguments:
    """Keys that no task has."""

    memory: float | None = field(
        default=None, metadata={"help": "GiB that one device has, to find what fits; by default this machine's GPU's."}
    )

    def __post_init__(self):
        if self.memory is not None and self.memory <= 0:
            raise ConfigError(f"--memory {self.memory}: expected the GiB of one device")


@dataclass
class RunArguments(ClusterArguments, RowArguments, DeviceArguments):
    """Keys beside those of the task that a YAML file is for."""


@dataclass
class Arguments(AdapterArguments, QuantizationArguments, FreezingArguments, RunArguments, ZeroArgumentsMixin):
    """Keys of `plan`: settings of a run, under the names that tasks have for them."""

    num_processes: int = field(default=1, metadata={"help": "How many ranks."})
    bf16: bool = field(default=False, metadata={"help": "bf16 compute copy, fp32 masters."})
    fp16: bool = field(default=False, metadata={"help": "Likewise in fp16."})
    dtype: str = field(default="float32", metadata={"help": "The dtype that the weights are loaded in."})
    optim: str = field(default="adamw_torch_fused", metadata={"help": "The optimizer."})
    max_length: int = field(default=1024, metadata={"help": "Tokens of a sequence."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Sequences of a rank's micro-batch."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Blocks keep their inputs alone."})
    use_cpu: bool = field(default=False, metadata={"help": "Ranks train on CPUs, not on a GPU each."})
    config: str | None = field(
        default=None,
        metadata={
            "help": "In place of a model: the YAML file of a run, or a ready-made one; then all keys of its task may "
            "be given."
        },
    )
    ddp_timeout: int = field(default=1800, metadata={"help": "Of no account here."})

    def __post_init__(self):
        for key in ("max_length", "per_device_train_batch_size", "num_processes"):
            if getattr(self, key) < 1:
                raise ConfigError(f"--{key} {getattr(self, key)}: expected 1 or more")
        super().__post_init__()
        if self.num_tokens is not None:
            raise ConfigError("--num_tokens: is for a run of --config; give --max_length")
        choose("dtype", self.dtype, DTYPES)
        self.num_processes = self.check_cluster(self.num_processes, on_cpu=self.use_cpu)
        check_adapter(self)
        check_quantization(self, use_peft=self.use_peft)
        check_freezing(self, use_peft=self.use_peft)


def run(model: str, arguments: Arguments) -> None:
    """Prints the predicted memory of each rank, and which settings fit if the memory of a device is known; with
    `--gpu` the time of a step too.

    Args:
        model (`str`): where its config is.
        arguments ([`Arguments`]): as parsed.

    Raises:
        ConfigError: there is no such model, or a setting is not valid.
    """
    if model.endswith((".yaml", ".yml")):
        raise ConfigError(f"model {model!r}: is a YAML file, as of a run; plan that with --config {model}")
    config = arguments.zero_config()
    num_rows, num_tokens = arguments.per_device_train_batch_size, arguments.max_length
    subject = quantized(empty_model(model, dtype=DTYPES[arguments.dtype]), arguments, config.compute_dtype)
    freeze_parameters(subject, arguments)
    with_adapter = adapted(subject, arguments, task_type=None)

    def batch_of(num_rows: int) -> dict[str, Tensor]:
        return cast_batch(example_batch(subject, num_rows, num_tokens), config.compute_dtype)

    planned_run = PlannedRun(
        model,
        with_adapter,
        config,
        arguments.num_processes,
        batch_of(num_rows),
        optimizer_of(arguments.optim),
        gradient_checkpointing=arguments.gradient_checkpointing,
        on_cpu=arguments.use_cpu,
        num_rows=num_rows,
        num_tokens=num_tokens,
        batch_of=batch_of,
        has_8_bit_products=arguments.load_in_8bit,
    )
    _tell(planned_run, arguments)


def run_config(argv: list[str]) -> None:
    """Prints the same for a command line with `--config`, whose other keys may be all those of the run.

    Args:
        argv (`list[str]`): What follows `plan`.

    Raises:
        ConfigError: a key or a value is not valid, or such a run is not planned.
    """
    settings, own = read_run(argv, RunArguments)
    on_cpu, asked = settings.training["use_cpu"], settings.num_processes
    if asked is None or asked > 0:  # else it is refused below
        settings = replace(settings, num_processes=own.check_cluster(asked or 1, on_cpu=on_cpu))
    name = settings.arguments.model_name_or_path
    config = load_config(resolve_config(name), settings.arguments.model_revision) if name else None
    _tell(planned(settings, config, own.num_tokens), own)


def _tell(planned_run: PlannedRun, arguments: RunArguments) -> None:
    """Prints what a run takes, and which settings fit."""
    cluster = arguments.cluster(planned_run.dtype)
    planned_run = replace(planned_run, ranks_per_host=arguments.gpus_per_host, cluster=cluster)
    prediction = planned_run.predict()
    if arguments.json:
        print(time_of(arguments, planned_run, prediction))
        return
    print(_heading(planned_run, prediction))
    print(prediction.render())
    if planned_run.has_reference:
        parts = list(planned_run.model.parameters())
        print(reference_line(parts, planned_run.config, prediction.shard_size, parts[0].dtype))
    for note in planned_run.notes:
        print(f"  {note}")
    if cluster is not None:
        print(time_of(arguments, planned_run, prediction))
        return
    memory = _memory_nbytes(arguments, on_cpu=planned_run.on_cpu)
    if memory:
        switch = planned_run.gradient_checkpointing
        print(advise(planned_run.predict, planned_run.config, memory, gradient_checkpointing=switch).render())


def _heading(planned_run: PlannedRun, prediction: Prediction) -> str:
    trained = prediction.num_trained / 1e6
    size = prediction.shard_size
    groups = f" in shard groups of {size}" if size < prediction.num_ranks else ""
    return (
        f"{planned_run.name}: {prediction.num_parameters / 1e6:,.1f} M parameters, {trained:,.1f} M trained, "
        f"{planned_run.num_rows} x {planned_run.num_tokens} tokens; "
        f"stage {prediction.config.stage} over {prediction.num_ranks} rank(s){groups}, each:"
    )


def _memory_nbytes(arguments: DeviceArguments, *, on_cpu: bool) -> int:
    if arguments.memory is not None:
        return int(arguments.memory * GIB)
    if on_cpu or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(0).total_memory


def dry_run(settings: Settings) -> None:
    """Prints the configuration, the data, the units and the predicted memory of a run.

    Data, model and trainer are made as the run would make them, so what it would refuse is refused here.

    Args:
        settings ([`Settings`]): Of the run.

    Raises:
        ConfigError: If it is one of several processes.
    """
    if (settings.launched or 1) > 1:
        raise ConfigError(
            f"--dry_run: one process tells it, and the launcher has started {settings.launched}; leave the launcher "
            "out, with --num_processes for the memory to expect"
        )
    with _made(settings, QUIET) as (trainer, data):
        _print_section("configuration", yaml_text(settings.non_default()).splitlines())
        _print_section("data", [*data.notes, "first row:", *_indented(data.sample)])
        _print_section("model", units_table(trainer.model))
        if settings.training.get("precompute_ref_log_probs"):
            trainer.ref_model = None  # the run has none beside the model
        max_length = {**settings.training, **vars(settings.arguments)}.get("max_length")
        has_head = has_fused_head(settings.task, trainer.args)
        told = predicted(trainer, settings.num_processes or 1, max_length, has_head=has_head)
        _print_section("memory of each rank", told)
    print("\ndry run: nothing was trained or written")


def preprocess(settings: Settings) -> None:
    """Makes the rows of a run ready, and prints how many there are. Its weights stay in their files.

    `datasets` keeps the rows in its cache, under names that depend on the files, the tokenizer, the settings and the
    code that they depend on; the run finds them there.

    Args:
        settings ([`Settings`]): Of the run.

    Raises:
        ConfigError: If it is one of several processes, or the rows are a stream.
    """
    if (settings.launched or 1) > 1:
        raise ConfigError(
            f"--preprocess: one process does it, and the launcher has started {settings.launched}; leave the launcher "
            "out, with --dataset_num_proc for more of them"
        )
    if settings.arguments.dataset_streaming:
        raise ConfigError("--preprocess: dataset_streaming reads rows while training goes on; leave one of them out")
    if hasattr(settings.arguments, "attn_implementation"):
        settings = replace(settings, arguments=replace(settings.arguments, attn_implementation=None))
    with _made(settings, {**QUIET, **NO_DEVICE}) as (_, data):
        print(*data.notes, sep="\n")
    print(f"preprocessed: the run finds these rows in {datasets.config.HF_DATASETS_CACHE}")


@contextmanager
def _made(settings: Settings, changes: Mapping[str, Any]) -> Iterator[tuple[ZeroTrainer, Data]]:
    """The trainer and the data of a run, with other training arguments, and without an output folder."""
    task = TASKS[settings.task].load()
    with tempfile.TemporaryDirectory(prefix="hf_zero_") as folder:
        # Trainer makes the output folder when it is made.
        known = {key: value for key, value in changes.items() if key in settings.training}
        changed = replace(settings, training={**settings.training, **known, "output_dir": folder})
        training = changed.training_arguments()
        data = task.load_data(settings.arguments, training)
        model = task.load_model(settings.arguments, training, data)
        data.notes += freeze_parameters(model, settings.arguments)
        yield task.make_trainer(model, settings.arguments, training, data), data


def units_table(model: nn.Module) -> list[str]:
    """Returns one line for each unit, or for each group of equal units that follow one another.

    Args:
        model (`nn.Module`): Not sharded; its weights may still be in files.
    """
    specs = partition(model).units
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


def predicted(trainer: ZeroTrainer, num_ranks: int, max_length: int | None, *, has_head: bool = False) -> list[str]:
    """Returns the lines about the predicted memory of each rank, with that of a reference model if there is one.

    Args:
        trainer ([`ZeroTrainer`]): That has not trained.
        num_ranks (`int`): How many ranks there would be.
        max_length (`int`, *optional*): What rows of tokens are cut to: the longest that a step may see.
        has_head (`bool`): The loss is computed by TRL's head.
    """
    args = trainer.args
    batch = next(iter(trainer.get_train_dataloader()))
    base = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    if isinstance(batch, list):
        batch = _generated(trainer, base, batch)
    else:
        batch = _widest(base, batch, max_length, args.train_batch_size)
    on_cpu = args.device.type == "cpu"
    with as_on_device(on_cpu, has_head=has_head):
        prediction = predict_with(
            trainer.model,
            args.zero_config(),
            num_ranks=num_ranks,
            batch={**batch, "fused_lm_head": True} if has_head else dict(batch),
            make_optimizer=_make_optimizer(trainer),
            gradient_checkpointing=args.gradient_checkpointing,
            on_cpu=on_cpu,
        )
    width = f" x {batch['input_ids'].shape[1]} tokens" if "input_ids" in batch else ""
    of_batch = f"a micro-batch: {len(next(iter(batch.values())))} rows{width}"
    return [of_batch, *prediction.render().splitlines(), *_reference(trainer, prediction.shard_size)]


def _widest(
    model: PreTrainedModel, batch: Mapping[str, Tensor], max_length: int | None, batch_size: int
) -> Mapping[str, Tensor]:
    """Returns a batch of tokens with rows of the greatest possible length; other batches stay as they are."""
    if "chosen_input_ids" in batch:  # the trainer puts both answers through the model together
        answers = [batch[f"{name}_input_ids"] for name in ANSWERS]
        batch = example_batch(model, sum(map(len, answers)), max(ids.shape[1] for ids in answers))
    if "input_ids" not in batch or "pixel_values" in batch or max_length is None:
        return batch
    num_rows, width = batch["input_ids"].shape
    longest = min(max_length, getattr(model.config, "max_position_embeddings", max_length))
    if "cu_seq_lens_q" in batch:  # packed: all rows of the batch are one behind the other
        longest *= batch_size
    return example_batch(model, num_rows, max(width, longest))


def _generated(trainer: ZeroTrainer, model: PreTrainedModel, rows: list[dict[str, Any]]) -> Mapping[str, Tensor]:
    """As many rows as a step takes at once, as long as the prompts of these rows with what is generated to them."""
    tokenize, args = trainer.processing_class, trainer.args
    prompts = [row["prompt"] for row in rows]
    texts = [p if isinstance(p, str) else tokenize.apply_chat_template(p, tokenize=False) for p in prompts]
    longest = max(len(ids) for ids in tokenize(texts)["input_ids"])
    return example_batch(model, args.per_device_train_batch_size, longest + args.max_completion_length)


def _reference(trainer: ZeroTrainer, shard_size: int) -> list[str]:
    """Returns the line about the frozen reference model. Its forward is over before memory is at its peak."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None:
        return []
    engine = engine_of(reference)
    parts = engine.param_infos() if engine else reference.parameters()
    dtype = next(trainer.model.parameters()).dtype
    return [reference_line(parts, trainer.args.zero_config(), shard_size, dtype)]


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
