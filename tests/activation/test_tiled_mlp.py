"""MLPs that compute a tile of tokens at a time: to rounding what all tokens at once give, in less memory."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activation.tiled_mlp import find_mlps
from hf_zero.errors import ConfigError, UnsupportedError
from tests import models
from tests.activation.subjects import added_at_the_peak
from tests.compare import assert_close, assert_equal
from tests.distributed import ranks
from tests.tiers import more
from tests.training import Sharded, adamw, train, train_accumulating


HIDDEN, INNER = 24, 56


class Mlp(nn.Module):
    """A gated MLP with a norm and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden):
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, dim=-1)
        return self.dropout(self.down(self.dropout(nn.functional.silu(gate) * up)))


class Block(nn.Module):
    """A residual block around an MLP."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return hidden + self.mlp(hidden)


def _blocks(make=Mlp, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(make()) for _ in range(2)))


def _loss_and_gradients(name: str, num_tiles: int, checkpoints: str = "") -> tuple:
    model = models.build(name)
    if checkpoints:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": checkpoints == "reentrant"}
        )
        model.train()
    sharded = hf_zero.shard(model, stage=3, strict=True, tiled_mlp=num_tiles)
    loss = model(**models.batch(name, seed=1)).loss
    loss.backward()
    return loss.detach(), {key: sharded.full_grad(key) for key, _ in model.named_parameters()}


def _assert_near(found: tuple, wanted: tuple) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
    for key, grad in wanted[1].items():
        assert (grad is None) is (found[1][key] is None)
        if grad is not None:
            torch.testing.assert_close(found[1][key], grad, rtol=1e-5, atol=1e-8 + 1e-6 * grad.abs().max(), msg=key)


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    "name, checkpoints",
    [("llama", ""), ("gpt2", ""), ("llama", "reentrant"), ("llama", "non-reentrant"), *more(("t5", ""), ("vit", ""))],
)
def test_loss_and_gradients_are_those_of_all_tokens(name, checkpoints):
    plain = _loss_and_gradients(name, 1)
    for num_tiles in (3, 1000):
        _assert_near(_loss_and_gradients(name, num_tiles, checkpoints), plain)


def test_a_tile_draws_the_same_in_the_backward():
    """Dropout, forward and backward, is that of tiles that autograd keeps."""
    plain = _blocks()
    tiled = copy.deepcopy(plain)
    hf_zero.shard(tiled, stage=3, strict=True, tiled_mlp=2)
    x = torch.randn(2, 5, HIDDEN)
    results = []
    for model, is_tiled in ((tiled, True), (plain, False)):
        torch.manual_seed(7)
        given = x.clone().requires_grad_()
        out = model(given) if is_tiled else _by_tiles(model, given)
        after = torch.get_rng_state()
        torch.manual_seed(8)
        out.square().sum().backward()
        results.append((out.detach(), given.grad, after, torch.get_rng_state()))
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted)
    found = hf_zero.ShardedModel(tiled).full_grad("0.mlp.down.weight")
    torch.testing.assert_close(found, plain[0].mlp.down.weight.grad)


def _by_tiles(model: nn.Sequential, hidden: torch.Tensor) -> torch.Tensor:
    for block in model:
        tiles = hidden.view(1, -1, HIDDEN).split(5, dim=1)
        hidden = hidden + torch.cat([block.mlp(tile) for tile in tiles], dim=1).view(hidden.shape)
    return hidden


@pytest.mark.full("slow")
@pytest.mark.parametrize(
    "name, dtype, trains",
    [
        ("llama", None, train),
        ("gpt2", None, train),
        ("llama", torch.bfloat16, train),
        ("llama", None, train_accumulating),
    ],
)
@ranks(2)
def test_stages_give_equal_bits(name, dtype, trains):
    records = {}
    for stage in (0, 1, 2, 3):
        subject = Sharded(models.build(name), adamw, stage, compute_dtype=dtype, tiled_mlp=3)
        records[stage] = trains(subject, name, num_steps=2)
    for one, other in ((0, 1), (2, 3)):
        assert_equal(records[one], records[other], f"{name}: stages {one} and {other}")
    if trains is train:
        assert_equal(records[0], records[3], f"{name}: stages 0 and 3")
    if dtype is None:
        plain = trains(Sharded(models.build(name), adamw, 3, compute_dtype=dtype), name, num_steps=2)
        assert_close(records[3], plain, name)


def test_memory_is_less_by_the_inner_activations_but_one_tile():
    """Plain autograd keeps four inner tensors of each block for its backward: what gate and up give, the activation
    and the product. With tiles they are those of a tile, at the peak with the gradients of two; and two copies of the
    hidden states, of which the peak of plain has one too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, hidden, inner, layers = 512, 16, 512, 2
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    batch = dict.fromkeys(("input_ids", "labels"), torch.ones(1, tokens, dtype=torch.int64))
    peaks = {}
    for num_tiles in (1, 8):
        model = LlamaForCausalLM(config).train()
        hf_zero.shard(model, stage=3, tiled_mlp=num_tiles)
        peaks[num_tiles] = added_at_the_peak(model, batch)
    one_inner = tokens * inner * 4
    assert peaks[1] - peaks[8] > (4 * layers - 7 / 8) * one_inner * 0.98, {k: v / one_inner for k, v in peaks.items()}


def test_a_checkpointed_block_computes_its_mlp_twice_in_all():
    from torch.utils.checkpoint import checkpoint

    counts: dict[int, list[int]] = {}
    for num_tiles in (1, 4):
        model = _blocks()
        hf_zero.shard(model, stage=3, strict=True, tiled_mlp=num_tiles)
        seen = counts[num_tiles] = []
        model[0].mlp.down.register_forward_pre_hook(partial(_note_tokens, seen))
        given = torch.randn(2, 6, HIDDEN, requires_grad=True)
        hidden = checkpoint(model[0], given, use_reentrant=False)
        model[1](hidden).sum().backward()
    assert sum(counts[1]) == sum(counts[4]) == 2 * 12
    assert counts[4] == [3] * 8  # hooks inside run for each tile


def _note_tokens(seen: list[int], _module, args) -> None:
    seen.append(args[0].shape[:-1].numel())


def test_hooks_on_the_mlp_run_once():
    model = _blocks()
    hf_zero.shard(model, stage=3, strict=True, tiled_mlp=4)
    seen = []
    model[0].mlp.register_forward_hook(lambda _module, _args, out: seen.append(out.shape))
    model(torch.randn(2, 6, HIDDEN)).sum().backward()
    assert seen == [(2, 6, HIDDEN)]


@pytest.mark.parametrize("after", [False, True])
def test_hooks_on_parameters_see_whole_gradients(after):
    """They are called once for each backward, so all tokens are then computed at once."""
    found = []
    for num_tiles in (1, 4):
        model = _blocks().eval()
        sharded = hf_zero.shard(model, stage=2, tiled_mlp=num_tiles)
        weight, seen = model[0].mlp.down.weight, []
        if after:
            weight.register_post_accumulate_grad_hook(lambda param, seen=seen: seen.append(param.grad.sum()))
        else:
            weight.register_hook(lambda grad, seen=seen: (seen.append(grad.sum()), grad.clamp(-0.01, 0.01))[1])
        model(torch.linspace(-1, 1, 12 * HIDDEN).view(1, 12, HIDDEN)).square().sum().backward()
        found.append((torch.stack(seen), sharded.full_grad("0.mlp.down.weight")))
    torch.testing.assert_close(*found)


def test_inputs_of_any_strides_are_computed():
    model = _blocks().eval()
    tiled = copy.deepcopy(model)
    hf_zero.shard(tiled, stage=2, tiled_mlp=3)
    given, grads = torch.randn(HIDDEN, 4, 2).permute(2, 1, 0), []
    for each in (model, tiled):
        leaf = given.detach().requires_grad_()
        each(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_torch_autograd_grad_is_refused():
    model = _blocks()
    hf_zero.shard(model, stage=2, tiled_mlp=3)
    x = torch.randn(1, 7, HIDDEN, requires_grad=True)
    with pytest.raises(UnsupportedError, match="tiled_mlp: torch.autograd.grad is not supported; call loss.backward"):
        torch.autograd.grad(model(x).square().sum(), x)


def test_autocast_and_frozen_inputs_have_the_same_gradients():
    plain = _blocks().eval()
    plain[0].requires_grad_(False)
    tiled = copy.deepcopy(plain)
    sharded = hf_zero.shard(tiled, stage=3, strict=True, tiled_mlp=3)
    x = torch.randn(1, 8, HIDDEN)
    for model in (plain, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().sum().backward()
    assert sharded.full_grad("1.mlp.down.weight") is not None
    for name, param in plain.named_parameters():
        if param.grad is not None:
            difference = (sharded.full_grad(name) - param.grad).norm() / param.grad.norm()
            assert difference < 2**-8, name


def test_tiles_follow_the_number_of_tokens():
    model = _blocks().eval()
    hf_zero.shard(model, stage=3, strict=True, tiled_mlp="auto")
    seen: list[int] = []
    model[0].mlp.down.register_forward_pre_hook(partial(_note_tokens, seen))
    with torch.no_grad():
        for length in (HIDDEN, HIDDEN + 1):
            model(torch.randn(1, length, HIDDEN))
    assert seen == [HIDDEN, HIDDEN, 1]


class Router(nn.Linear):
    def __init__(self):
        super().__init__(HIDDEN, 2)


def _kind(name: str, part: Callable[[], nn.Module] = nn.Identity, forward=Mlp.forward) -> type[Mlp]:
    """A class like `Mlp` with another name, a further part, or another forward."""

    def __init__(self):
        Mlp.__init__(self)
        self.part = part()

    return type(name, (Mlp,), {"__init__": __init__, "forward": forward})


RoutedMlp = _kind("RoutedMlp", Router)
NO_MLPS = [
    _kind("BatchNormedMlp", partial(nn.BatchNorm1d, HIDDEN)),
    _kind("ConvolvingMlp", partial(nn.Conv1d, HIDDEN, HIDDEN, 3)),
    _kind("ScaledMlp", forward=lambda self, hidden, scale: Mlp.forward(self, hidden) * scale),
    RoutedMlp,
    _kind("Mixer"),
]


@pytest.mark.parametrize("kind", NO_MLPS)
def test_what_is_no_mlp_is_refused(kind):
    with pytest.raises(UnsupportedError, match="tiled_mlp: no block of Sequential has an MLP"):
        hf_zero.shard(_blocks(kind), stage=3, tiled_mlp=2)


def test_experts_are_not_tiled():
    with pytest.raises(UnsupportedError, match="no block of MixtralForCausalLM has an MLP"):
        hf_zero.shard(models.build("mixtral"), stage=3, tiled_mlp=2)
    assert list(find_mlps(nn.Sequential(Block(Mlp()), Block(RoutedMlp()), Block(Shared())))) == [
        "0.mlp",
        "2.mlp.shared",
    ]


class Shared(nn.Module):
    """An MLP for all tokens beside a choice of a router."""

    def __init__(self):
        super().__init__()
        self.shared, self.router = Mlp(), nn.Linear(HIDDEN, 2)

    def forward(self, hidden):
        return self.shared(hidden) * self.router(hidden).topk(1, dim=-1).values


def test_mlps_are_found_where_they_are():
    def names(model):
        return set(find_mlps(model))

    assert all(name.endswith(".mlp") for name in names(models.build("llama")) | names(models.build("gpt2")))
    assert len(names(models.build("llama"))) == len(models.build("llama").model.layers) > 1
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear")
    adapted = peft.get_peft_model(models.build("llama"), config)
    assert all(name.endswith(".mlp") for name in names(adapted)) and len(names(adapted)) == len(
        names(models.build("llama"))
    )


def test_bad_settings_are_refused():
    for value in (0, -1, "two", 1.5, True):
        with pytest.raises(ConfigError, match="tiled_mlp"):
            hf_zero.shard(_blocks(), stage=3, tiled_mlp=value)
    model = _blocks()
    sharded = hf_zero.shard(model, stage=3, strict=True, tiled_mlp=2)
    with pytest.raises(UnsupportedError, match="tiled_mlp: does not work with compiled blocks"):
        hf_zero.compile_blocks(sharded, backend="eager")
