"""The tool `plan`: one process predicts the memory of each rank and the time of a step, without training.

It answers in seconds, so modules that only a run needs (Trainer, datasets, TRL) are not imported here.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_zero.checkpoint import class_of
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError
from hf_zero.planner import Prediction, Remedy, Table, Throughput, compare, device_named, remedy
from hf_zero.planner.search import GIB, USABLE_SHARE, usable
from hf_zero.planner.topology import RANKS_PER_HOST, Device
from hf_zero.recipes.lora import QuantizationArguments, TrainedArguments, check_quantization, check_trained
from hf_zero.recipes.models import DTYPES, Dtype, load_config, resolve_config
from hf_zero.recipes.parser import AUTO, option, parser_for, read_yaml, refuse_less, unknown_task_message
from hf_zero.recipes.plan_input import PlanInput, device_nbytes
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.task import Task
from hf_zero.recipes.tasks import TASKS
from hf_zero.trainer import ZeroArgumentsMixin


SIZES = (1, 2, 4, 8, 16, 32, 64)  # micro-batches that `--table` compares, in addition to the given one
POSITIONAL = (("model", "a hub id, a folder, or a config.json; weights are not needed"),)


@dataclass
class RunArguments:
    """Keys of `plan` that no task has."""

    config: str | None = option(
        None,
        "Instead of a model: the YAML file of a run, or a ready-made one. All keys of its task may be given.",
    )
    task: str | None = option(None, "Task of the YAML file, if it names none.")
    memory: float | None = option(
        None, "Memory of one device in GiB, for which settings are recommended. Default: that of this machine's GPU."
    )
    max_length: str | None = option(
        None, "Tokens per row; auto: as many as fit the device. Default: 1024, or those of the run."
    )
    num_tokens: int | None = option(None, "Tokens per row, instead of max_length; needed for tasks that generate.")
    gpu: str | None = option(
        None,
        "The device, to predict the time of a step: h100, h200, a100, b200, cpu, or a YAML file with "
        "the fields of hf_zero/planner/devices.yaml.",
    )
    hosts: int = option(1, "Number of hosts, over which num_processes ranks are divided; by default each has 8.")
    table: bool = option(
        False, "Compare all stages, shard groups, offloads and micro-batches, with and without checkpointing, by time."
    )
    json: bool = option(False, "Print JSON.")

    def __post_init__(self):
        refuse_less(self, num_tokens=1, hosts=1)
        if self.memory is not None and not 0 < self.memory < inf:
            raise ConfigError(f"memory {self.memory}: expected the GiB of one device")
        if self.max_length not in (None, AUTO) and not (self.max_length.isdecimal() and int(self.max_length)):
            raise ConfigError(f"--max_length {self.max_length}: expected 1 or more, or {AUTO}")
        if self.table and self.gpu is None:
            raise ConfigError("--table: compares the time of a step; add --gpu with the device")

    def place(self, num_processes: int, *, on_cpu: bool) -> tuple[Device | None, int, bool]:
        """Returns the device of `--gpu`, the number of ranks, and whether they train on CPUs. Raises [`ConfigError`]
        if the device is unknown, or the keys contradict each other."""
        device = None if self.gpu is None else device_named(self.gpu)
        if device is not None and on_cpu and not device.on_cpu:
            raise ConfigError("--gpu: decides where the ranks train; remove --use_cpu")
        on_cpu = on_cpu or (device is not None and device.on_cpu)
        most = RANKS_PER_HOST if device is None else device.gpus_per_host
        if num_processes == 1 and self.hosts > 1:
            num_processes = self.hosts * (1 if on_cpu else most)
        if num_processes % self.hosts:
            raise ConfigError(f"--num_processes {num_processes}: is not divisible by {self.hosts} hosts")
        if device is not None and num_processes // self.hosts > most:
            raise ConfigError(
                f"--num_processes {num_processes}: a host has {most} devices; give the number of hosts with --hosts"
            )
        return device, num_processes, on_cpu


@dataclass
class Arguments(TrainedArguments, QuantizationArguments, RunArguments, ZeroArgumentsMixin):
    """Keys of `plan`: settings of a run, under the names that tasks have for them."""

    num_processes: int = option(1, "Number of ranks.")
    bf16: bool = option(False, "Compute in bf16, with fp32 master weights.")
    fp16: bool = option(False, "Compute in fp16, with fp32 master weights.")
    dtype: Dtype = option("float32", "Dtype in which the weights are loaded.")
    optim: str = option("adamw_torch_fused", "Optimizer.")
    per_device_train_batch_size: int = option(8, "Sequences of a rank's micro-batch.")
    gradient_accumulation_steps: int = option(1, "Micro-batches of a step.")
    gradient_checkpointing: bool = option(False, "Recompute the activations of each block in backward.")
    use_cpu: bool = option(False, "Train on CPUs.")
    model_name_or_path: str = field(default="", init=False)  # the positional
    ddp_timeout: int = field(default=1800, init=False)  # a setting of ZeRO that does not affect a plan


class AnyModel(Task):
    """The task of `plan MODEL`: a model of the class that its config names, with its own loss."""

    name = "plan"

    def check_zero(self, config: ZeroConfig, training: Mapping[str, Any]) -> None:
        """Accepts everything, since the trainer is unknown."""

    def load_config(self, arguments: Arguments) -> PretrainedConfig:
        name = arguments.model_name_or_path
        if name.endswith((".yaml", ".yml")):
            raise ConfigError(f"model {name!r}: is a YAML file; to plan the run of a file, use --config {name}")
        return load_config(resolve_config(name, "model"))

    def empty_model(self, arguments: Arguments, config: PretrainedConfig) -> PreTrainedModel:
        kind = class_of(config)
        if kind is None:
            raise ConfigError(
                f"model {arguments.model_name_or_path!r}: its config names no class of transformers in "
                '`architectures`; add one, such as "architectures": ["LlamaForCausalLM"]'
            )
        return kind._from_config(config, dtype=DTYPES[arguments.dtype])

    def images(self, config: PretrainedConfig, num_rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {}

    def num_tokens(self, arguments: Arguments, training: Mapping[str, Any], config: PretrainedConfig) -> int:
        return int(arguments.max_length or 1024)


def run(model: str, arguments: Arguments) -> None:
    """Prints the predicted memory of each rank, and which settings fit if the memory of a device is known; with
    `--gpu` also the time of a step. Raises [`HfZeroError`] after printing if nothing fits."""
    if arguments.task is not None:
        raise ConfigError("--task: names the task of a file that --config names; leave it out")
    arguments.model_name_or_path = model
    training, num_processes = asdict(arguments), arguments.num_processes
    config = RunConfig(task=AnyModel.name, arguments=arguments, training=training, num_processes=num_processes)
    report(AnyModel(), config, arguments)


def run_config(argv: list[str]) -> None:
    """Does the same for a command line with `--config`, which may have all keys of the run."""
    config, own = read_run(argv)
    report(config.kind, config, own)


def read_run(argv: list[str]) -> tuple[RunConfig, RunArguments]:
    """Reads a command line with `--config`. Returns the configuration of the run, and the keys of `plan`."""
    values, rest = parser_for("plan", "", [RunArguments]).parse_known_args(argv)
    own = RunArguments(**vars(values))
    task = own.task or read_yaml(own.config or "").get("task")
    if task is None:
        raise ConfigError(f"--config {own.config}: names no task; add --task with one of {', '.join(sorted(TASKS))}")
    if task not in TASKS:
        raise ConfigError(unknown_task_message(str(task), TASKS))
    if own.max_length not in (None, AUTO):
        rest.append(f"--max_length={own.max_length}")
    return RunConfig.parse(task, [f"--config={own.config}", *rest], is_here=False), own


def report(task: Task, config: RunConfig, own: RunArguments) -> None:
    """Prints a prediction, and which settings fit. Raises [`HfZeroError`] if none fit."""
    arguments, training = config.arguments, SimpleNamespace(**config.training)
    refuse_less(config, num_processes=1)
    refuse_less(training, per_device_train_batch_size=1, gradient_accumulation_steps=1)
    device, num_ranks, on_cpu = own.place(config.num_processes or 1, on_cpu=training.use_cpu)
    config = replace(config, num_processes=num_ranks, training={**config.training, "use_cpu": on_cpu})
    task.check_plan(arguments)
    if not task.model_name(arguments):
        raise ConfigError("model_name_or_path: not set; name a folder, package:<name>/<folder> or a hub id")
    check_trained(arguments)
    if isinstance(arguments, QuantizationArguments):
        check_quantization(arguments)
    memory = device_nbytes(own.memory or (None if device is None else device.memory_gib), on_cpu=on_cpu)
    planned = PlanInput.of(
        task,
        config,
        num_tokens=own.num_tokens or (AUTO if own.max_length == AUTO else None),
        memory_nbytes=memory,
        device=device,
        num_hosts=own.hosts,
    )
    notes = planned.notes
    if planned.num_tokens is None:
        longest = planned.longest()
        planned, notes = replace(planned, num_tokens=longest.num_tokens), [*notes, longest.render()]
    predict, switch = cache(planned.predict), planned.gradient_checkpointing
    prediction = predict(config.zero, switch)
    if device is not None and prediction.time is None:
        raise ConfigError(f"--gpu {own.gpu}: {prediction.note}")
    throughput = None if device is None else planned.throughput(prediction, planned.shape[0])
    table = None
    if own.table:
        table = _by_speed(planned, prediction)
    elif memory and device is None and not own.json:
        table = compare(lambda *way: [predict(*way)], config.zero, memory, gradient_checkpointing=switch)
    best = None if table is None else table.best
    # flags that make the run fit
    fix = remedy(predict, prediction, memory) if memory and not (own.table and best) else None
    if own.json:
        print(json.dumps(_as_dict(prediction, planned, throughput, fix, table), indent=2))
    else:
        print(_heading(planned, prediction), prediction.render(), *(f"  {note}" for note in notes), sep="\n")
        verdict = "" if fix is None else fix.render()
        if throughput is not None:
            print(throughput.render())
        if table is not None:
            # one verdict: of the run as it is asked for, unless other settings fit
            print(table.render(verdict if fix is not None and (fix.fits or best is None) else ""))
        elif throughput is not None:
            print(verdict or f"it fits: tensors may take {USABLE_SHARE:.0%} of {memory / GIB:.1f} GiB")
            print("--table compares all stages, shard groups, offloads and micro-batches")
    is_too_large = table is not None or (memory and prediction.needed_nbytes > usable(memory))
    if best is None and (is_too_large if fix is None else not fix.fits):
        raise HfZeroError("plan: nothing fits the memory of a device; see above")


def _heading(planned: PlanInput, prediction: Prediction) -> str:
    name, (num_rows, num_tokens) = planned.task.model_name(planned.run.arguments), planned.shape
    size, shared = prediction.shard_size, prediction.config.sequence_parallel
    groups = f" in shard groups of {size}" if size < prediction.num_ranks else ""
    groups += f", sequences shared by {shared}" if shared > 1 else ""
    return (
        f"{name}: {prediction.num_parameters / 1e6:,.1f} M parameters, {prediction.num_trained / 1e6:,.1f} M trained, "
        f"{num_rows} x {num_tokens} tokens; "
        f"stage {prediction.config.stage} over {prediction.num_ranks} rank(s){groups}, each:"
    )


def _by_speed(planned: PlanInput, asked: Prediction) -> Table:
    """Compares the time of all ways to train, each with several micro-batches."""
    if planned.is_one_row:
        raise ConfigError("--table: packed rows (packing, padding_free) are not compared; leave --table out")

    sizes = sorted({*(size * planned.rows_of_one for size in SIZES), planned.num_rows})
    # shard groups of all ranks, of one host, and of the size asked for
    per_host, num_ranks = planned.predictor.host_size, asked.num_ranks
    own = [asked.shard_size] if asked.shard_size < num_ranks else []
    return compare(
        partial(planned.predict_rows, sizes),
        replace(asked.config, offload_dir=None),
        planned.predictor.memory_nbytes,
        by_speed=True,
        gradient_checkpointing=planned.gradient_checkpointing,
        shard_sizes=[None, *([per_host] if 1 < per_host < num_ranks else []), *own],
    )


def _as_dict(
    prediction: Prediction,
    planned: PlanInput,
    throughput: Throughput | None,
    fix: Remedy | None,
    table: Table | None,
) -> dict[str, Any]:
    """Returns all results for JSON."""
    found: dict[str, Any] = {} if throughput is None else {"device": throughput.cluster.device.name}
    found |= {"num_ranks": prediction.num_ranks, "max_length": planned.shape[1]}
    found["prediction"] = (prediction if throughput is None else throughput).as_dict()
    if fix is not None:
        found["remedy"] = {"flags": fix.text, "fits": fix.fits, "peak_nbytes": fix.after.needed_nbytes}
    if table is not None:
        found["ways"] = [{**way.as_dict(), "fits": table.fits(way)} for way in table.rows]
        found["left_out"] = [
            {
                **{name: getattr(each.config, name) for name in ("stage", "offload", "shard_size")},
                **{"gradient_checkpointing": each.gradient_checkpointing, "reason": each.reason},
            }
            for each in table.refused
        ]
        found["recommended"] = table.best.as_dict() if table.best else None
        found["verdict"] = table.verdict()
    return found
