"""The tool `plan`: one process predicts the memory of each rank and the time of a step, and trains nothing.

It answers in seconds, so what only a run needs (Trainer, data sets, TRL) is not imported here; a test says so.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from hf_zero.checkpoint import class_of
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError, UnsupportedError
from hf_zero.planner import Cluster, Prediction, Ranking, Remedy, Throughput, advise, device_named, rank_ways, remedy
from hf_zero.planner.advice import GIB, USABLE_SHARE
from hf_zero.planner.topology import RANKS_PER_HOST
from hf_zero.recipes.loading import DTYPES, Dtype, one_line, quiet, resolve_config
from hf_zero.recipes.lora import AdapterArguments, FreezingArguments, QuantizationArguments
from hf_zero.recipes.parser import (
    AUTO,
    check_memory,
    given_of,
    option,
    parser_for,
    read_yaml,
    refuse_less,
    unknown_task_message,
    without,
)
from hf_zero.recipes.plan_input import PlanInput, device_nbytes
from hf_zero.recipes.task import Task
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroArgumentsMixin


# Micro-batches that are compared, beside the one that is asked for.
SIZES = (1, 2, 4, 8, 16, 32, 64)
POSITIONAL = (("model", "a hub id, a folder, or a config.json; weights are not needed"),)


@dataclass
class RunArguments:
    """Keys of `plan` that no task has."""

    memory: float | None = option(
        None, "Memory of one device in GiB, to find settings that fit. Default: that of this machine's GPU."
    )
    num_tokens: int | None = option(
        None, "With --config: tokens of a row, instead of max_length, or where the prompts decide it."
    )
    gpu: str | None = option(
        None,
        "The device, to predict the time of a step: h100, h200, a100, b200, cpu, or a YAML file with "
        "the fields of hf_zero/planner/devices.yaml.",
    )
    hosts: int = option(1, "Number of hosts, each with 8 devices by default.")
    gpus_per_host: int | None = option(None, "Number of ranks on each host.")
    utilization: float | None = option(
        None, "Share of the peak that matrix products reach. Default: that of the device."
    )
    table: bool = option(
        False, "Compare all stages, shard groups, offloads and micro-batches, with and without checkpointing, by time."
    )
    json: bool = option(False, "Print JSON.")

    def __post_init__(self):
        check_memory(self.memory)
        refuse_less(self, num_tokens=1, hosts=1, gpus_per_host=1)
        if self.gpu is None:
            for key in ("table", "utilization"):
                if getattr(self, key):
                    raise ConfigError(f"--{key}: says something about time; add --gpu with the device")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise ConfigError(f"--utilization {self.utilization}: expected a share, above 0 and at most 1")

    def check_cluster(self, num_processes: int, *, on_cpu: bool) -> int:
        """Returns the number of ranks that these keys and `--num_processes` mean, of which 1 says nothing. Raises
        [`ConfigError`] where they contradict each other."""
        device = None if self.gpu is None else device_named(self.gpu)
        if device is not None and on_cpu and not device.on_cpu:
            raise ConfigError("--gpu: says where the ranks train; leave --use_cpu out")
        if self.gpus_per_host is None and (self.hosts > 1 or device is not None):
            if num_processes % self.hosts and num_processes != 1:
                raise ConfigError(f"--num_processes {num_processes}: {self.hosts} hosts have equally many each")
            self.gpus_per_host = max(1, num_processes // self.hosts)
            if num_processes == 1 and self.hosts > 1 and not on_cpu:
                self.gpus_per_host = RANKS_PER_HOST if device is None else device.gpus_per_host
            elif device is not None and self.gpus_per_host > device.gpus_per_host:
                raise ConfigError(
                    f"--num_processes {num_processes}: are {self.gpus_per_host} on a host; say with --hosts, or "
                    "--gpus_per_host, how many hosts there are"
                )
        if self.gpus_per_host is None:
            return num_processes
        num_ranks = self.hosts * self.gpus_per_host
        if num_processes not in (1, num_ranks):
            raise ConfigError(
                f"--num_processes {num_processes}: {self.hosts} hosts of {self.gpus_per_host} are {num_ranks} ranks; "
                "leave one of them out"
            )
        return num_ranks

    @property
    def is_on_cpu(self) -> bool:
        """Whether `--gpu` names a processor."""
        return self.gpu is not None and device_named(self.gpu).on_cpu

    def cluster(self, dtype: torch.dtype) -> Cluster | None:
        """The hosts and devices; `None` without `--gpu`. Raises [`ConfigError`] where there is no such device."""
        if self.gpu is None:
            return None
        device = device_named(self.gpu)
        if self.utilization is not None:
            device = replace(device, utilization=self.utilization)
        assert self.gpus_per_host is not None
        return Cluster(device, self.hosts, self.gpus_per_host, dtype)


def time_of(
    arguments: RunArguments, run: PlanInput, prediction: Prediction, remedy_of: Callable[[], Remedy | None]
) -> tuple[str, bool]:
    """Returns what to print of the time of a step; with `--table` of all ways to train, and which one to take. Where
    none of these fits the memory of a device, and without a table, the flags that make the run fit follow, which
    `remedy_of` finds. And returns whether anything fits. Raises [`ConfigError`] where nothing is known of the time."""
    if run.has_8_bit_products:
        raise ConfigError("--gpu: the time of products in 8 bits is not modeled; leave --load_in_8bit out")
    if prediction.time is None:
        raise ConfigError(f"--gpu {arguments.gpu}: {prediction.note}")
    throughput = _throughput(prediction, run, run.shape[0])
    ranking = _ranking(run, prediction) if arguments.table else None
    found = remedy_of() if ranking is None or ranking.best is None else None
    fits = found is None or found.fits
    if arguments.json:
        device = {"device": throughput.cluster.device.name}
        return json.dumps(
            {**device, **facts_of(prediction, run, throughput.as_dict(), found, ranking)}, indent=2
        ), fits
    if ranking is not None:
        return f"{throughput.render()}\n{ranking.render('' if found is None else found.render())}", fits
    usable = f"{USABLE_SHARE:.0%} of {run.memory_nbytes / GIB:.1f} GiB, which tensors may take"
    verdict = f"it fits into {usable}" if found is None else found.render()
    hint = "--table compares all stages, shard groups, offloads and micro-batches"
    return "\n".join([throughput.render(), verdict, hint]), fits


def _ranking(run: PlanInput, asked: Prediction) -> Ranking:
    """Ranks all ways to train, each with the micro-batches that are compared."""
    if run.subject.is_one_row:
        raise ConfigError(
            "--table: rows that lie one behind the other (packing, padding_free) are not compared by how many there "
            "are; leave --table out"
        )

    def predict_sizes(way: ZeroConfig, switch: bool) -> list[Throughput]:
        sizes = sorted({*(size * run.rows_of_one for size in SIZES), run.subject.num_rows})
        found = run.predict_rows(sizes, way, switch)
        if (unknown := next((each for each in found if each.time is None), None)) is not None:
            raise UnsupportedError(unknown.note)
        return [_throughput(each, run, rows) for rows, each in zip(sizes, found)]

    return rank_ways(
        predict_sizes,
        asked.config,
        run.memory_nbytes,
        gradient_checkpointing=run.gradient_checkpointing,
        shard_sizes=_shard_sizes(run.cluster, asked),
        states_nbytes=cache(run.states_nbytes),
        watch=partial(tqdm, desc="ways", unit="way", leave=False, disable=None),  # on terminals alone
    )


def _shard_sizes(cluster: Cluster | None, asked: Prediction) -> list[int | str | None]:
    """Returns the sizes of shard groups to compare: all ranks, those of one host, the size asked for."""
    assert cluster is not None
    own = asked.config.shard_size
    if own == "auto":
        own = None if asked.shard_size == asked.num_ranks else asked.shard_size
    of_a_host = [cluster.gpus_per_host] if 1 < cluster.gpus_per_host < asked.num_ranks else []
    return [None, *of_a_host, own]


def _throughput(prediction: Prediction, run: PlanInput, num_rows: int) -> Throughput:
    assert run.cluster is not None and run.batch is not None
    has_tokens = "input_ids" in run.batch
    of_group = num_rows * (run.batch["input_ids"].shape[1] if has_tokens else 1)
    num_items = of_group // prediction.config.sequence_parallel
    unit = "tokens" if has_tokens else "rows"
    return Throughput(prediction, run.cluster, num_rows // run.rows_of_one, num_items, unit)


def facts_of(
    prediction: Prediction,
    run: PlanInput,
    predicted: dict[str, Any],
    remedy: Remedy | None,
    ranking: Ranking | None = None,
) -> dict[str, Any]:
    """Returns what was predicted and the flags that make it fit, for JSON."""
    found: dict[str, Any] = {"num_ranks": prediction.num_ranks, "max_length": run.shape[1], "prediction": predicted}
    if remedy is not None:
        peak = remedy.after.needed_nbytes
        found["remedy"] = {"flags": remedy.text, "fits": remedy.fits, "peak_nbytes": peak}
    if ranking is not None:
        found["ways"] = [{**way.as_dict(), "fits": way.fits(ranking.memory_nbytes)} for way in ranking.ways]
        of_config = ("stage", "offload", "shard_size")
        found["left_out"] = [
            {name: getattr(each.config, name) for name in of_config}
            | {"gradient_checkpointing": each.gradient_checkpointing, "reason": each.reason}
            for each in ranking.refused
        ]
        found["without_room"] = [{"states_nbytes": nbytes} for nbytes in ranking.without_room]
        found["recommended"] = ranking.best.as_dict() if ranking.best else None
        found["verdict"] = ranking.verdict()
    return found


@dataclass
class Arguments(AdapterArguments, QuantizationArguments, FreezingArguments, RunArguments, ZeroArgumentsMixin):
    """Keys of `plan`: settings of a run, under the names that tasks have for them."""

    num_processes: int = option(1, "Number of ranks.")
    bf16: bool = option(False, "Compute in bf16, with fp32 master weights.")
    fp16: bool = option(False, "Compute in fp16, with fp32 master weights.")
    dtype: Dtype = option("float32", "Dtype in which the weights are loaded.")
    optim: str = option("adamw_torch_fused", "Optimizer.")
    max_length: str = option("1024", "Tokens of a sequence; auto: the longest with which the run fits a device.")
    per_device_train_batch_size: int = option(8, "Sequences of a rank's micro-batch.")
    gradient_accumulation_steps: int = option(1, "Micro-batches of a step.")
    gradient_checkpointing: bool = option(False, "Recompute the activations of each block in backward.")
    use_cpu: bool = option(False, "Train on CPUs.")
    config: str | None = option(
        None,
        "In place of a model: the YAML file of a run, or a ready-made one; then all keys of its task may be given.",
    )
    ddp_timeout: int = option(1800, "Has no effect on a plan.")

    def __post_init__(self):
        length = str(self.max_length)
        if length != AUTO and not (length.isdecimal() and int(length)):
            raise ConfigError(f"--max_length {length}: expected 1 or more, or {AUTO}")
        refuse_less(self, per_device_train_batch_size=1, gradient_accumulation_steps=1, num_processes=1)
        super().__post_init__()
        if self.num_tokens is not None:
            raise ConfigError("--num_tokens: is for a run of --config; give --max_length")
        self.num_processes = self.check_cluster(self.num_processes, on_cpu=self.use_cpu)
        self.use_cpu = self.use_cpu or self.is_on_cpu


class AnyModel(Task):
    """The task of `plan MODEL`: a model of the class that its config names, with its own loss."""

    name = "plan"
    sums_tokens = True

    def __init__(self, model: str):
        self._model = model

    def check_zero(self, config: ZeroConfig, training: Mapping[str, Any]) -> None:
        """Refuses nothing: what a trainer would refuse is not known."""

    def model_name(self, arguments: Arguments) -> str:
        return self._model

    def load_config(self, arguments: Arguments) -> PretrainedConfig:
        if self._model.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"model {self._model!r}: is a YAML file, as of a run; plan that with --config {self._model}"
            )
        source = resolve_config(self._model, "model")
        with one_line(self._model, "reading its config"), quiet():
            return AutoConfig.from_pretrained(source)

    def empty_model(self, arguments: Arguments, config: PretrainedConfig) -> PreTrainedModel:
        kind = class_of(config)
        if kind is None:
            raise ConfigError(
                f"model {self._model!r}: its config names no class of transformers in `architectures`; add one, such "
                'as "architectures": ["LlamaForCausalLM"]'
            )
        return kind._from_config(config, dtype=DTYPES[arguments.dtype])

    def images(self, config: PretrainedConfig, num_rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {}


def run(model: str, arguments: Arguments) -> None:
    """Prints the predicted memory of each rank, and which settings fit if the memory of a device is known; with
    `--gpu` the time of a step too. Raises [`HfZeroError`] if nothing fits, when all is printed."""
    asked = SimpleNamespace(arguments=arguments, training=vars(arguments), num_processes=arguments.num_processes)
    _tell(PlanInput.of(AnyModel(model), asked, num_tokens=arguments.max_length), arguments)


def run_config(argv: list[str]) -> None:
    """Prints the same for a command line with `--config`, whose other keys may be all those of the run."""
    settings, own, takes_longest = read_run(argv)
    on_cpu, asked = settings.training["use_cpu"], settings.num_processes
    if asked is None or asked > 0:  # else it is refused below
        settings = replace(settings, num_processes=own.check_cluster(asked or 1, on_cpu=on_cpu))
    settings = replace(settings, training={**settings.training, "use_cpu": on_cpu or own.is_on_cpu})
    _tell(PlanInput.of(settings.kind, settings, num_tokens=own.num_tokens or (AUTO if takes_longest else None)), own)


def read_run(argv: list[str]) -> tuple[Any, RunArguments, bool]:
    """Reads a command line with `--config`. Returns the settings of the run, the keys of `plan`, and whether
    `max_length` is auto, which is no value of a run."""
    from hf_zero.recipes.run_config import RunConfig  # with Trainer and what the task needs

    given = given_of(argv, "config", "task", "max_length")
    if not given["config"]:
        raise ConfigError("--config: expected a YAML file, or the name of a ready-made one")
    task = given["task"] or read_yaml(given["config"]).get("task")
    if task is None:
        raise ConfigError(
            f"--config {given['config']}: names no task; add --task with one of {', '.join(sorted(TASKS))}"
        )
    if task not in TASKS:
        raise ConfigError(unknown_task_message(str(task), TASKS))
    values, rest = parser_for("plan", "", [RunArguments]).parse_known_args(argv)
    takes_longest = given["max_length"] == AUTO
    if takes_longest:
        rest = without(rest, "max_length")
    return RunConfig.parse(task, rest, is_here=False), RunArguments(**vars(values)), takes_longest


def _tell(planned: PlanInput, arguments: RunArguments) -> None:
    """Prints what a run takes, and which settings fit."""
    cluster = arguments.cluster(planned.dtype)
    if arguments.memory is None and arguments.gpu is not None:
        memory = device_named(arguments.gpu).memory_nbytes
    else:
        memory = device_nbytes(arguments.memory, on_cpu=planned.subject.on_cpu)
    planned = replace(planned, ranks_per_host=arguments.gpus_per_host, memory_nbytes=memory)
    longest = planned.longest() if planned.subject.num_tokens is None else None
    if longest is not None:
        planned = planned.with_tokens(longest.num_tokens)
    planned = replace(planned, cluster=cluster)
    prediction = planned.predict()
    predict = cache(planned.predict)
    remedy_of = partial(remedy, predict, prediction, memory, refuse=planned.refuse)
    timed, fits = ("", True) if cluster is None else time_of(arguments, planned, prediction, remedy_of)
    if not arguments.json:
        print(_heading(planned, prediction))
        print(prediction.render())
        for note in [*planned.subject.notes, *([longest.render()] if longest is not None else [])]:
            print(f"  {note}")
    if timed:
        print(timed)
    elif arguments.json:
        found = remedy_of() if memory else None
        fits = found is None or found.fits
        print(json.dumps(facts_of(prediction, planned, prediction.as_dict(), found), indent=2))
    elif memory:
        switch = planned.gradient_checkpointing
        advice, found = advise(predict, planned.config, memory, gradient_checkpointing=switch), remedy_of()
        is_asked = found is not None and (found.fits or advice.best is None)  # one verdict: of the run as it is asked
        print(advice.render(found.render() if found is not None and is_asked else ""))
        fits = advice.best is not None or (found is not None and found.fits)
    if not fits:  # scripts see it by the exit status
        raise HfZeroError("plan: nothing fits the memory of a device; what takes it stands above")


def _heading(planned: PlanInput, prediction: Prediction) -> str:
    trained = prediction.num_trained / 1e6
    size, (num_rows, num_tokens) = prediction.shard_size, planned.shape
    groups = f" in shard groups of {size}" if size < prediction.num_ranks else ""
    shared = prediction.config.sequence_parallel
    groups += f", sequences shared by {shared}" if shared > 1 else ""
    return (
        f"{planned.name}: {prediction.num_parameters / 1e6:,.1f} M parameters, {trained:,.1f} M trained, "
        f"{num_rows} x {num_tokens} tokens; "
        f"stage {prediction.config.stage} over {prediction.num_ranks} rank(s){groups}, each:"
    )
