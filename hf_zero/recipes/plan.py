"""The tool `plan`: one process predicts the memory of each rank, and trains nothing. It answers in seconds, so what
only a run needs (Trainer, data sets, TRL) is not imported here; a test says so."""

from dataclasses import dataclass, replace
from functools import cache, partial

from torch import Tensor

from hf_zero.config import choose
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.planner import Prediction, advise, device_named, remedy
from hf_zero.recipes.cluster import RunArguments, time_of
from hf_zero.recipes.empty_models import (
    adapted,
    cast_batch,
    empty_model,
    example_batch,
    optimizer_of,
    quantized,
)
from hf_zero.recipes.freezing import FreezingArguments, check_freezing, freeze_parameters
from hf_zero.recipes.loading import DTYPES, positions_of
from hf_zero.recipes.lora import AdapterArguments, QuantizationArguments, check_adapter, check_quantization
from hf_zero.recipes.parser import AUTO, option, refuse_less
from hf_zero.recipes.planned_run import OF_MICRO_BATCHES, PlannedRun, device_nbytes
from hf_zero.trainer import ZeroArgumentsMixin


POSITIONAL = ("model", "a hub id, a folder, or a config.json; weights are not needed")


@dataclass
class Arguments(AdapterArguments, QuantizationArguments, FreezingArguments, RunArguments, ZeroArgumentsMixin):
    """Keys of `plan`: settings of a run, under the names that tasks have for them."""

    num_processes: int = option(1, "How many ranks.")
    bf16: bool = option(False, "bf16 compute copy, fp32 masters.")
    fp16: bool = option(False, "Likewise in fp16.")
    dtype: str = option("float32", "The dtype that the weights are loaded in.")
    optim: str = option("adamw_torch_fused", "The optimizer.")
    max_length: str = option("1024", "Tokens of a sequence; auto: the most with which the run fits a device.")
    per_device_train_batch_size: int = option(8, "Sequences of a rank's micro-batch.")
    gradient_accumulation_steps: int = option(1, "Micro-batches of a step.")
    gradient_checkpointing: bool = option(False, "Blocks keep their inputs alone.")
    use_cpu: bool = option(False, "Ranks train on CPUs, not on a GPU each.")
    config: str | None = option(
        None,
        "In place of a model: the YAML file of a run, or a ready-made one; then all keys of its task may be given.",
    )
    ddp_timeout: int = option(1800, "Of no account here.")

    def __post_init__(self):
        length = str(self.max_length)
        if length != AUTO and not (length.isdecimal() and int(length)):
            raise ConfigError(f"--max_length {length}: expected 1 or more, or {AUTO}")
        refuse_less(self, per_device_train_batch_size=1, gradient_accumulation_steps=1, num_processes=1)
        super().__post_init__()
        if self.num_tokens is not None:
            raise ConfigError("--num_tokens: is for a run of --config; give --max_length")
        choose("dtype", self.dtype, DTYPES)
        self.num_processes = self.check_cluster(self.num_processes, on_cpu=self.use_cpu)
        self.use_cpu = self.use_cpu or self.is_on_cpu
        check_adapter(self)
        check_quantization(self, use_peft=self.use_peft)
        check_freezing(self, use_peft=self.use_peft)


def run(model: str, arguments: Arguments) -> None:
    """Prints the predicted memory of each rank, and which settings fit if the memory of a device is known; with
    `--gpu` the time of a step too. Raises [`HfZeroError`] when all is told, and nothing fits."""
    config, num_rows = arguments.zero_config(), arguments.per_device_train_batch_size
    accumulates = arguments.gradient_accumulation_steps > 1
    subject = quantized(empty_model(model, dtype=DTYPES[arguments.dtype]), arguments, config.compute_dtype)
    freeze_parameters(subject, arguments)
    with_adapter = adapted(subject, arguments, task_type=None)
    make_optimizer = optimizer_of(arguments.optim)

    def batch_of(num_tokens: int, num_rows: int) -> dict[str, Tensor]:
        return cast_batch(example_batch(subject, num_rows, num_tokens), config.compute_dtype)

    def of_length(num_tokens: int) -> PlannedRun:
        return PlannedRun(
            model,
            with_adapter,
            config,
            arguments.num_processes,
            batch_of(num_tokens, num_rows),
            make_optimizer,
            gradient_checkpointing=arguments.gradient_checkpointing,
            on_cpu=arguments.use_cpu,
            num_rows=num_rows,
            num_tokens=num_tokens,
            batch_of=partial(batch_of, num_tokens),
            resized=of_length,
            num_positions=positions_of(subject.config),
            has_8_bit_products=arguments.load_in_8bit,
            notes=[OF_MICRO_BATCHES] if accumulates else [],
            accumulates=accumulates,
        )

    takes_longest = arguments.max_length == AUTO
    planned_run = of_length(1 if takes_longest else int(arguments.max_length))
    _tell(replace(planned_run, takes_longest=takes_longest), arguments)


def run_config(argv: list[str]) -> None:
    """Prints the same for a command line with `--config`, whose other keys may be all those of the run."""
    from hf_zero.recipes.planned_tasks import planned, read_run  # with Trainer and what the task needs

    settings, own = read_run(argv, RunArguments)
    on_cpu, asked = settings.training["use_cpu"], settings.num_processes
    if asked is None or asked > 0:  # else it is refused below
        settings = replace(settings, num_processes=own.check_cluster(asked or 1, on_cpu=on_cpu))
    settings = replace(settings, training={**settings.training, "use_cpu": on_cpu or own.is_on_cpu})
    own.memory = settings.memory if own.memory is None else own.memory
    _tell(planned(settings, num_tokens=own.num_tokens), own)


def _tell(planned_run: PlannedRun, arguments: RunArguments) -> None:
    """Prints what a run takes, and which settings fit."""
    cluster = arguments.cluster(planned_run.dtype)
    memory = _memory_nbytes(arguments, on_cpu=planned_run.on_cpu)
    planned_run = replace(planned_run, ranks_per_host=arguments.gpus_per_host, memory_nbytes=memory)
    longest = planned_run.longest() if planned_run.takes_longest else None
    if longest is not None:
        planned_run = planned_run.of_length(longest.num_tokens)
    planned_run = replace(planned_run, cluster=cluster)
    prediction = planned_run.predict()
    predict = cache(planned_run.predict)
    remedy_of = partial(remedy, predict, prediction, memory, refuse=planned_run.refuse)
    if arguments.draw is not None and prediction.time is not None:
        planned_run.draw(arguments.draw)
    timed, fits = ("", True) if cluster is None else time_of(arguments, planned_run, prediction, remedy_of)
    if arguments.json:
        print(timed)
        _refuse_unfitting(fits)
        return
    print(_heading(planned_run, prediction))
    print(prediction.render())
    for note in [*planned_run.notes, *([longest.render()] if longest is not None else [])]:
        print(f"  {note}")
    if timed:
        print(timed)
    elif memory:
        switch = planned_run.gradient_checkpointing
        advice, found = advise(predict, planned_run.config, memory, gradient_checkpointing=switch), remedy_of()
        is_asked = found is not None and (found.fits or advice.best is None)  # one verdict: of the run as it is asked
        print(advice.render(found.render() if found is not None and is_asked else ""))
        fits = advice.best is not None or (found is not None and found.fits)
    _refuse_unfitting(fits)


def _refuse_unfitting(fits: bool) -> None:
    """Ends with another exit status where nothing fits, for scripts."""
    if not fits:
        raise HfZeroError("plan: nothing fits the memory of a device; what takes it stands above")


def _heading(planned_run: PlannedRun, prediction: Prediction) -> str:
    trained = prediction.num_trained / 1e6
    size = prediction.shard_size
    groups = f" in shard groups of {size}" if size < prediction.num_ranks else ""
    shared = prediction.config.sequence_parallel
    groups += f", sequences shared by {shared}" if shared > 1 else ""
    return (
        f"{planned_run.name}: {prediction.num_parameters / 1e6:,.1f} M parameters, {trained:,.1f} M trained, "
        f"{planned_run.num_rows} x {planned_run.num_tokens} tokens; "
        f"stage {prediction.config.stage} over {prediction.num_ranks} rank(s){groups}, each:"
    )


def _memory_nbytes(arguments: RunArguments, *, on_cpu: bool) -> int:
    """Returns the memory of one device; 0 where it is not known."""
    if arguments.memory is None and arguments.gpu is not None:
        return device_named(arguments.gpu).memory_nbytes
    return device_nbytes(arguments.memory, on_cpu=on_cpu)
