"""Small models whose structure, not size, is what the engine's tests are about."""

import torch
from torch import Tensor, nn


WIDTH = 6  # divides by none of the world sizes 4, 5, so that shards end inside parameters


class Block(nn.Module):
    """A residual block with matrices, vectors and a normalisation."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Tower(nn.Module):
    """Embedding, blocks, head. `order` is which blocks a forward calls, one after the other."""

    def __init__(self, num_blocks: int = 4, width: int = WIDTH, block=Block):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.layers = nn.ModuleList(block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 2)
        self.order = list(range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(through([self.layers[index] for index in self.order], self.embed(x)))


def through(blocks, hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = block(hidden)
    return hidden


def inputs(rank: int, step: int, shape: tuple[int, ...] = (5, 3), salt: int = 0) -> Tensor:
    """A batch that depends on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + 100_000 * salt)
    return torch.randn(shape, generator=generator)


def token_ids(rank: int, step: int, vocab_size: int = 32, shape: tuple[int, ...] = (2, 7)) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
    return torch.randint(1, vocab_size, shape, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """A loss whose gradient is different at every element."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    return (weights * (output - 0.3) ** 2).mean()


def one_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """A forward: what most tests let the model do in a step."""
    return loss_of(model(inputs(rank, step)))


def one_backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    loss = one_loss(model, rank, step)
    loss.backward()
    return [loss.detach()]
