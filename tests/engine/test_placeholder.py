"""What a parameter is while its data is away: everything but its values."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.errors import HfZeroError, LifecycleError
from tests.distributed import run_ranks
from tests.engine.models import WIDTH, Tower, inputs, loss_of
from tests.engine.reference import ALL_STAGES, SETTINGS, build_seeded, sgd, weights_of


pytestmark = pytest.mark.quick


LIMIT = 60.0


class Odd(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.row = nn.Parameter(torch.ones(1, 1, 1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, hidden):
        return hidden @ self.weight * self.number * self.single * self.row[0, 0] * self.low.float() * self.frozen


def odd_tower() -> Tower:
    return Tower(3, block=Odd)


def facts(p: torch.Tensor):
    return (
        id(p),
        type(p),
        p.shape,
        p.dtype,
        p.device,
        p.requires_grad,
        p.is_leaf,
        p.numel(),
        p.dim(),
        p.element_size(),
        p.nbytes,
        p.layout,
        len(p) if p.dim() else None,
        p.is_floating_point(),
    )


def _keeps_identity():
    for stage in ALL_STAGES:
        model = build_seeded(odd_tower)
        params = dict(model.named_parameters())
        before = {name: facts(p) for name, p in params.items()}
        hf_zero.shard(model, stage=stage, **SETTINGS)
        for moment in ("after sharding", "after training"):
            found = dict(model.named_parameters())
            assert found.keys() == params.keys()
            assert {name: facts(p) for name, p in found.items()} == before, f"stage {stage} {moment}"
            loss_of(model(inputs(dist.get_rank(), 0))).backward()


def test_parameters_keep_identity_shape_dtype_and_device():
    run_ranks(_keeps_identity, 2, timeout=LIMIT)


def _reads_nan():
    model = build_seeded(odd_tower)
    hf_zero.shard(model, stage=3, **SETTINGS)
    for name, p in model.named_parameters():
        if p.is_floating_point():
            assert bool(p.detach().isnan().all()), name
            assert bool((p.detach() * 2).isnan().all()), name
            assert bool(p.data.isnan().all()), name
        else:
            assert torch.equal(p.data, torch.zeros_like(p)), name


def test_a_read_gives_nan():
    run_ranks(_reads_nan, 2, timeout=LIMIT)


def _uses_little_memory():
    model = nn.Linear(1000, 1000)
    hf_zero.shard(model, stage=3, **SETTINGS)
    assert model.weight.untyped_storage().nbytes() <= 64


def test_a_placeholder_holds_one_element():
    run_ranks(_uses_little_memory, 2, timeout=LIMIT)


WRITES = {
    "fill_": lambda p: p.data.fill_(1.0),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "add_": lambda p: p.add_(1),
    "mul_": lambda p: p.data.mul_(2),
    "zero_": lambda p: p.zero_(),
    "normal_": lambda p: nn.init.normal_(p),
    "index": lambda p: p.__setitem__(..., 1),
}


@torch.no_grad()
def _writes_raise(num_elements):
    model = build_seeded(odd_tower)
    hf_zero.shard(model, stage=3, **SETTINGS)
    wanted = weights_of(model)
    silent = []
    for name, p in [*model.layers[0].named_parameters(), ("head.weight", model.head.weight)]:
        of_this_size = p.numel() > 1 if num_elements > 1 else p.numel() == 1
        if not of_this_size or not p.is_floating_point():
            continue
        for write, act in WRITES.items():
            if num_elements == 1 and write in ("add_", "mul_"):
                continue  # arithmetic on one NaN gives NaN: there is nothing to notice, and nothing to mistake
            try:
                act(p)
                model(inputs(0, 0))
                silent.append(f"{write} on {name} {tuple(p.shape)}")
            except (RuntimeError, HfZeroError):
                pass
            assert bool(p.isnan().all()), f"{write} on {name} is read as if it were the parameter's value"
    assert not silent, silent
    found = weights_of(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("num_elements", [2, 1], ids=["several elements", "one element"])
def test_a_write_raises_at_once_or_at_the_next_forward(num_elements):
    run_ranks(_writes_raise, 2, num_elements, timeout=LIMIT)


def _state_dict_raises():
    model = build_seeded(Tower)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = hf_zero.shard(model, stage=3, **SETTINGS)
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))

    def refused():
        for module in (model, model.layers, model.layers[1], model.layers[1].up, model.head):
            with pytest.raises(LifecycleError, match="gathered"):
                module.state_dict()
        with pytest.raises(LifecycleError):
            model.load_state_dict(wanted)

    refused()
    loss = loss_of(model(inputs(dist.get_rank(), 0)))
    with pytest.raises(LifecycleError):
        model.state_dict()
    loss.backward()
    refused()
    optimizer.zero_grad()
    with hf_zero.gathered(model):
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    refused()


def test_state_dict_outside_of_gathered_raises():
    run_ranks(_state_dict_raises, 2, timeout=LIMIT)


def _part_of_state_dict():
    """A part whose parameters are all whole may be saved inside a `gathered` of that part alone."""
    model = build_seeded(Tower)
    wanted = {name: tensor.clone() for name, tensor in model.layers[1].state_dict().items()}
    hf_zero.shard(model, stage=3, **SETTINGS)
    with hf_zero.gathered(model.layers[1]):
        found = {name: tensor.clone() for name, tensor in model.layers[1].state_dict().items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_state_dict_of_a_gathered_part_is_given():
    run_ranks(_part_of_state_dict, 2, timeout=LIMIT)


def _only_root_state_dict():
    """A model without blocks keeps its root whole between forward and backward, yet never hands it out."""
    model = nn.Linear(3, 2)
    engine = hf_zero.shard(model, stage=3, **SETTINGS)
    optimizer = hf_zero.ShardedOptimizer(engine, sgd(model.parameters()))
    loss_of(model(inputs(dist.get_rank(), 0))).backward()
    with pytest.raises(LifecycleError):
        model.state_dict()
    optimizer.step()
    with pytest.raises(LifecycleError):
        model.state_dict()


def test_the_state_dict_of_one_linear_raises():
    run_ranks(_only_root_state_dict, 2, timeout=LIMIT)


def _state_dict_below_stage_3():
    for stage in (0, 1, 2):
        model = build_seeded(Tower)
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        hf_zero.shard(model, stage=stage, **SETTINGS)
        found = model.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), f"stage {stage}"


def test_state_dict_is_whole_where_parameters_are():
    run_ranks(_state_dict_below_stage_3, 2, timeout=LIMIT)


def _copies_refused():
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        hf_zero.shard(model, stage=stage, **SETTINGS)
        with pytest.raises(HfZeroError, match="copied"):
            copy.deepcopy(model)
        with pytest.raises(HfZeroError, match="pickled"):
            pickle.dumps(model)


@pytest.mark.support("Copy of a sharded model", area="Models in one process", stages=ALL_STAGES, refused=True)
def test_deepcopy_and_pickle_are_refused():
    run_ranks(_copies_refused, 2, timeout=LIMIT)


def _copy_of_a_part():
    """A part that is copied without a word would hold NaN for good."""
    model = build_seeded(Tower)
    hf_zero.shard(model, stage=3, **SETTINGS)
    params, weight = list(model.parameters()), model.layers[1].up.weight
    for part in (model.layers[1], weight, params):
        with pytest.raises(HfZeroError, match="cannot be copied"):
            copy.deepcopy(part)
    average = torch.optim.swa_utils.AveragedModel(build_seeded(Tower, seed=8))
    for read in (average.update_parameters, lambda each: prune.l1_unstructured(each.layers[1].up, "weight", 0.5)):
        with pytest.raises(LifecycleError, match=r"would read parameters of a sharded model .* inside `with hf_zero"):
            read(model)
    with pytest.raises(LifecycleError, match="^parameters_to_vector: would read"):
        torch.nn.utils.parameters_to_vector(parameters=model.parameters())
    with hf_zero.gathered(model):
        average.update_parameters(model)
        assert torch.equal(copy.deepcopy(weight), weight)
        values = torch.nn.utils.parameters_to_vector(iter(params))
    reference = build_seeded(Tower)
    assert torch.equal(values, torch.nn.utils.parameters_to_vector(parameters=reference.parameters()))
    assert torch.equal(average.module.head.weight, reference.head.weight)


def test_what_reads_or_copies_a_part_while_its_data_is_away_is_refused():
    run_ranks(_copy_of_a_part, 2, timeout=LIMIT)


def test_only_parameters_that_go_away_refuse_to_be_copied():
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        hf_zero.shard(model, stage=stage, strict=True)
        attributes = dict(vars(model.layers[1].up.weight))
        assert ("__deepcopy__" in attributes) is (stage == 3)
        hf_zero.ShardedModel(model).unshard()
        assert "__deepcopy__" not in vars(model.layers[1].up.weight)
    other = nn.Parameter(torch.ones(1))
    vars(other).update(attributes)
    del model
    gc.collect()
    with pytest.raises(HfZeroError, match="cannot be copied"):
        copy.deepcopy(other)


def _shard_twice():
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        engine = engine_of(hf_zero.shard(model, stage=stage, **SETTINGS))
        wanted = weights_of(model)
        assert engine_of(hf_zero.shard(model, stage=stage, **SETTINGS)) is engine
        assert engine_of(model) is engine
        with pytest.raises(LifecycleError, match="sharded already"):
            hf_zero.shard(model, stage=(stage + 1) % 4, **SETTINGS)
        with pytest.raises(LifecycleError, match="sharded already"):
            hf_zero.shard(model, stage=stage, compute_dtype=torch.bfloat16, **SETTINGS)
        found = weights_of(model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert engine_of(Tower()) is None


def test_sharding_twice_changes_nothing_and_other_settings_are_refused():
    run_ranks(_shard_twice, 2, timeout=LIMIT)


def _moving():
    """`.to()` to where the model is already is what many libraries do in passing."""
    for stage in ALL_STAGES:
        model = build_seeded(Tower)
        hf_zero.shard(model, stage=stage, **SETTINGS)
        wanted = weights_of(model)
        model.to("cpu")
        model.to(torch.float32)
        model.train().eval()
        model.requires_grad_(True)
        found = weights_of(model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), f"stage {stage}"


def test_moving_a_model_to_where_it_is_changes_nothing():
    run_ranks(_moving, 2, timeout=LIMIT)


def _printing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_seeded(odd_tower)
        hf_zero.shard(model, stage=3, **SETTINGS)
        for p in model.parameters():
            repr(p)
        assert "Tower" in repr(model)
        assert sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in build_seeded(odd_tower).parameters()
        )


def test_a_sharded_model_can_be_printed_and_counted():
    run_ranks(_printing, 2, timeout=LIMIT)
