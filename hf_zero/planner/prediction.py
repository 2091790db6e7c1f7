"""Predicts memory by tensor class, communication and disk space of a run from the shapes of its model.

[Note: deep models] If all blocks are identical, a few of them determine the numbers for any depth. Each predicted
number is an affine function of the number of blocks: at any named moment of a step, such as the end of the second
block's backward, every further block adds the same amount. A peak is not affine, because it is the maximum over
several moments. The moments are therefore extrapolated separately, and their maximum is taken.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from hf_zero.comm.groups import fitting_size
from hf_zero.config import MemoryTier, ZeroConfig
from hf_zero.engine.away import class_of
from hf_zero.engine.memory import states_fit
from hf_zero.engine.opaque import num_weights
from hf_zero.engine.partition import UnitSpec, partition
from hf_zero.errors import HfZeroError
from hf_zero.planner.classes import (
    TensorClass,
    checkpoint_nbytes,
    reference_classes,
    render_classes,
    tensor_classes,
)
from hf_zero.planner.simulated_step import SimulatedRun, SimulatedStep, StepMemory
from hf_zero.planner.timeline import Event, StepTime, played
from hf_zero.planner.topology import Cluster
from hf_zero.storage import NUM_BUFFERS, WINDOW_NUMEL


# Models with at most this many blocks are simulated in full.
MAX_WHOLE = 12
# Alternating blocks, such as those with sliding-window attention, have a period of two.
PERIOD = 2
# Other micro-batch sizes are extrapolated from these two, one row apart. A single row would have ambiguous strides.
SAMPLE_ROWS = (2, 3)
# The path of the list of blocks, and the number of blocks to simulate. `None`: the full model.
Blocks = tuple[str, int] | None
WITHOUT_BATCH = "activations and traffic: no batch was given"
IN_8_BITS = "activations and traffic: products with 8-bit weights are not modeled"


@dataclass(frozen=True)
class Prediction:
    """The memory and communication of one rank. They are the same for all ranks."""

    config: ZeroConfig
    num_ranks: int
    gradient_checkpointing: bool
    num_parameters: int  # of the model; tied parameters count once
    num_trained: int  # the trainable part
    classes: list[TensorClass]  # tensors that exist between uses or are reused
    # size of a checkpoint on disk with the optimizer state, over all ranks; without the base model of adapters
    checkpoint_nbytes: int
    step: StepMemory | None = None  # memory of a step; None if not known
    note: str = ""  # what is not known, and why
    time: StepTime | None = None  # time of a step; None without a cluster
    # events of a step of a model with few blocks; empty once `time` is set
    events: list[Event] = field(default_factory=list, repr=False)
    shard_size: int = 1  # number of ranks in a shard group

    @property
    def resting_nbytes(self) -> int:
        """Memory on the device between backward and optimizer step."""
        return self._on(MemoryTier.DEVICE) if self.step is None else self.step.resting_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Memory on the device between two steps, and throughout the forward."""
        return self.resting_nbytes if self.step is None else self.step.kept_nbytes

    @property
    def needed_nbytes(self) -> int:
        """The memory that a device must have: the peak, or the states if no step was simulated."""
        return self.resting_nbytes if self.peak_nbytes is None else self.peak_nbytes

    @property
    def peak_nbytes(self) -> int | None:
        """The peak memory of tensors on the device in a step."""
        return None if self.step is None else self.step.peak_nbytes

    @property
    def host_nbytes(self) -> int:
        """Memory on the host, to which staging buffers add at most 1152 MiB."""
        if self.step is None or self.config.offload_dir:
            return self._on(MemoryTier.HOST)
        return self.step.host_nbytes

    @property
    def disk_nbytes(self) -> int:
        """Size of the files in `offload_dir`."""
        return self._on(MemoryTier.DISK)

    def as_dict(self) -> dict[str, Any]:
        """Returns settings and memory as a JSON-serializable dictionary."""
        return {
            "stage": self.config.stage,
            "offload": self.config.offload,
            "shard_size": self.shard_size,
            "gradient_checkpointing": self.gradient_checkpointing,
            "peak_nbytes": self.peak_nbytes,
            "resting_nbytes": self.resting_nbytes,
            "host_nbytes": self.host_nbytes,
            **({"note": self.note} if self.note else {}),
        }

    def _on(self, tier: MemoryTier) -> int:
        return sum(each.nbytes for each in self.classes if each.tier is tier)

    def render(self) -> str:
        """Returns the prediction as text, with one line per class and total."""
        lines = [render_classes(self.classes)]
        lines += [f"  {name:<32}  {nbytes / 2**20:>12.2f} MiB" for name, nbytes in self._sums()]
        return "\n".join([*lines, *([f"  not known: {self.note}"] if self.note else [])])

    def _sums(self) -> Iterator[tuple[str, int]]:
        if self.step is not None:
            yield "between steps", self.kept_nbytes
        yield "between backward and step", self.resting_nbytes
        if self.step is not None:
            yield "activations", self.step.activation_nbytes
            yield "logits and loss", self.step.head_nbytes
            yield "at the peak on the device", self.step.peak_nbytes
        if self.host_nbytes:
            yield "in host memory", self.host_nbytes
        if self.disk_nbytes:
            yield "in files of offload_dir", self.disk_nbytes
        if self.step is not None:
            yield (
                "read from shared memory per step" if self.step.shares_memory else "sent per step",
                self.step.sent_nbytes,
            )
            if self.step.copied_nbytes:
                yield "between host and device per step", self.step.copied_nbytes
        yield "checkpoint on disk, all ranks", self.checkpoint_nbytes


@dataclass(kw_only=True)
class Predictor(SimulatedRun):
    """Predicts runs of one model with different ZeRO settings and batches."""

    cluster: Cluster | None = None  # predicts the time of a step on these devices; overrides `ranks_per_host`

    def __post_init__(self):
        if self.cluster is not None:
            self.ranks_per_host = self.cluster.gpus_per_host
        self._path = alike_blocks(self.model)

    def predict(
        self, config: ZeroConfig, batch: dict[str, Tensor] | None, *, gradient_checkpointing: bool = False
    ) -> Prediction:
        """Predicts a run.

        Args:
            config (`ZeroConfig`): the settings, such as `training_arguments.zero_config()`.
            batch (`dict[str, Tensor]`, *optional*): the input of one rank's forward, with labels. Only shapes and
                dtypes matter. Ranks that share sequences get the same, full batch. Without a batch, activations and
                communication are not predicted.
            gradient_checkpointing (`bool`): keep only the inputs of blocks.
        """
        return self._of_all_blocks(*self._of_few_blocks(config, batch, gradient_checkpointing))

    def predict_rows(
        self,
        config: ZeroConfig,
        batch_of: Callable[[int], dict[str, Tensor]],
        rows: list[int],
        *,
        gradient_checkpointing: bool = False,
    ) -> list[Prediction]:
        """Predicts micro-batches with the given numbers of rows, which `batch_of` creates, by extrapolation from two
        of them: everything that is predicted is affine in the number of rows."""
        fewer, more = (self._of_few_blocks(config, batch_of(size), gradient_checkpointing) for size in SAMPLE_ROWS)
        if config.chunked_loss == "auto" and _head_nbytes(more) < _head_nbytes(fewer):
            whole = replace(config, chunked_loss="off")  # "auto" changed its choice between the sizes
            fewer, more = (self._of_few_blocks(whole, batch_of(size), gradient_checkpointing) for size in SAMPLE_ROWS)
        pairs, times = list(zip(fewer[0], more[0], strict=True)), fewer[1]
        found = ([extended(a, b, size - SAMPLE_ROWS[0]) for a, b in pairs] for size in rows)
        return [replace(self._of_all_blocks(few, times), config=config) for few in found]

    def _of_few_blocks(
        self, config: ZeroConfig, batch: dict[str, Tensor] | None, gradient_checkpointing: bool
    ) -> tuple[list[Prediction], int]:
        """Returns the predictions for a few blocks and for one period more, and the factor for their difference. For a
        model that is simulated in full, returns one prediction."""
        path = self._path if config.offload_fraction == 1 else None
        num_blocks = len(self.model.get_submodule(path)) if path is not None else 0
        kept = 1 if config.keep_gathered == "auto" else int(config.keep_gathered)
        # enough blocks that all buffers are used, with the same phase of the period at the end
        few = config.prefetch_units + kept + 4
        few += (num_blocks - few) % PERIOD
        if path is None or num_blocks <= max(MAX_WHOLE, few + PERIOD):
            return [self._predict(config, None, batch, gradient_checkpointing)], 0
        counts = ((path, few), (path, few + PERIOD))
        found = [self._predict(config, blocks, batch, gradient_checkpointing) for blocks in counts]
        return found, (num_blocks - few) // PERIOD

    def _of_all_blocks(self, few: list[Prediction], times: int) -> Prediction:
        cluster = self.cluster
        timed = [
            replace(each, events=[], time=played(each.events, cluster) if cluster and each.events else None)
            for each in few
        ]
        return extended(timed[0], timed[-1], times)

    def _predict(
        self, config: ZeroConfig, blocks: Blocks, batch: dict[str, Tensor] | None, gradient_checkpointing: bool
    ) -> Prediction:
        chunked_loss = "off" if self.reads_logits else config.chunked_loss
        # offload to disk is handled below
        here = self._in_groups(replace(config, chunked_loss=chunked_loss, offload_dir=None))
        simulation = SimulatedStep(self, here, blocks, gradient_checkpointing)
        if batch is None:
            step, note = None, WITHOUT_BATCH
        elif any(class_of(param).__name__ == "Int8Params" for param in self.model.parameters()):  # of bitsandbytes
            step, note = None, IN_8_BITS
        else:
            step, note = _try_step(simulation, batch)
        classes = tensor_classes(simulation.engine, simulation.optimizer)
        if simulation.reference is not None:
            classes += reference_classes(simulation.reference)
        held = [(num_weights(p), flat.trainable) for flat in simulation.engine.flats for p in flat.params]
        return Prediction(
            config,
            self.num_ranks,
            gradient_checkpointing,
            num_parameters=sum(count for count, _ in held),
            num_trained=sum(count for count, is_trained in held if is_trained),
            classes=_in_files(classes) if config.offload_dir else classes,
            checkpoint_nbytes=checkpoint_nbytes(simulation.engine, classes),
            step=step,
            note=note,
            events=[] if step is None else simulation.meter.timeline.events,
            shard_size=simulation.engine.comm.shard_group.num_ranks,
        )

    def _in_groups(self, config: ZeroConfig) -> ZeroConfig:
        """Replaces `shard_size="auto"` by a number of ranks."""
        if config.shard_size != "auto":
            return config
        is_even = self.num_ranks % self.host_size == 0 and self.host_size > 1
        memory_nbytes = None if self.on_cpu else self.memory_nbytes or None
        fits = partial(states_fit, self.model, config, memory_nbytes=memory_nbytes)
        size = fitting_size(self.host_size if is_even else self.num_ranks, self.num_ranks, fits)
        return replace(config, shard_size=None if size == self.num_ranks else size)


def _head_nbytes(few: tuple[list[Prediction], int]) -> int:
    step = few[0][0].step
    return 0 if step is None else step.head_nbytes


def _try_step(simulation: SimulatedStep, batch: dict[str, Tensor]) -> tuple[StepMemory | None, str]:
    """Runs the step, which fails if the model needs the values of tensors."""
    try:
        return simulation.step(batch), ""
    except HfZeroError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        return None, f"activations and traffic: the model does not run without data ({type(error).__name__}: {reason})"


def _in_files(classes: list[TensorClass]) -> list[TensorClass]:
    """Converts a prediction to offload to disk: gradients stay in memory, everything else uses a few buffers."""
    found = [
        replace(each, tier=MemoryTier.DISK) if each.tier is MemoryTier.HOST and "gradients" not in each.name else each
        for each in classes
    ]
    in_files = [(each, each.dtype.itemsize) for each in found if each.tier is MemoryTier.DISK and each.dtype]
    widths = sum(width for each, width in in_files if each.name == "masters") or 4
    longest = max((each.nbytes // width for each, width in in_files), default=0)
    record = min(longest, WINDOW_NUMEL) * (widths + 8)
    return [*found, TensorClass("disk buffers", None, NUM_BUFFERS * record, 1, MemoryTier.HOST)]


def alike_blocks(model: nn.Module) -> str | None:
    """Returns the path of the module list with all blocks of a model if they are identical, else `None`."""
    stacks = partition(model).stacks
    units = stacks[0].blocks if len(stacks) == 1 else []
    path = units[0].name.rpartition(".")[0] if units else ""
    container = model.get_submodule(path)
    is_list = isinstance(container, nn.ModuleList) and len(container) == len(units)
    is_alike = is_list and len({_shapes(unit) for unit in units}) == 1
    return path if is_alike and all(unit.name.rpartition(".")[0] == path for unit in units) else None


def _shapes(unit: UnitSpec) -> tuple:
    return tuple(
        (name.removeprefix(unit.name), tuple(param.shape), param.dtype, param.requires_grad)
        for name, param in unit.params.items()
    )


def extended(fewer: Any, more: Any, times: int) -> Any:
    """Extrapolates every integer in two structures (numbers, lists, dicts, dataclasses) of the same form linearly:
    `fewer + (more - fewer) * times`."""
    if fewer == more or isinstance(fewer, bool) or type(fewer) is not type(more):
        return fewer
    if isinstance(fewer, int):
        return fewer + (more - fewer) * times
    if isinstance(fewer, list):
        return [extended(a, b, times) for a, b in zip(fewer, more, strict=True)]
    if isinstance(fewer, dict):
        return {key: extended(value, more[key], times) for key, value in fewer.items()}
    if is_dataclass(fewer) and not isinstance(fewer, type):
        pairs = ((field.name, getattr(fewer, field.name), getattr(more, field.name)) for field in fields(fewer))
        return type(fewer)(**{name: extended(a, b, times) for name, a, b in pairs})
    return fewer
