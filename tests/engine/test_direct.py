"""Weight gradients that are written where they are reduced are those of the stock modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.engine import ZeroEngine, direct, engine_of


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


def gradients(model: nn.Module, engine: ZeroEngine | None = None, times: int = 1) -> dict[str, torch.Tensor]:
    for _ in range(times):
        model(IDS).backward()
    if engine is None:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        info.name: grad
        for info in engine.param_infos()
        if (grad := hf_zero.ShardedModel(engine.model).full_grad(info.name)) is not None
    }


def written_directly(monkeypatch) -> list[str]:
    """The names of the weights whose gradients are written in place, as they are."""
    names: list[str] = []
    destination = direct.Sink.destination

    def recorded(sink):
        names.append(sink.gradient.flat.infos[sink.index].name)
        return destination(sink)

    monkeypatch.setattr(direct.Sink, "destination", recorded)
    return names


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], exact: bool = True) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        if exact:
            assert torch.equal(found[name], grad), name
        else:
            torch.testing.assert_close(
                found[name], grad, rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
            )


def _doubles(net: Net) -> None:
    for module in (net.embed, net.up, net.head):
        module.register_forward_hook(lambda _module, _args, output: output.mul_(2))


# What is done to the net, and the weights that are not written directly then.
CHANGES = {
    "none": (lambda net: None, set()),
    "checkpointing": (lambda net: setattr(net, "use_reentrant", False), set()),
    "reentrant checkpointing": (lambda net: setattr(net, "use_reentrant", True), set()),
    "an output that is written to": (_doubles, set()),
    "a hook on a weight": (lambda net: net.up.weight.register_hook(lambda grad: 2 * grad), {"up.weight"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_bit_equal_to_those_of_the_stock_modules(monkeypatch, change):
    plain, model = Net(), Net()
    act, apart = CHANGES[change]
    engine = engine_of(hf_zero.shard(model, stage=2))
    for net in (plain, model):
        act(net)
    names = written_directly(monkeypatch)
    assert_same(gradients(model, engine), gradients(plain))
    assert set(names) == {"head.weight", "down.weight", "up.weight", "embed.weight"} - apart


def test_gradients_of_a_tied_weight_and_of_several_backwards_are_added_up():
    plain, model = Net(tied=True), Net(tied=True)
    engine = engine_of(hf_zero.shard(model, stage=1))
    # sums of the same terms in another order
    assert_same(gradients(model, engine, times=3), gradients(plain, times=3), exact=False)


def test_a_hook_that_comes_after_the_forward_sees_the_gradient_too_and_what_is_frozen_gets_none():
    plain, model = Net(), Net()
    engine = engine_of(hf_zero.shard(model, stage=1))
    for net in (plain, model):
        loss = net(IDS)
        net.up.weight.register_hook(lambda grad: 2 * grad)
        net.down.weight.requires_grad_(False)
        loss.backward()
    assert torch.equal(hf_zero.ShardedModel(engine.model).full_grad("up.weight"), plain.up.weight.grad)
    assert hf_zero.ShardedModel(engine.model).full_grad("down.weight") is plain.down.weight.grad is None


def test_another_tensor_in_the_place_of_the_weight_gets_the_gradient_itself():
    plain, model = Net(), Net()
    engine = engine_of(hf_zero.shard(model, stage=1))
    for net in (plain, model):
        prune.l1_unstructured(net.up, "weight", 0.5)
        scaled = {"down.weight": net.down.weight * 3, "embed.weight": net.embed.weight * 2}
        torch.func.functional_call(net, scaled, (IDS,)).backward()
    wanted = {"up.weight": plain.up.weight_orig, "down.weight": plain.down.weight, "embed.weight": plain.embed.weight}
    for name, p in wanted.items():
        assert torch.equal(hf_zero.ShardedModel(engine.model).full_grad(name), p.grad), name


def test_autocast_gives_what_it_gives_the_stock_modules():
    plain, model = Net(), Net()
    engine = engine_of(hf_zero.shard(model, stage=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = gradients(model, engine), gradients(plain)
    assert_same(found, wanted)


def test_autograd_grad_returns_the_gradient_and_leaves_the_buffers_alone():
    plain, model = Net(), Net()
    engine = engine_of(hf_zero.shard(model, stage=1))
    weights = [model.up.weight, model.embed.weight]
    wanted = torch.autograd.grad(plain(IDS), [plain.up.weight, plain.embed.weight])
    for found, grad in zip(torch.autograd.grad(model(IDS), weights), wanted):
        assert torch.equal(found, grad)
    assert hf_zero.ShardedModel(engine.model).full_grad("up.weight") is None
    assert_same(gradients(model, engine), gradients(plain))


def test_modules_that_are_not_stock_are_left_alone(monkeypatch):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def build():
        torch.manual_seed(0)
        return nn.Sequential(Doubled(4, 4), nn.Linear(4, 2))

    plain, model = build(), build()
    engine = engine_of(hf_zero.shard(model, stage=1))
    names = written_directly(monkeypatch)
    x = torch.randn(3, 4)
    plain(x).sum().backward()
    model(x).sum().backward()
    assert torch.equal(hf_zero.ShardedModel(engine.model).full_grad("0.weight"), plain[0].weight.grad)
    assert names == ["1.weight"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gpt2s_transposed_linear_is_served_too(monkeypatch, dtype):
    from transformers.pytorch_utils import Conv1D

    def build():
        torch.manual_seed(0)
        return nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(2, 6)).to(dtype)

    plain, model = build(), build()
    engine = engine_of(hf_zero.shard(model, stage=1))
    names = written_directly(monkeypatch)
    x = torch.randn(2, 3, 4, dtype=dtype)
    plain(x).sum().backward()
    model(x).sum().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    assert_same({name: hf_zero.ShardedModel(engine.model).full_grad(name) for name in wanted}, wanted)
    assert names == ["2.weight", "0.weight"]


def test_small_weights_go_the_ordinary_way(monkeypatch):
    plain, model = Net(), Net()
    monkeypatch.setattr(direct, "MIN_NUMEL", model.up.weight.numel() + 1)
    engine = engine_of(hf_zero.shard(model, stage=1))
    names = written_directly(monkeypatch)
    assert_same(gradients(model, engine), gradients(plain))
    assert names == []
