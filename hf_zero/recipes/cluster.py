"""Keys of `plan` about the devices and hosts of a run, and what it prints about time."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.planner.advice import GIB, USABLE_SHARE
from hf_zero.planner.lone_rank import RANKS_PER_HOST
from hf_zero.planner.prediction import Prediction, predict_rows
from hf_zero.planner.throughput import Ranking, Throughput, rank_ways
from hf_zero.planner.topology import Cluster, device_named


# Micro-batches that are compared, beside the one that is asked for.
SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class ClusterArguments:
    """Keys of `plan` for the time of a step."""

    gpu: str | None = field(
        default=None,
        metadata={
            "help": "The device, to predict the time of a step: h100, h200, a100, b200, or a YAML file with "
            "the fields of hf_zero/planner/devices.yaml."
        },
    )
    hosts: int = field(default=1, metadata={"help": "How many hosts."})
    gpus_per_host: int | None = field(
        default=None, metadata={"help": "How many devices of each host; together they give the number of ranks."}
    )
    utilization: float | None = field(
        default=None, metadata={"help": "Share of the peak that matrix products reach, in place of the device's own."}
    )
    table: bool = field(
        default=False,
        metadata={"help": "Compare all stages, offloads and micro-batches, with and without checkpointing, by time."},
    )
    json: bool = field(default=False, metadata={"help": "Print JSON, with --gpu."})

    def check_cluster(self, num_processes: int) -> int:
        """Returns the number of ranks that these keys and `--num_processes` mean.

        Raises:
            ConfigError: a value is not valid, or they contradict each other.
        """
        for key in ("hosts", "gpus_per_host"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"--{key} {value}: expected 1 or more")
        if self.gpu is not None and getattr(self, "use_cpu", False):
            raise ConfigError("--gpu: says where the ranks train; leave --use_cpu out")
        if self.gpu is None:
            for key in ("table", "json", "utilization"):
                if getattr(self, key):
                    raise ConfigError(f"--{key}: says something about time; add --gpu with the device")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise ConfigError(f"--utilization {self.utilization}: expected a share, above 0 and at most 1")
        if self.gpus_per_host is None:
            if num_processes % self.hosts and num_processes != 1:
                raise ConfigError(f"--num_processes {num_processes}: {self.hosts} hosts have equally many each")
            self.gpus_per_host = max(1, num_processes // self.hosts)
            if self.gpu is not None and self.gpus_per_host > RANKS_PER_HOST:
                raise ConfigError(
                    f"--num_processes {num_processes}: are {self.gpus_per_host} on a host; say with --hosts, or "
                    "--gpus_per_host, how many hosts there are"
                )
        num_ranks = self.hosts * self.gpus_per_host
        if num_processes not in (1, num_ranks):
            raise ConfigError(
                f"--num_processes {num_processes}: {self.hosts} hosts of {self.gpus_per_host} are {num_ranks} ranks; "
                "leave one of them out"
            )
        return num_ranks

    def cluster(self, dtype: torch.dtype) -> Cluster | None:
        """The hosts and devices; `None` without `--gpu`.

        Raises:
            ConfigError: there is no such device.
        """
        if self.gpu is None:
            return None
        device = device_named(self.gpu)
        if self.utilization is not None:
            device = replace(device, utilization=self.utilization)
        assert self.gpus_per_host is not None
        return Cluster(device, self.hosts, self.gpus_per_host, dtype)


def time_of(
    arguments: Any,
    model: torch.nn.Module,
    prediction: Prediction,
    batch_of: Callable[[int], dict[str, Tensor]],
    *,
    cluster: Cluster,
    **settings,
) -> str:
    """Returns what to print of the time of a step; with `--table` of all ways to train, and which one to take.

    Args:
        arguments: of `plan`.
        model (`nn.Module`): not sharded.
        prediction (`Prediction`): as it was asked for.
        batch_of (`Callable`): makes a batch of so many rows.
        cluster (`Cluster`): where it runs.
        settings: further arguments of `predict_rows`.

    Raises:
        ConfigError: nothing is known of the time.
    """
    _refuse_unknown(arguments, prediction)
    memory = cluster.device.memory_nbytes if arguments.memory is None else int(arguments.memory * GIB)
    size, switch = arguments.per_device_train_batch_size, arguments.gradient_checkpointing
    throughput, ranking = _throughput(prediction, cluster, batch_of(size)), None
    if arguments.table:

        def predict_sizes(way: ZeroConfig, switch: bool) -> list[Throughput]:
            sizes = sorted({*SIZES, size})
            found = predict_rows(
                model, way, batch_of, sizes, cluster=cluster, gradient_checkpointing=switch, **settings
            )
            return [_throughput(each, cluster, batch_of(rows)) for rows, each in zip(sizes, found)]

        ranking = rank_ways(
            predict_sizes, prediction.config, memory, gradient_checkpointing=switch, watch=_with_progress
        )
    if arguments.json:
        return json_of(throughput, ranking)
    if ranking is not None:
        return f"{throughput.render()}\n{ranking.render()}"
    fits = "fits" if throughput.fits(memory) else "does not fit"
    hint = "--table compares all stages, offloads and micro-batches"
    usable = f"{USABLE_SHARE:.0%} of {memory / GIB:.1f} GiB, which tensors may take"
    return f"{throughput.render()}\nit {fits} into {usable}; {hint}"


def _refuse_unknown(arguments: Any, prediction: Prediction) -> None:
    """Refuses a run of whose time nothing is known."""
    if prediction.config.shard_size is not None:
        raise ConfigError("--gpu: the time of shards over groups of ranks is not modeled; leave --zero_shard_size out")
    if prediction.config.gather_dtype is not None:
        raise ConfigError("--gpu: the time of gathers in 8 bits is not modeled; leave --zero_gather_dtype out")
    if arguments.load_in_8bit:
        raise ConfigError("--gpu: the time of products in 8 bits is not modeled; leave --load_in_8bit out")
    if prediction.time is None:
        raise ConfigError(f"--gpu {arguments.gpu}: {prediction.note}")


def _with_progress(ways: list) -> Iterable:
    return tqdm(ways, desc="ways", unit="way", leave=False, disable=None)  # on terminals alone


def _throughput(prediction: Prediction, cluster: Cluster, batch: dict[str, Tensor]) -> Throughput:
    num_rows = len(next(iter(batch.values())))
    has_tokens = "input_ids" in batch
    num_items = batch["input_ids"].numel() if has_tokens else num_rows
    return Throughput(prediction, cluster, num_rows, num_items, "tokens" if has_tokens else "rows")


def json_of(throughput: Throughput, ranking: Ranking | None) -> str:
    """Returns what was predicted as JSON."""
    found: dict[str, Any] = {"device": throughput.cluster.device.name, "num_ranks": throughput.cluster.num_ranks}
    found["prediction"] = throughput.as_dict()
    if ranking is not None:
        found["ways"] = [{**way.as_dict(), "fits": way.fits(ranking.memory_nbytes)} for way in ranking.ways]
        found["recommended"] = ranking.best.as_dict() if ranking.best else None
        found["verdict"] = ranking.verdict()
    return json.dumps(found, indent=2)
