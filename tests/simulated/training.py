"""Trainings of the engine on the simulated accelerator, one for each way through its waits."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero
from hf_zero.checkpoint.save import Checkpoint, save_checkpoint
from hf_zero.checkpoint.staging import Snapshots
from tests import models
from tests.simulated.accelerator import DEVICE, Accelerator
from tests.training import Record, Sharded, adamw, loss_of


BF16 = torch.bfloat16
NUM_STEPS, NUM_MICRO = 2, 2


@dataclass(frozen=True)
class Scenario:
    """One training.

    Args:
        settings (`dict`): of `hf_zero.shard`; "disk" as `offload_dir` stands for a folder.
        model (`str`): one of `tests.models`.
        checkpointing (`str`): "reentrant", "plain" or "" for none.
        in_backward (`bool`): whether what rests on the host is updated in backward.
        saves (`bool`): whether a checkpoint is written while the next step runs.
        loads (`bool`): whether an earlier one is loaded right after the first step.
        skips (`bool`): whether ranks skip blocks, each its own.
        make_optimizer (`Callable`): gives the optimizer of a model.
        fails (`bool`): whether a backward breaks off, and training goes on after it.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    checkpointing: str = ""
    in_backward: bool = False
    saves: bool = False
    loads: bool = False
    skips: bool = False
    make_optimizer: Callable = adamw
    fails: bool = False


SCENARIOS = {
    "stage 0": Scenario(dict(stage=0)),
    "stage 1, bf16": Scenario(dict(stage=1, compute_dtype=BF16)),
    "stage 2": Scenario(dict(stage=2)),
    "stage 2, optimizer on the host": Scenario(dict(stage=2, offload="optimizer")),
    "stage 3": Scenario(dict(stage=3)),
    "stage 3, nothing ahead": Scenario(dict(stage=3, prefetch_units=0)),
    "stage 3, three ahead, bf16": Scenario(dict(stage=3, prefetch_units=3, compute_dtype=BF16)),
    "stage 3, blocks kept": Scenario(dict(stage=3, keep_gathered=2)),
    "stage 3, blocks skipped": Scenario(dict(stage=3), skips=True, model="switch"),
    "stage 3, checkpointing": Scenario(dict(stage=3), checkpointing="plain"),
    "stage 3, reentrant checkpointing": Scenario(dict(stage=3), checkpointing="reentrant"),
    "stage 3, saving": Scenario(dict(stage=3), saves=True),
    "stage 3, a backward that breaks off": Scenario(dict(stage=3), fails=True),
    "stage 3, whole matrices": Scenario(dict(stage=3), make_optimizer=hf_zero.MuonWithAdamW()),
    "optimizer on the host, bf16": Scenario(dict(stage=3, offload="optimizer", compute_dtype=BF16)),
    "optimizer on the host, in backward": Scenario(dict(stage=3, offload="optimizer"), in_backward=True),
    "optimizer on the host, delayed": Scenario(dict(stage=3, offload="optimizer", delayed_update=1)),
    "optimizer on the host, delayed, loading": Scenario(
        dict(stage=3, offload="optimizer", delayed_update=1), loads=True
    ),
    "optimizer on the host, whole matrices": Scenario(
        dict(stage=3, offload="optimizer"), make_optimizer=hf_zero.MuonWithAdamW()
    ),
    "parameters on the host": Scenario(dict(stage=3, offload="params")),
    "parameters on the host, a backward that breaks off": Scenario(
        dict(stage=3, offload="params", compute_dtype=BF16), fails=True
    ),
    "parameters on the host, bf16, saving": Scenario(dict(stage=3, offload="params", compute_dtype=BF16), saves=True),
    "parameters on disk": Scenario(dict(stage=3, offload="params", offload_dir="disk")),
    "optimizer on disk, bf16": Scenario(dict(stage=2, offload="optimizer", offload_dir="disk", compute_dtype=BF16)),
    "activations on the host": Scenario(dict(stage=3, offload_activations=True), checkpointing="plain"),
}
# One rank has no collectives: what is left is what goes to the host and comes back.
ALONE = [name for name in SCENARIOS if "disk" in name or name == "parameters on the host"]


@dataclass
class Result:
    """What a training on the accelerator leaves.

    Args:
        record (`Record`): losses, norms and weights.
        races (`list[str]`): what was found.
        host_waits (`dict[str, int]`): how often the host waited for the device, by place.
        collectives (`list`): what was launched, in order: communicator, kind, bytes.
    """

    record: Record
    races: list[str]
    host_waits: dict[str, int]
    collectives: list[tuple[str, str, int]]


def run(scenario: Scenario) -> Result:
    """Trains on the accelerator."""
    accelerator = Accelerator()
    with accelerator.installed():
        record = train(scenario, DEVICE)
    races = list(accelerator.history.races.values())
    return Result(record, races, dict(accelerator.host_waits), accelerator.collectives)


def train(scenario: Scenario, device: torch.device) -> Record:
    """Trains, with all that a user does between steps: evaluation, gathered parameters, a checkpoint."""
    with ExitStack() as stack:
        settings = dict(scenario.settings)
        if settings.get("offload_dir"):
            settings["offload_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        subject = Sharded(models.build(scenario.model), scenario.make_optimizer, **settings)
        if scenario.checkpointing:
            reentrant = {"use_reentrant": scenario.checkpointing == "reentrant"}
            subject.model.gradient_checkpointing_enable(reentrant)
        if scenario.loads:
            earlier = _save(subject, stack)
            earlier.wait()
        losses, norms = [], []
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                is_last = scenario.in_backward and micro == NUM_MICRO - 1
                with subject.optimizer.in_backward() if is_last else nullcontext():
                    loss = loss_of(subject(**_batch(scenario, step, micro, device)))
                    loss.backward()
                losses.append(loss.detach())
            if step and not scenario.in_backward:
                handle = hf_zero.ShardedModel(subject.model)
                grads = [handle.full_grad(name) for name, _ in list(subject.model.named_parameters())[:2]]
                losses += [grad.sum() for grad in grads if grad is not None]
            norms.append(torch.zeros(()) if scenario.in_backward else subject.clip_grad_norm_(0.1).detach())
            subject.optimizer.step()
            subject.optimizer.zero_grad()
            if step == 0 and scenario.loads:
                hf_zero.load_state(subject.model, subject.optimizer, earlier.folder)
            if step == 0:
                _between(subject, scenario, device, stack)
        record = Record(torch.stack(losses), torch.stack(norms), subject.weights())
        restored = hf_zero.ShardedModel(subject.model).unshard().state_dict()
        shown = {name: value.to(subject.dtype).float() for name, value in restored.items()}
        assert all(torch.equal(shown[name], weight) for name, weight in record.weights.items())
        return record


def _between(subject: Sharded, scenario: Scenario, device: torch.device, stack: ExitStack) -> None:
    subject.model.eval()
    with torch.no_grad():
        subject(**_batch(scenario, 7, 0, device))
    subject.model.train()
    with hf_zero.gathered(subject.model, writeback=True):
        with torch.no_grad():
            next(subject.model.parameters()).mul_(0.5)
    if scenario.fails:
        _fail(subject, scenario, device)
    if scenario.saves:
        saving = _save(subject, stack)
        stack.callback(saving.wait)


def _save(subject: Sharded, stack: ExitStack) -> Checkpoint:
    folder = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "checkpoint")
    return save_checkpoint(subject.model, subject.optimizer, path, background=Snapshots())


def _fail(subject: Sharded, scenario: Scenario, device: torch.device) -> None:
    """Breaks a backward off in its middle, on all ranks."""

    def stop(*_):
        raise KeyboardInterrupt

    def hook(module, inputs, output):
        (output[0] if isinstance(output, tuple) else output).register_hook(stop)

    handle = subject.model.model.layers[1].register_forward_hook(hook)
    loss = loss_of(subject(**_batch(scenario, 8, 0, device)))
    handle.remove()
    with suppress(KeyboardInterrupt):
        loss.backward()


def _batch(scenario: Scenario, step: int, micro: int, device: torch.device) -> dict[str, Any]:
    rank = dist.get_rank()
    batch: dict[str, Any] = models.batch(scenario.model, seed=1000 * step + 10 * micro + rank)
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    if scenario.skips:
        batch["routes"] = [(step + micro + rank + layer) % 2 for layer in range(3)]
    return batch
