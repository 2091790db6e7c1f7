"""Keys of `plan` about the devices and hosts of a run, and what it prints about time."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tqdm import tqdm

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.planner.advice import GIB, USABLE_SHARE, Grouping
from hf_zero.planner.drawing import check_drawing
from hf_zero.planner.prediction import Prediction
from hf_zero.planner.remedies import Remedy
from hf_zero.planner.throughput import Ranking, Throughput, rank_ways
from hf_zero.planner.topology import RANKS_PER_HOST, Cluster, device_named
from hf_zero.recipes.parser import check_memory, option, refuse_less
from hf_zero.recipes.planned_run import PlannedRun


# Micro-batches that are compared, beside the one that is asked for.
SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class RunArguments:
    """Keys of `plan` that no task has."""

    memory: float | None = option(None, "GiB that one device has, to find what fits; by default this machine's GPU's.")
    num_tokens: int | None = option(
        None, "With --config: tokens of a row, in place of max_length, or where prompts decide it."
    )
    gpu: str | None = option(
        None,
        "The device, to predict the time of a step: h100, h200, a100, b200, cpu, or a YAML file with "
        "the fields of hf_zero/planner/devices.yaml.",
    )
    hosts: int = option(1, "How many hosts; several have 8 devices each, unless something else is said.")
    gpus_per_host: int | None = option(None, "How many ranks of each host; together they give the number of ranks.")
    utilization: float | None = option(
        None, "Share of the peak that matrix products reach, in place of the device's own."
    )
    table: bool = option(
        False, "Compare all stages, shard groups, offloads and micro-batches, with and without checkpointing, by time."
    )
    json: bool = option(False, "Print JSON, with --gpu.")
    draw: str | None = option(
        None, "With --gpu: an SVG, PNG or PDF file, in which is drawn what each stream of a device does in a step."
    )

    def __post_init__(self):
        check_memory(self.memory)
        refuse_less(self, num_tokens=1, hosts=1, gpus_per_host=1)
        if self.gpu is None:
            for key in ("table", "json", "utilization", "draw"):
                if getattr(self, key):
                    raise ConfigError(f"--{key}: says something about time; add --gpu with the device")
        if self.draw is not None:
            check_drawing(self.draw, "--draw")
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
    arguments: RunArguments,
    run: PlannedRun,
    prediction: Prediction,
    remedy_of: Callable[[], Remedy | None],
) -> tuple[str, bool]:
    """Returns what to print of the time of a step; with `--table` of all ways to train, and which one to take. Where
    none of these fits the memory of a device, and without a table, the flags that make the run fit follow, which
    `remedy_of` finds. And returns whether anything fits. Raises [`ConfigError`] where nothing is known of the time."""
    if run.has_8_bit_products:
        raise ConfigError("--gpu: the time of products in 8 bits is not modeled; leave --load_in_8bit out")
    if prediction.time is None:
        raise ConfigError(f"--gpu {arguments.gpu}: {prediction.note}")
    throughput, ranking = _throughput(prediction, run, run.num_rows), None
    if arguments.table:
        ranking = _ranking(run, prediction)
    found = remedy_of() if ranking is None or ranking.best is None else None
    fits = found is None or found.fits
    if arguments.json:
        return json_of(throughput, ranking, found, run.num_tokens), fits
    if ranking is not None:
        return f"{throughput.render()}\n{ranking.render('' if found is None else found.render())}", fits
    usable = f"{USABLE_SHARE:.0%} of {run.memory_nbytes / GIB:.1f} GiB, which tensors may take"
    verdict = f"it fits into {usable}" if found is None else found.render()
    hint = "--table compares all stages, shard groups, offloads and micro-batches"
    return "\n".join([throughput.render(), verdict, hint]), fits


def _ranking(run: PlannedRun, asked: Prediction) -> Ranking:
    """Ranks all ways to train, each with the micro-batches that are compared."""
    if run.batch_of is None:
        raise ConfigError(
            "--table: rows that lie one behind the other (packing, padding_free) are not compared by how many there "
            "are; leave --table out"
        )

    def predict_sizes(way: ZeroConfig, switch: bool) -> list[Throughput]:
        sizes = sorted({*(size * run.rows_of_one for size in SIZES), run.num_rows})
        found = run.predict_rows(sizes, way, switch)
        if (unknown := next((each for each in found if each.time is None), None)) is not None:
            raise UnsupportedError(unknown.note)
        return [_throughput(each, run, rows) for rows, each in zip(sizes, found)]

    def watch(ways: list) -> Iterable:
        return tqdm(ways, desc="ways", unit="way", leave=False, disable=None)  # on terminals alone

    return rank_ways(
        predict_sizes,
        asked.config,
        run.memory_nbytes,
        gradient_checkpointing=run.gradient_checkpointing,
        groupings=_groupings(run.cluster, asked),
        states_nbytes=cache(run.states_nbytes),
        watch=watch,
    )


def _groupings(cluster: Cluster | None, asked: Prediction) -> list[Grouping]:
    """Returns the shard groups that are compared with those that a run was asked for: all ranks, those of one host,
    and all with a second copy on each host."""
    assert cluster is not None
    all_ranks, own = Grouping(None), Grouping(asked.config.shard_size, asked.config.secondary_shard)
    if own.shard_size == "auto":
        own = all_ranks if asked.shard_size == asked.num_ranks else Grouping(asked.shard_size)
    between_hosts = [Grouping(cluster.gpus_per_host), Grouping(None, True)]
    return [all_ranks, *(between_hosts if 1 < cluster.gpus_per_host < asked.num_ranks else []), own]


def _throughput(prediction: Prediction, run: PlannedRun, num_rows: int) -> Throughput:
    assert run.cluster is not None and run.batch is not None
    has_tokens = "input_ids" in run.batch
    of_group = num_rows * (run.batch["input_ids"].shape[1] if has_tokens else 1)
    num_items = of_group // prediction.config.sequence_parallel
    unit = "tokens" if has_tokens else "rows"
    return Throughput(prediction, run.cluster, num_rows // run.rows_of_one, num_items, unit)


def json_of(throughput: Throughput, ranking: Ranking | None, remedy: Remedy | None, num_tokens: int) -> str:
    """Returns what was predicted, of rows of so many tokens, and the flags that make it fit, as JSON."""
    found: dict[str, Any] = {"device": throughput.cluster.device.name, "num_ranks": throughput.cluster.num_ranks}
    found["max_length"] = num_tokens
    found["prediction"] = throughput.as_dict()
    if remedy is not None:
        peak = remedy.after.needed_nbytes
        found["remedy"] = {"flags": remedy.text, "fits": remedy.fits, "peak_nbytes": peak}
    if ranking is not None:
        found["ways"] = [{**way.as_dict(), "fits": way.fits(ranking.memory_nbytes)} for way in ranking.ways]
        found["left_out"] = [
            {
                "stage": each.config.stage,
                "offload": each.config.offload,
                "shard_size": each.config.shard_size,
                "secondary_shard": each.config.secondary_shard,
                "gradient_checkpointing": each.gradient_checkpointing,
                "reason": each.reason,
            }
            for each in ranking.refused
        ]
        found["without_room"] = [{"states_nbytes": nbytes} for nbytes in ranking.without_room]
        found["recommended"] = ranking.best.as_dict() if ranking.best else None
        found["verdict"] = ranking.verdict()
    return json.dumps(found, indent=2)
