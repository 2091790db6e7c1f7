"""Which parameters form a unit, for the structures of real models: no class name is given by the user."""

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.partition import canonical_names, partition, refuse_what_cannot_be_sharded
from hf_zero.errors import UnsupportedError
from tests import models
from tests.architectures.compare import build
from tests.architectures.walk import Case
from tests.engine.models import WIDTH, Block, Tower


pytestmark = pytest.mark.quick


def units_of(model: nn.Module) -> list[str]:
    """The units' names, after a check that every parameter is in exactly one, under its first name."""
    parts = partition(model)
    specs = [parts.root, *(spec for stack in parts.stacks for spec in stack.units)]
    held = [name for spec in specs for name in spec.params]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())
    assert len({id(p) for spec in specs for p in spec.params.values()}) == len(held)
    for stack in parts.stacks:
        modules = {id(module) for module in stack.owner.modules()}
        for spec in stack.units:
            is_held = id(spec.module) in modules
            assert is_held is (spec is not stack.head), f"{spec.name}: its owner holds blocks and embedding, no head"
            inside = {id(p) for p in spec.module.parameters()}
            assert all(id(p) in inside for p in spec.params.values()), f"{spec.name}: a parameter of another block"
            assert spec.params, f"{spec.name}: holds nothing"
    return [spec.name for spec in specs[1:]]


def numbered(*stacks: tuple[str, int]) -> list[str]:
    return [f"{path}.{index}" for path, count in stacks for index in range(count)]


def tiny(model_type: str, class_name: str) -> nn.Module:
    return build(Case(model_type, "", class_name))


WHISPER = "whisper", "WhisperForConditionalGeneration"
# Models and their units.
UNITS = {
    "llama": numbered(("model.layers", 3)),
    "gpt2": numbered(("transformer.h", 3)),
    "bert": numbered(("bert.encoder.layer", 3)),
    "t5": numbered(("encoder.block", 3), ("decoder.block", 2)),
    "vit": None,  # the path differs between versions of transformers
    "mixtral": numbered(("model.layers", 3)),
    ("clip", "CLIPModel"): numbered(("text_model.encoder.layers", 3), ("vision_model.encoder.layers", 3)),
    WHISPER: numbered(("model.encoder.layers", 3), ("model.decoder.layers", 3)),
}


def built(name) -> nn.Module:
    return models.build(name) if isinstance(name, str) else tiny(*name)


@pytest.mark.parametrize("name", UNITS)
def test_the_blocks_of_a_transformer_are_its_units(name):
    model, wanted = built(name), UNITS[name]
    found = units_of(model)
    if wanted is None:
        assert len(found) == model.config.num_hidden_layers
        assert len({type(model.get_submodule(name)) for name in found}) == 1
    else:
        assert sorted(found) == sorted(wanted)


def test_the_units_of_swin_cover_all_its_blocks():
    model = tiny("swin", "SwinModel")
    found = units_of(model)
    blocks = [name for name, module in model.named_modules() if type(module).__name__ == "SwinLayer"]
    assert len(blocks) == sum(model.config.depths) > 4
    for block in blocks:
        assert any(block == unit or block.startswith(unit + ".") for unit in found), f"{block} is left to the root"


def test_layers_that_albert_shares_are_one_unit():
    model = models.build("albert")
    found = units_of(model)
    assert len(found) <= 1
    parts = partition(model)
    layer = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    held = [spec for stack in parts.stacks for spec in stack.units] or [parts.root]
    names = canonical_names(model)
    assert {names[id(p)] for p in layer.parameters()} <= set(held[0].params)


def test_blocks_around_which_an_adapter_library_wraps():
    peft = pytest.importorskip("peft")
    model = models.build("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    found = units_of(wrapped)
    assert found == numbered(("base_model.model.model.layers", 3))
    spec = partition(wrapped).stacks[0].units[0]
    assert any("lora_A" in name for name in spec.params)


def used_twice() -> Tower:
    model = Tower(3)
    model.layers[2] = model.layers[0]
    return model


def longest_within() -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Sequential(*(Block() for _ in range(5))), nn.Linear(WIDTH, 2))


PLAIN = {
    "a list of blocks": (lambda: Tower(4), numbered(("layers", 4))),
    "a sequential": (lambda: nn.Sequential(*(Block() for _ in range(4))), ["0", "1", "2", "3"]),
    "the longest sequential within one": (longest_within, numbered(("1", 5))),
    "a block at two places": (used_twice, ["layers.0", "layers.1"]),
    "a linear": (lambda: nn.Linear(3, 2), []),
    "no parameters": (nn.Tanh, []),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_units_of_plain_modules(name):
    make, wanted = PLAIN[name]
    assert [unit.lstrip(".") for unit in units_of(make())] == wanted
    refuse_what_cannot_be_sharded(make())


def test_experts_of_unnamed_blocks_do_not_hide_the_blocks():
    """Each block has more experts than the model has blocks; blocks or experts may be the units, nothing else."""

    class Experts(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(7))

        def forward(self, hidden):
            return sum(expert(hidden) for expert in self.experts)

    found = units_of(Tower(3, block=Experts))
    assert all(name.startswith("layers.") for name in found) and len(found) in (3, 21)


def test_containers_without_a_forward_are_no_units():
    model = nn.Module()
    model.towers = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(3))
    assert sorted(units_of(model)) == sorted(f"towers.{tower}.{block}" for tower in range(3) for block in range(2))
    for stack in partition(model).stacks:
        assert not isinstance(stack.owner, nn.ModuleList), "a ModuleList is never called: it cannot end a pass"


def test_a_parameter_that_several_modules_have_is_the_roots_and_held_once():
    model = Tower(4)
    model.layers[3].up.weight = model.layers[0].up.weight
    model.out = nn.Linear(WIDTH, 2 * WIDTH)
    model.out.weight = model.layers[1].up.weight
    model.again = model.layers[2].norm
    model.first = model.layers[0]  # a block under another name is a block
    units_of(model)
    held = partition(model).root.params.keys()
    shared = {name for name in held if name.startswith("layers.")}
    assert shared == {"layers.0.up.weight", "layers.1.up.weight", "layers.2.norm.weight", "layers.2.norm.bias"}
    model = models.build("llama-tied")
    units_of(model)
    assert "model.embed_tokens.weight" in partition(model).root.params
    assert "lm_head.weight" not in partition(model).root.params


def test_an_embedding_and_a_head_that_are_large_and_not_tied_are_units(monkeypatch):
    model, blocks = models.build("llama"), UNITS["llama"]
    monkeypatch.setattr("hf_zero.engine.partition.VOCABULARY_NUMEL", models.VOCAB * models.HIDDEN)
    assert units_of(model) == ["model.embed_tokens", *blocks, "lm_head"]
    assert set(partition(model).root.params) == {"model.norm.weight"}
    assert units_of(model.model) == numbered(("layers", 3)), (
        "without a head the embedding has nothing to share memory with"
    )
    model.lm_head.forward_hidden = nn.Linear(2, 2)
    model.model.norm.weight = model.lm_head.forward_hidden.weight
    assert units_of(model) == blocks, "a parameter of the head is used elsewhere"
    model = models.build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert units_of(model) == blocks
    for name in ("gpt2", "t5", WHISPER):
        assert sorted(units_of(built(name))) == sorted(UNITS[name])


def test_an_embedding_or_a_head_of_another_class_is_the_roots(monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("hf_zero.engine.partition.VOCABULARY_NUMEL", 0)
    for target in ("embed_tokens", "lm_head"):
        model = models.build("llama")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", target]))
        assert units_of(wrapped) == numbered(("base_model.model.model.layers", 3))
    wrapped = peft.get_peft_model(models.build("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    apart = [name for name in units_of(wrapped) if "layers" not in name]
    assert apart == ["base_model.model.model.embed_tokens", "base_model.model.lm_head"]


def test_an_embedding_is_the_roots_that_may_be_used_otherwise_than_by_a_call_before_the_blocks(monkeypatch):
    monkeypatch.setattr("hf_zero.engine.partition.VOCABULARY_NUMEL", 0)
    model, blocks = models.build("llama"), UNITS["llama"]
    assert units_of(model) != blocks
    model.model.embed_tokens.max_norm = 1.0
    assert units_of(model) == blocks, "its forward writes to it"
    model = models.build("llama")
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert units_of(model) == blocks, "its weight is computed, and the backward of that needs values"
    model = models.build("llama")
    model.model.forward = lambda **inputs: type(model.model).forward(model.model, **inputs)
    assert units_of(model) == blocks, "other code may use the weights anywhere"


def test_empty_parameters_are_held_too():
    model = Tower(2)
    model.layers[0].empty = nn.Parameter(torch.empty(0, 3))
    model.layers[1] = nn.Identity()
    units_of(model)


class Labelled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(3),
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2, device="meta")),  # loaded in part
        lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]),
        lambda: nn.ParameterList([nn.Parameter(torch.randn(3).as_subclass(Labelled))]),
    ],
    ids=["lazy", "meta", "sparse", "subclass"],
)
def test_parameters_that_are_no_dense_tensors_are_refused_by_name(make):
    model = nn.Module()
    model.inner = make()
    with pytest.raises(UnsupportedError, match=r"inner\."):
        refuse_what_cannot_be_sharded(model)


class Held(nn.Module):
    """A module with one buffer."""

    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("0", buffer)


def test_a_trained_parameter_that_shares_its_memory_is_refused_by_name():
    def of(make):
        model = nn.Module()
        model.encoder = nn.Linear(4, 3)
        model.decoder = make(model.encoder.weight)
        return model

    for make in (lambda w: nn.ParameterList([w.detach().t()]), lambda w: Held(w.data[1:])):
        with pytest.raises(UnsupportedError, match=r"encoder.weight, decoder.0: share memory .* tie them"):
            refuse_what_cannot_be_sharded(of(make))
    refuse_what_cannot_be_sharded(of(make).requires_grad_(False))  # nothing changes there
    whole = torch.zeros(8)
    refuse_what_cannot_be_sharded(nn.ParameterList([whole[:4], whole[4:]]))  # beside one another
    frozen = [nn.Parameter(part, requires_grad=False) for part in (whole, whole[1:3])]
    with pytest.raises(UnsupportedError, match="0, 2: share memory"):
        refuse_what_cannot_be_sharded(nn.ParameterList([*frozen, whole[4:]]))  # the second has ended before it


def _keeps(make) -> nn.Module:
    model = nn.Module()
    model.inner = nn.Linear(4, 3)
    model.inner.kept = make(model.inner.weight)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.t(),
        lambda w: w.data,
        lambda w: w.detach()[:, 1],
        lambda w: [None, w[1:]],
        lambda w: (w.data.view(-1),),
        lambda w: {"weight": w.data},
    ],
    ids=["view", "data", "column", "list", "tuple", "dict"],
)
def test_a_view_of_a_trained_parameter_that_a_module_keeps_is_refused_by_name(make):
    with pytest.raises(UnsupportedError, match=r"^inner\.kept: is a view or alias of inner\.weight"):
        refuse_what_cannot_be_sharded(_keeps(make))
    refuse_what_cannot_be_sharded(_keeps(make).requires_grad_(False))


def test_what_a_module_keeps_beside_its_parameters_is_not_refused():
    for make in (
        lambda w: w,
        lambda w: [w],
        lambda w: w.detach().clone(),
        lambda w: {"weight": w.t().contiguous()},
        lambda w: w.detach()[:0],
        lambda w: w.detach().to_sparse(),
    ):
        refuse_what_cannot_be_sharded(_keeps(make))
    refuse_what_cannot_be_sharded(nn.LSTM(3, 4))  # which lists its parameters


def _trained_in(dtype: torch.dtype) -> nn.Module:
    model = Tower(2)
    model.layers[1].up.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH, dtype=torch.float32).to(dtype))
    return model


@pytest.mark.parametrize(
    ("dtype", "remedy"), [(torch.complex64, "view_as_real"), (torch.float8_e4m3fn, "cast it to bfloat16")]
)
def test_a_trained_parameter_whose_gradients_cannot_be_averaged_is_refused_by_name(dtype, remedy):
    model = _trained_in(dtype)
    shown = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedError, match=f"layers.1.up.weight: is trained in {shown}, .*{remedy}"):
        hf_zero.shard(model, stage=2)
    model.layers[1].up.weight.requires_grad_(False)
    refuse_what_cannot_be_sharded(model)


def test_a_model_that_another_wrapper_averages_is_refused():
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    for model, name in ((wrapped, "model"), (nn.Sequential(wrapped), "0")):
        with pytest.raises(UnsupportedError, match=f"^{name}: is wrapped by DataParallel, .*its .module"):
            hf_zero.shard(model)
