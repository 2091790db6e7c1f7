"""One training loop for hf_zero at any stage, DDP and a single process."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.compare import weights_of


@dataclass
class Record:
    """The result of a training.

    Args:
        losses: of each micro-batch, on this rank.
        norms: gradient norm before clipping, for each step.
        weights: full parameters by name, after the last step.
    """

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]


class Plain:
    """A model in plain torch, in DDP if there are several ranks. Same interface as `Sharded`."""

    def __init__(self, model: nn.Module, make_optimizer: Callable, autocast: torch.dtype | None = None):
        self.model = model
        self.forward = (
            DistributedDataParallel(model, find_unused_parameters=True) if dist.get_world_size() > 1 else model
        )
        self.optimizer = make_optimizer(model)
        self.autocast = autocast

    def __call__(self, **batch):
        with torch.autocast("cpu", self.autocast) if self.autocast else nullcontext():
            return self.forward(**batch)

    def accumulating(self):
        """Context for all micro-batches of a step except the last."""
        return self.forward.no_sync() if self.forward is not self.model else nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def clip_grad_value_(self, value: float) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), value)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().float().clone() for name, p in self.model.named_parameters()}


class Sharded:
    """A model sharded by hf_zero."""

    def __init__(self, model: nn.Module, make_optimizer: Callable, stage: int, **settings):
        self.model = model
        self.engine = engine_of(hf_zero.shard(model, stage=stage, **settings))
        self.dtype = settings.get("compute_dtype") or torch.float32
        optimizer = make_optimizer(model)
        self.optimizer = hf_zero.ShardedOptimizer(self.engine, optimizer)
        self.clip_grad_norm_ = self.optimizer.clip_grad_norm_
        self.clip_grad_value_ = self.optimizer.clip_grad_value_

    def __call__(self, **batch):
        floating = {
            key: x.to(self.dtype) for key, x in batch.items() if isinstance(x, Tensor) and x.is_floating_point()
        }
        return self.model(**{**batch, **floating})

    def accumulating(self):
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.float() for name, p in weights_of(self.model).items()}


def adamw(model: nn.Module, lr: float = 1e-3, eps: float = 1e-4, **settings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; see `test_parity` for the choice of `eps`."""
    return torch.optim.AdamW(models.decay_groups(model), lr=lr, eps=eps, **settings)


def sgd(model: nn.Module, lr: float = 0.1, **settings) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def loss_of(output) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def train(
    subject: Plain | Sharded,
    name: str,
    *,
    num_steps: int = 10,
    max_norm: float | None = 0.1,
    more: Callable[[int, int], dict] = lambda step, rank: {},
    after: Callable[[], object] = lambda: None,
) -> Record:
    """Trains on batches that differ by rank and step, with clipping unless `max_norm` is None.

    Args:
        more (`Callable`): returns additional arguments of the model for a step and a rank.
        after (`Callable`): is called after each step.
    """
    losses, norms, rank = [], [], dist.get_rank()
    for step in range(num_steps):
        loss = loss_of(subject(**models.batch(name, seed=1000 * step + rank), **more(step, rank)))
        loss.backward()
        losses.append(loss.detach().float())
        if max_norm is not None:
            norms.append(subject.clip_grad_norm_(max_norm).detach())
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        after()
    return Record(torch.stack(losses), torch.stack(norms) if norms else torch.zeros(0), subject.weights())


def train_in_backward(
    subject: Sharded,
    name: str,
    *,
    num_steps: int = 3,
    early: bool = True,
    more: Callable[[int, int], dict] = lambda step, rank: {},
    after: Callable[[], object] = lambda: None,
) -> Record:
    """Trains without clipping in steps of two micro-batches. In the second, units are updated as soon as they can be,
    unless `early` is False."""
    losses = []
    for step in range(num_steps):
        for micro in range(2):
            batch = models.batch(name, seed=100 * step + 10 * micro + dist.get_rank())
            loss = loss_of(subject(**batch, **more(step, dist.get_rank())))
            with subject.optimizer.in_backward() if early and micro else nullcontext():
                loss.backward()
            losses.append(loss.detach().float())
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        after()
    return Record(torch.stack(losses), torch.zeros(0), subject.weights())


def go_on(subject: Plain | Sharded, name: str, first: int, last: int) -> list[float]:
    """Trains with the same batch on every rank, so that averages over 1, 2 and 4 ranks are bit-identical. Returns the
    losses of the steps `first` to `last - 1`."""
    losses = []
    for step in range(first, last):
        loss = loss_of(subject(**models.batch(name, seed=step)))
        loss.backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_accumulating(subject: Plain | Sharded, name: str, *, num_steps: int = 4, num_micro: int = 3) -> Record:
    """Trains with several micro-batches per step. Every label of a step, on all ranks, has the same weight.

    As in transformers, each loss is the sum over its labels divided by the number of labels in the whole step, times
    the number of ranks, because gradients are averaged over ranks.
    """
    num_ranks = dist.get_world_size()
    losses, norms = [], []
    for step in range(num_steps):
        micros = [
            [models.batch(name, seed=1000 * step + 10 * micro + rank) for rank in range(num_ranks)]
            for micro in range(num_micro)
        ]
        # causal models predict the next token, so the first label of a sequence does not count
        num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for micro in micros for batch in micro)
        for index, micro in enumerate(micros):
            with subject.accumulating() if index < num_micro - 1 else nullcontext():
                loss = loss_of(subject(**micro[dist.get_rank()], num_items_in_batch=num_items)) * num_ranks
                loss.backward()
            losses.append(loss.detach())
        norms.append(subject.clip_grad_norm_(0.1).detach())
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    return Record(torch.stack(losses), torch.stack(norms), subject.weights())
