"""Trainings of the engine on the simulated accelerator, one for each way through its waits that the tests for GPUs do
not take on the test device (`tests/device`)."""

import gc
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero
from hf_zero.activation import offload
from hf_zero.activation.partition import Division
from hf_zero.checkpoint import Checkpoint, save_checkpoint
from hf_zero.checkpoint.staging import Snapshots
from hf_zero.comm import distributed, pairwise
from hf_zero.engine import build, partition
from hf_zero.optim.host import HostSteps
from tests import models
from tests.compare import assert_equal
from tests.simulated.accelerator import DEVICE, HOST, Accelerator, connected, keep_groups
from tests.simulated.clocks import Race
from tests.simulated.hosts import LateMessages, SharedWatch, races_between
from tests.training import Record, Sharded, adamw, loss_of


BF16 = torch.bfloat16
NUM_STEPS, NUM_MICRO = 2, 2
fused = partial(adamw, fused=True)


def batch_on_device(name: str, seed: int) -> dict[str, Any]:
    return {key: value.to(DEVICE) for key, value in models.batch(name, seed=seed).items()}


@dataclass(frozen=True)
class Scenario:
    """One training.

    Args:
        settings (`dict`): of `hf_zero.shard`; "disk" as `offload_dir` stands for a folder.
        model (`str`): one of `tests.models`.
        checkpointing (`str`): "reentrant", "plain" or "" for none.
        in_backward (`bool`): whether what rests on the host is updated in backward.
        saves (`bool`): whether a checkpoint is written while the next step runs.
        loads (`bool`): whether an earlier one is loaded: after the first step and an evaluation, and right behind the
            last step, whose values are on their way to the device. Behind a backward that updates and breaks off, that
            makes defined again which units have its values.
        skips (`bool`): whether ranks skip blocks, each its own.
        make_optimizer (`Callable`): gives the optimizer of a model.
        looks (`bool`): whether the masters are read between an update in backward and its step, and a last such update
            has no step.
        fails (`bool`): whether a backward breaks off, and training goes on after it, until a forward breaks off, or a
            step on the host.
        sets_apart (`bool`): whether embedding and head, untied, are units of their own.
        divides (`bool`): whether checkpointed inputs, then equal on all ranks, are divided among them.
        drops (`bool`): whether the model is dropped behind a last step, and not unsharded.
        holds (`bool`): whether gradients stay on their rank until the last micro-batch.
        seed (`int`): added to those of the choices that an accelerator has.
        world (`str`): an "accelerator", or CPUs, which have "shared memory", or send "messages".
    """

    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    checkpointing: str = ""
    in_backward: bool = False
    saves: bool = False
    loads: bool = False
    skips: bool = False
    make_optimizer: Callable = adamw
    looks: bool = False
    fails: bool = False
    sets_apart: bool = False
    divides: bool = False
    drops: bool = False
    holds: bool = False
    seed: int = 0
    world: str = "accelerator"


SCENARIOS = {
    "stage 1, dropped": Scenario(dict(stage=1), drops=True),
    "stage 1, a backward that breaks off": Scenario(dict(stage=1), fails=True),
    "stage 1, bf16": Scenario(dict(stage=1, compute_dtype=BF16)),
    "stage 1, bf16, gradients held": Scenario(dict(stage=1, compute_dtype=BF16), holds=True),
    "stage 0, bf16, gradients held": Scenario(dict(stage=0, compute_dtype=BF16), holds=True),
    "shard groups, gradients held": Scenario(dict(stage=1, shard_size=1, strict=True, compute_dtype=BF16), holds=True),
    "stage 2": Scenario(dict(stage=2)),
    "stage 2, dropped": Scenario(dict(stage=2), drops=True, make_optimizer=fused),
    "stage 2, optimizer on the host": Scenario(dict(stage=2, offload="optimizer")),
    "stage 3": Scenario(dict(stage=3)),
    "stage 3, three ahead, bf16": Scenario(dict(stage=3, prefetch_units=3, compute_dtype=BF16)),
    "stage 3, blocks skipped": Scenario(dict(stage=3), skips=True, model="switch"),
    "stage 3, checkpointing": Scenario(dict(stage=3), checkpointing="plain"),
    "stage 3, reentrant checkpointing": Scenario(dict(stage=3), checkpointing="reentrant"),
    "stage 3, a vocabulary apart, loading": Scenario(dict(stage=3), sets_apart=True, loads=True),
    "stage 2, a vocabulary apart, bf16": Scenario(dict(stage=2, compute_dtype=BF16), sets_apart=True),
    "parameters on the host, a vocabulary apart, a backward that breaks off": Scenario(
        dict(stage=3, offload="params", compute_dtype=BF16), sets_apart=True, fails=True
    ),
    "parameters on disk, a vocabulary apart": Scenario(
        dict(stage=3, offload="params", offload_dir="disk"), sets_apart=True
    ),
    "stage 3, a backward that breaks off": Scenario(dict(stage=3), fails=True),
    "stage 3, whole matrices": Scenario(dict(stage=3), make_optimizer=hf_zero.MuonWithAdamW()),
    "optimizer on the host, in backward, read before the step": Scenario(
        dict(stage=3, offload="optimizer"), in_backward=True, looks=True
    ),
    "optimizer on the host, in backward, which breaks off": Scenario(
        dict(stage=3, offload="optimizer"), in_backward=True, fails=True, loads=True
    ),
    "optimizer on the host, loading": Scenario(dict(stage=3, offload="optimizer"), loads=True),
    "optimizer on the host, whole matrices": Scenario(
        dict(stage=3, offload="optimizer"), make_optimizer=hf_zero.MuonWithAdamW()
    ),
    "parameters on the host": Scenario(dict(stage=3, offload="params")),
    "parameters on the host, a backward that breaks off": Scenario(
        dict(stage=3, offload="params", compute_dtype=BF16), fails=True
    ),
    "parameters on the host, bf16, saving": Scenario(dict(stage=3, offload="params", compute_dtype=BF16), saves=True),
    "optimizer on disk, loading": Scenario(dict(stage=2, offload="optimizer", offload_dir="disk"), loads=True),
    "optimizer on disk, bf16": Scenario(dict(stage=2, offload="optimizer", offload_dir="disk", compute_dtype=BF16)),
    "activations on the host": Scenario(dict(stage=3, offload_activations=True), checkpointing="plain"),
    "activations on the host, a backward that breaks off": Scenario(
        dict(stage=3, offload_activations=True), checkpointing="plain", fails=True, seed=3
    ),
    "activations divided and on the host": Scenario(
        dict(stage=2, offload_activations=True), checkpointing="plain", divides=True
    ),
    "stage 3, loading": Scenario(dict(stage=3), loads=True),
    "parameters on the host, loading": Scenario(dict(stage=3, offload="params"), loads=True),
    "shared memory, stage 0": Scenario(dict(stage=0), world="shared memory"),
    "shared memory, stage 1, bf16": Scenario(dict(stage=1, compute_dtype=BF16), world="shared memory"),
    "shared memory, stage 2": Scenario(dict(stage=2), world="shared memory"),
    "shared memory, stage 3": Scenario(dict(stage=3), world="shared memory"),
    "shared memory, stage 3, bf16, saving": Scenario(
        dict(stage=3, compute_dtype=BF16), world="shared memory", saves=True
    ),
    "shared memory, stage 3, loading": Scenario(dict(stage=3), world="shared memory", loads=True),
    "shared memory, stage 3, whole matrices": Scenario(
        dict(stage=3), world="shared memory", make_optimizer=hf_zero.MuonWithAdamW()
    ),
    "shared memory, stage 3, blocks skipped": Scenario(
        dict(stage=3), world="shared memory", skips=True, model="switch"
    ),
    "shared memory, a backward that breaks off": Scenario(dict(stage=2), world="shared memory", fails=True),
    "messages, stage 1": Scenario(dict(stage=1), world="messages"),
    "messages, stage 2, bf16": Scenario(dict(stage=2, compute_dtype=BF16), world="messages"),
    "messages, shard groups": Scenario(dict(stage=2, shard_size=1, strict=True, compute_dtype=BF16), world="messages"),
    "messages, stage 3": Scenario(dict(stage=3), world="messages"),
    "messages, a backward that breaks off": Scenario(dict(stage=3), world="messages", fails=True),
    "messages, stage 3, whole matrices": Scenario(
        dict(stage=3), world="messages", make_optimizer=hf_zero.MuonWithAdamW()
    ),
}


class Result(NamedTuple):
    """Losses, norms and weights; the races that were found; and what was launched on an accelerator, in order:
    communicator, kind, bytes."""

    record: Record
    races: list[str]
    collectives: list[tuple[str, str, int]] = []


def run(scenario: Scenario, seed: int = 0) -> Result:
    """Trains on the accelerator.

    Args:
        scenario (`Scenario`): what.
        seed (`int`): of the choices that an accelerator has.

    Raises:
        `Race`: where the training raises after one was found.
    """
    if scenario.world == "shared memory":
        watch = SharedWatch()
        with watch.installed():
            record = train(scenario, HOST)
        everyones: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, watch.notes)
        return Result(record, races_between(everyones))
    if scenario.world == "messages":
        messages = LateMessages()
        with messages.installed():
            record = _over(pairwise.PairwiseComm, scenario)
        return Result(record, messages.complaints())
    accelerator = Accelerator(scenario.seed + seed)
    try:
        with accelerator.installed():
            record = train(scenario, DEVICE)
            if scenario.drops:
                gc.collect()
                accelerator.look_for_freed()
    except Exception as error:
        if accelerator.history.races:
            raise Race(accelerator.races()[0]) from error
        raise
    return Result(record, accelerator.races(), accelerator.collectives)


def trains(name: str, seed: int = 0) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Trains on the accelerator, with the same losses, norms and weights as on the CPU, bit for bit. Returns races and
    collectives."""
    result = run(SCENARIOS[name], seed)
    again = f"trains({name!r}, {seed}) on {dist.get_world_size()} ranks"
    assert_equal(result.record, _over(distributed.NativeComm, SCENARIOS[name]), again)
    return [f"{race} ({again})" for race in result.races], result.collectives


def _over(kind: type, scenario: Scenario) -> Record:
    """The same training on the CPU, through collectives of some kind."""

    def connect(_, **settings):
        return connected(kind, HOST, **settings)

    with pytest.MonkeyPatch.context() as patch:
        keep_groups(patch)
        if dist.get_world_size() > 1:
            patch.setattr(build, "connect", connect)
        return train(scenario, HOST)


def train(scenario: Scenario, device: torch.device) -> Record:
    """Trains, with all that a user does between steps: evaluation, gathered parameters, a checkpoint.

    Args:
        scenario (`Scenario`): what.
        device (`torch.device`): where the batches are.
    """
    with ExitStack() as stack:
        settings = dict(scenario.settings)
        if settings.get("offload_dir"):
            settings["offload_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        if scenario.sets_apart:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(partition, "VOCABULARY_NUMEL", 0)
        model = models.build(scenario.model)
        subject = Sharded(model, scenario.make_optimizer, **settings)
        if scenario.checkpointing:
            reentrant = {"use_reentrant": scenario.checkpointing == "reentrant"}
            subject.model.gradient_checkpointing_enable(reentrant)
        if scenario.divides:
            division = Division(subject.engine.comm, subject.engine.comm.counters)
            offload.Offload.of(subject.engine)._division = division
        if scenario.loads:
            earlier = _save(subject, stack)
        losses, norms = [], []
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                is_last = micro == NUM_MICRO - 1
                is_told = is_last or scenario.holds
                with subject.optimizer.in_backward() if scenario.in_backward and is_last else nullcontext():
                    loss = loss_of(subject(**_batch(scenario, step, micro, device)))
                    with subject.engine.reducing_this_backward(loss, is_last) if is_told else nullcontext():
                        loss.backward()
                losses.append(loss.detach())
            if scenario.looks:
                masters = [shard.tensor for shard in hf_zero.ShardedModel(subject.model).named_shards()]
                losses.append(torch.cat(masters).sum())
            if step and not scenario.in_backward:
                handle = hf_zero.ShardedModel(subject.model)
                grads = [handle.full_grad(name) for name, _ in list(subject.model.named_parameters())[:2]]
                losses += [grad.sum() for grad in grads if grad is not None]
            norms.append(torch.zeros(()) if scenario.in_backward else subject.clip_grad_norm_(0.1).detach())
            subject.optimizer.step()
            subject.optimizer.zero_grad()
            if step == 0:
                _between(subject, scenario, device, stack)
            if scenario.loads:
                if step < NUM_STEPS - 1:
                    _evaluate(subject, scenario, device)  # which reads what is overwritten next
                hf_zero.load_weights(subject.model, earlier.folder)
                hf_zero.load_state(subject.model, subject.optimizer, earlier.folder)
        if scenario.looks:
            with subject.optimizer.in_backward():
                loss_of(subject(**_batch(scenario, 9, 0, device))).backward()
            subject.optimizer.zero_grad()
        if scenario.fails and subject.engine.plan.is_offloaded and not scenario.in_backward:
            _interrupt_step(subject, scenario, device)
        elif scenario.fails:
            _fail(subject, scenario, device, in_backward=False)
        if scenario.drops:
            weights = subject.weights()
            loss = loss_of(subject(**_batch(scenario, 9, 0, device)))
            with subject.engine.reducing_this_backward(loss):
                loss.backward()
            subject.optimizer.step()
        else:
            restored = hf_zero.ShardedModel(subject.model).unshard()
            weights = {name: param.detach().float() for name, param in restored.named_parameters()}
        return Record(torch.stack(losses), torch.stack(norms), weights)


def _evaluate(subject: Sharded, scenario: Scenario, device: torch.device) -> None:
    subject.model.eval()
    with torch.no_grad():
        subject(**_batch(scenario, 7, 0, device))
    subject.model.train()


def _between(subject: Sharded, scenario: Scenario, device: torch.device, stack: ExitStack) -> None:
    _evaluate(subject, scenario, device)
    subject.weights()
    with hf_zero.gathered(subject.model, writeback=True):
        with torch.no_grad():
            next(subject.model.parameters()).mul_(0.5)
    if scenario.fails:
        _fail(subject, scenario, device)
    if scenario.saves:
        snapshots = Snapshots()
        _save(subject, stack, snapshots)  # the next waits for it
        saved = _save(subject, stack, snapshots)
        saved.wait()
        assert dist.get_rank() > 0 or Path(saved.folder).is_dir(), "it was waited for, and is not complete"
        saving = _save(subject, stack, snapshots)
        stack.callback(saving.wait)


def _save(subject: Sharded, stack: ExitStack, background: Snapshots | None = None) -> Checkpoint:
    folder = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(folder[0], "checkpoint")
    return save_checkpoint(subject.model, subject.optimizer, path, background=background)


def _fail(subject: Sharded, scenario: Scenario, device: torch.device, in_backward: bool = True) -> None:
    """Breaks a forward or a backward off in its middle, on all ranks."""

    def stop(*_):
        if in_backward and subject.engine.plan.is_offloaded and not scenario.in_backward:
            subject.engine.bus.later(_refuse)  # as a disk may
        raise KeyboardInterrupt

    def hook(module, inputs, output):
        if not in_backward:
            stop()
        (output[0] if isinstance(output, tuple) else output).register_hook(stop)

    broken = subject.model.model.layers[0 if scenario.checkpointing else 1]  # before it one comes from the host
    if scenario.settings.get("offload_activations"):
        offload.Offload.of(subject.engine)._last = -1  # all go to the host, as in a first forward
    handle = broken.register_forward_hook(hook)
    loss = None
    with suppress(KeyboardInterrupt):
        loss = loss_of(subject(**_batch(scenario, 8, 0, device)))
    handle.remove()
    if loss is None:
        return
    is_early = subject.optimizer.in_backward() if scenario.in_backward else nullcontext()
    with suppress(KeyboardInterrupt), is_early, subject.engine.reducing_this_backward(loss):
        loss.backward()
    if subject.engine.stage < 2:  # what is averaged already takes no more in this step
        subject.optimizer.zero_grad()


def _interrupt_step(subject: Sharded, scenario: Scenario, device: torch.device) -> None:
    """Breaks a step off while the host updates."""

    def stop(*_):
        raise KeyboardInterrupt

    loss_of(subject(**_batch(scenario, 9, 0, device))).backward()
    with suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostSteps, "end", stop)
        subject.optimizer.step()


def _refuse() -> None:
    raise OSError("what had been sent to the host did not arrive")


def _batch(scenario: Scenario, step: int, micro: int, device: torch.device) -> dict[str, Any]:
    rank = 0 if scenario.divides else dist.get_rank()
    batch: dict[str, Any] = models.batch(scenario.model, seed=1000 * step + 10 * micro + rank)
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    if scenario.skips:
        batch["routes"] = [(step + micro + rank + layer) % 2 for layer in range(3)]
    return batch
