"""The training that `check` repeats: a tiny Llama with random weights, in plain torch and sharded."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.engine.access import gathered
from hf_zero.optim import ShardedOptimizer


NUM_STEPS = 3
MAX_NORM = 0.1  # smaller than the norms that occur
VOCAB = 256
BATCH_SHAPE = (2, 16)
# Ranks add gradients in another order than one process does. Gradients of a few thousand terms then agree to about
# 1e-6 of their size, and three steps do not add more.
ROUNDING = 2e-5
# One rounding to bf16 is 2^-8 of a value. Kernels that sum in another order round differently.
BF16_ROUNDING = 2e-2


@dataclass(frozen=True)
class Trained:
    """The results of a training, on the CPU."""

    losses: Tensor  # of each step, on this rank
    norms: Tensor  # of the gradients before they were clipped
    weights: dict[str, Tensor]  # whole parameters in fp32, by name

    def differences(self, other: "Trained") -> dict[str, float]:
        """Returns the largest relative differences of losses, norms, and the parameter that differs most. The
        difference from a NaN is infinite."""
        found = {name: _relative(getattr(self, name), getattr(other, name), each=True) for name in ("losses", "norms")}
        weights = {name: _relative(weight, other.weights[name], each=False) for name, weight in self.weights.items()}
        worst = max(weights, key=weights.__getitem__)
        return {**found, worst: weights[worst]}


def _relative(mine: Tensor, theirs: Tensor, *, each: bool) -> float:
    """The largest difference, relative to each element or to the largest one."""
    if not mine.numel():
        return 0.0
    size = theirs.abs() if each else theirs.abs().max()
    largest = ((mine - theirs).abs() / size.clamp_min(1e-30)).max().item()
    return largest if largest == largest else float("inf")


def tiny_llama(seed: int, attention: str = "eager") -> LlamaForCausalLM:
    """Makes the model on the CPU, with random weights. It has one block more than the engine has slots. Eager
    attention is deterministic."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        attn_implementation=attention,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).train()


def random_batch(rank: int, step: int, device: torch.device) -> dict[str, Tensor]:
    """Returns the batch of a rank at a step, the same on every machine."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, BATCH_SHAPE, generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def make_inner(kind: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Makes the optimizer: adamw, or sgd. A rate that is a power of two makes each update of SGD one rounding; AdamW's
    epsilon keeps gradients that are rounding errors from moving a weight."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=2.0**-6)
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4, weight_decay=0.1)


def train_plain(model: nn.Module, num_ranks: int, kind: str, device: torch.device) -> list[Trained]:
    """Trains in plain torch in one process, with the averaged gradients of the batches of all ranks."""
    optimizer = make_inner(kind, model.parameters())
    losses: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    norms = []
    for step in range(NUM_STEPS):
        for rank in range(num_ranks):
            loss = model(**random_batch(rank, step, device)).loss
            (loss / num_ranks).backward()
            losses[rank].append(loss.detach())
        if kind != "sgd":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: _on_host(param) for name, param in model.named_parameters()}
    return [Trained(_stacked(own), _stacked(norms), weights) for own in losses]


def train_sharded(
    model: nn.Module,
    optimizer: ShardedOptimizer,
    rank: int,
    device: torch.device,
    steps: Iterable[int],
    *,
    clips: bool,
) -> Trained:
    """Trains a sharded model on the batches of one rank. All ranks call it."""
    losses, norms = [], []
    for step in steps:
        loss = model(**random_batch(rank, step, device)).loss
        loss.backward()
        losses.append(loss.detach())
        if clips:
            norms.append(optimizer.clip_grad_norm_(MAX_NORM).detach())
        optimizer.step()
        optimizer.zero_grad()
    with gathered(model):
        weights = {name: _on_host(param) for name, param in model.named_parameters()}
    return Trained(_stacked(losses), _stacked(norms), weights)


def _on_host(param: Tensor) -> Tensor:
    return param.detach().to("cpu", torch.float32, copy=True)


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack(values).to("cpu", torch.float32) if values else torch.zeros(0)
