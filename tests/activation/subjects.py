"""Checkpointed models with their inputs in several places, trained alike."""

import gc
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.activation.offload import HostMemory, Offload
from hf_zero.comm import Bus
from hf_zero.engine import ZeroEngine
from tests import models
from tests.tensor_meter import TensorMeter
from tests.training import Sharded, adamw, loss_of


# Messages and scalars of the exchanges come and go: less than a hundred bytes were seen, and a block's input has 1920.
NOISE_NBYTES = 256
QUIET_SECONDS = 0.03


def checkpointed(model: nn.Module, use_reentrant: bool = False) -> nn.Module:
    """The model with gradient checkpointing, the cache that warns about it off."""
    model.config.use_cache = False
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def subject(name: str, stage: int, use_reentrant: bool = False, **settings) -> Sharded:
    return Sharded(checkpointed(models.build(name), use_reentrant), adamw, stage, **settings)


def host_nbytes(engine: ZeroEngine) -> int:
    """Bytes of activations in the host's memory, which nothing else is offloaded to."""
    return used_nbytes(engine.bus, Offload.of(engine).memory)


def used_nbytes(bus: Bus, memory: HostMemory) -> int:
    """Bytes of the buffers that are not free."""
    return bus.host_nbytes - sum(size for size, _ in memory._free)


def input_nbytes(engine: ZeroEngine, batch: dict) -> int:
    """Bytes of what one block of a decoder is given: hidden states."""
    dtype = engine.blocks[0].flats[0].dtype
    return batch["input_ids"].numel() * engine.model.config.hidden_size * dtype.itemsize


def held_between(model: nn.Module, batch: dict, num_steps: int = 5) -> int:
    """Bytes that a forward leaves for its backward, once what is learned from a forward before it is known.

    The median, and of quiet moments: gloo's threads give up the buffers of a collective some time after it is done.
    """
    loss_of(model(**batch)).backward()
    while gc.collect():
        pass
    with TensorMeter() as meter:
        meter.mark("start")
        for step in range(num_steps):
            time.sleep(QUIET_SECONDS)
            meter.mark(f"before-{step}")
            loss = loss_of(model(**batch))
            time.sleep(QUIET_SECONDS)
            meter.mark(f"between-{step}")
            loss.backward()
            del loss
    before, between = (
        [meter.span("start", f"{name}-{step}") for step in range(num_steps)] for name in ("before", "between")
    )
    return int(median(b.end_nbytes - a.end_nbytes for a, b in zip(before, between)))


def added_at_the_peak(model: nn.Module, batch: dict) -> int:
    """Bytes by which the second forward and backward exceed what is held before them."""
    loss_of(model(**batch)).backward()
    model.zero_grad()
    with TensorMeter() as meter:
        meter.mark("begin")
        loss_of(model(**batch)).backward()
        meter.mark("end")
    span = meter.span("begin", "end")
    return span.peak_nbytes - span.start_nbytes


def rank_batch(name: str, step: int) -> dict:
    return models.batch(name, seed=1000 * step + dist.get_rank())


def gradients(subject: Sharded) -> dict[str, torch.Tensor]:
    names = [name for name, p in subject.model.named_parameters() if p.requires_grad]
    return {name: hf_zero.ShardedModel(subject.engine.model).full_grad(name) for name in names}
