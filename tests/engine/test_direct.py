"""Weight gradients that are written where they are reduced are those of the stock modules."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.engine import direct, engine_of


pytestmark = [pytest.mark.direct, pytest.mark.quick]


class Net(nn.Module):
    """Embeddings with padding, linear modules with and without bias, and a head that may share the first weight."""

    def __init__(self, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8, padding_idx=3)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.head = nn.Linear(8, 11)
        if tied:
            self.head.weight = self.embed.weight
        self.segment = lambda x: self.down(F.gelu(self.up(x)))
        self.use_reentrant: bool | None = None

    def forward(self, ids):
        hidden = self.embed(ids)
        if self.use_reentrant is None:
            hidden = hidden + self.segment(hidden)
        else:
            hidden = hidden + checkpoint(self.segment, hidden, use_reentrant=self.use_reentrant)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


IDS = torch.tensor([[1, 3, 3, 7, 1], [2, 2, 9, 3, 10]])


def backward(net: nn.Module) -> None:
    net(IDS).backward()


def several_backwards(net: nn.Module) -> None:
    for _ in range(3):
        backward(net)


def changed_behind_the_forward(net: Net) -> None:
    """By a hook that sees the gradient, too, and by a weight that is frozen and gets none."""
    loss = net(IDS)
    net.up.weight.register_hook(lambda grad: 2 * grad)
    net.down.weight.requires_grad_(False)
    loss.backward()


def with_other_tensors(net: Net) -> None:
    """What stands in the place of a weight gets the gradient itself."""
    prune.l1_unstructured(net.up, "weight", 0.5)
    scaled = {"down.weight": net.down.weight * 3, "embed.weight": net.embed.weight * 2}
    torch.func.functional_call(net, scaled, (IDS,)).backward()


def under_autocast(net: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(net)


def _doubles(net: Net) -> None:
    for module in (net.embed, net.up, net.head):
        module.register_forward_hook(lambda _module, _args, output: output.mul_(2))


WEIGHTS = {"head.weight", "down.weight", "up.weight", "embed.weight"}
# What is done to the net before, what then, and the weights that are written directly.
CASES = {
    "none": (lambda net: None, backward, WEIGHTS),
    "checkpointing": (lambda net: setattr(net, "use_reentrant", False), backward, WEIGHTS),
    "reentrant checkpointing": (lambda net: setattr(net, "use_reentrant", True), backward, WEIGHTS),
    "an output that is written to": (_doubles, backward, WEIGHTS),
    "a hook on a weight": (
        lambda net: net.up.weight.register_hook(lambda grad: 2 * grad),
        backward,
        WEIGHTS - {"up.weight"},
    ),
    "several backwards": (lambda net: None, several_backwards, WEIGHTS),
    "changed behind the forward": (lambda net: None, changed_behind_the_forward, None),
    "other tensors": (lambda net: None, with_other_tensors, None),
    "autocast": (lambda net: None, under_autocast, None),
}


def compare(build, change, act, stage: int, exact: bool = True) -> list[str]:
    """Returns the names of the weights whose gradients are written in place, as they are."""
    plain, model = build(), build()
    engine = engine_of(hf_zero.shard(model, stage=stage))
    names: list[str] = []
    destination = direct.Sink.destination

    def recorded(sink):
        names.append(sink.gradient.flat.infos[sink.index].name)
        return destination(sink)

    with mock.patch.object(direct.Sink, "destination", recorded):
        for net in (plain, model):
            change(net)
            act(net)
    wanted = {name.removesuffix("_orig"): p.grad for name, p in plain.named_parameters()}
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-7}
    for name, grad in wanted.items():
        found = hf_zero.ShardedModel(engine.model).full_grad(name)
        assert (found is None) is (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found, grad, **tolerance, msg=lambda text, n=name: f"{n}: {text}")
    return names


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_bit_equal_to_those_of_the_stock_modules(name):
    change, act, directly = CASES[name]
    # in several backwards, sums of the same terms in another order
    names = compare(Net, change, act, stage=2, exact=act is not several_backwards)
    assert directly is None or set(names) == directly
    if act is several_backwards:
        compare(partial(Net, tied=True), change, act, stage=1, exact=False)


def test_autograd_grad_returns_the_gradient_and_leaves_the_buffers_alone():
    plain, model = Net(), Net()
    sharded = hf_zero.shard(model, stage=1)
    for net in (plain, model):
        net.taken = torch.autograd.grad(net(IDS), [net.up.weight, net.embed.weight])
    assert all(map(torch.equal, model.taken, plain.taken))
    assert sharded.full_grad("up.weight") is None
    backward(model)
    backward(plain)
    assert torch.equal(sharded.full_grad("up.weight"), plain.up.weight.grad)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _sequence(*modules: Callable[[], nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in modules)).to(dtype)


def test_modules_that_are_not_stock_are_left_alone_and_gpt2s_transposed_linear_is_not():
    from transformers.pytorch_utils import Conv1D

    def act(net):
        net(torch.linspace(-1, 1, 24).view(2, 3, 4).to(net[-1].weight.dtype)).sum().backward()

    doubled = partial(_sequence, partial(Doubled, 4, 4), partial(nn.Linear, 4, 2))
    assert compare(doubled, lambda net: None, act, stage=1) == ["1.weight"]
    for dtype in (None, torch.bfloat16):
        conv = partial(_sequence, partial(Conv1D, 6, 4), nn.Tanh, partial(Conv1D, 2, 6), dtype=dtype)
        assert compare(conv, lambda net: None, act, stage=1) == ["2.weight", "0.weight"]


def test_small_weights_go_the_ordinary_way(monkeypatch):
    monkeypatch.setattr(direct, "MIN_NUMEL", Net().up.weight.numel() + 1)
    assert compare(Net, lambda net: None, backward, stage=1) == []
