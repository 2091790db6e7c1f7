"""Runs of other programs go on here when `hf-zero convert` has converted their checkpoints: weights and moments are
theirs bit for bit, and their next steps those of the plain run that was not broken off."""

import pickle
import re
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict

import hf_zero
from hf_zero.checkpoint.convert import program_of
from hf_zero.checkpoint.manifest import check_checksums
from hf_zero.checkpoint.plain import load_plain_state
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError
from hf_zero.recipes.cli import main
from tests.checkpoint import foreign_runs
from tests.checkpoint.foreign_runs import NUM_STEPS, adamw, build, plain_run, train, write_deepspeed
from tests.checkpoint.subjects import run_ranks


STAGES_AND_RANKS = [(1, 1), (3, 1), (1, 2), (3, 2)]


def start(stage, make=adamw, **settings):
    """A fresh engine with values that are surely not those of the checkpoint."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    engine = engine_of(hf_zero.shard(model, stage=stage, **settings))
    return engine, hf_zero.ShardedOptimizer(engine, make(model))


def convert(folder, name="saved"):
    """Converts `folder/name` to `folder/new`, by the command line."""
    model, config = folder / "model", build().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(model)
    return main(["convert", str(folder / name), str(folder / "new"), "--model", str(model)])


def load(engine, optimizer, folder):
    hf_zero.load_weights(engine, folder)
    if (folder / "optimizer.pt").exists():
        load_plain_state(engine, optimizer, folder)
    else:
        hf_zero.load_state(engine, optimizer, folder)


def goes_on(comm, folder, stage, losses, weights):
    engine, optimizer = start(stage, lambda model: adamw(model, lr=5.0, betas=(0.1, 0.1)))
    load(engine, optimizer, folder)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert train(engine.model, optimizer, NUM_STEPS, 2 * NUM_STEPS) == pytest.approx(losses, rel=1e-5)
    with hf_zero.gathered(engine.model):
        for key, tensor in engine.model.state_dict().items():
            torch.testing.assert_close(tensor, weights[key], rtol=1e-5, atol=1e-6, msg=key)


def check_goes_on(folder, stage, num_ranks):
    model, optimizer = plain_run()
    losses = train(model, optimizer, NUM_STEPS, 2 * NUM_STEPS)
    weights = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    run_ranks(goes_on, num_ranks, folder, stage, losses, weights)


def check_values(folder, equal=torch.equal):
    """What was converted is the plain run's, and whole."""
    model, optimizer = plain_run()
    weights, state = load_file(folder / "model.safetensors"), load_file(folder / "zero" / "optimizer.safetensors")
    named = dict(model.named_parameters())
    assert weights.keys() == named.keys()
    assert all(equal(weights[name], p.detach()) for name, p in named.items())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    assert state.keys() == {f"{name}.{key}" for name in trained for key in ("exp_avg", "exp_avg_sq")}
    for name, p in trained.items():
        assert all(equal(state[f"{name}.{key}"], optimizer.state[p][key]) for key in ("exp_avg", "exp_avg_sq"))
    assert len(check_checksums(folder).tensors) == len(weights) + len(state)
    assert not list(folder.parent.glob("_saving*"))


# DeepSpeed


@pytest.mark.parametrize(
    ("from_stage", "from_ranks"), [(1, 1), (1, 2), (2, 3), pytest.param(3, 3, marks=pytest.mark.quick), (3, 1)]
)
def test_a_deepspeed_checkpoint_is_converted_bit_for_bit(tmp_path, from_stage, from_ranks):
    write_deepspeed(tmp_path / "saved", *plain_run(), from_stage, from_ranks)
    assert program_of(tmp_path / "saved").name == "DeepSpeed ZeRO"
    assert convert(tmp_path) == 0
    check_values(tmp_path / "new")


@pytest.mark.parametrize(
    ("from_stage", "from_ranks", "stage", "num_ranks"),
    [(3, 3, 1, 2), (1, 2, 3, 2), *((2, 3, *to) for to in STAGES_AND_RANKS)],
)
@pytest.mark.full("more cases", after=1)
def test_a_deepspeed_run_goes_on(tmp_path, from_stage, from_ranks, stage, num_ranks):
    write_deepspeed(tmp_path / "saved", *plain_run(), from_stage, from_ranks)
    assert convert(tmp_path) == 0
    check_goes_on(tmp_path / "new", stage, num_ranks)


@pytest.mark.parametrize("from_stage", [1, 3])
def test_a_deepspeed_run_in_bf16_gives_its_fp32_values(tmp_path, from_stage):
    model, optimizer = plain_run()
    write_deepspeed(tmp_path / "saved", model, optimizer, from_stage, 2, torch.bfloat16)
    assert convert(tmp_path) == 0
    for name, tensor in load_file(tmp_path / "new" / "model.safetensors").items():
        wanted = model.get_parameter(name).detach()
        assert torch.equal(tensor, wanted if model.get_parameter(name).requires_grad else wanted.bfloat16()), name


def cut_otherwise(comm, folder):
    engine, optimizer = start(
        1, lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters() if p.requires_grad])
    )
    load(engine, optimizer, folder)
    for (name,), group in zip(optimizer._group_names, optimizer.param_groups, strict=True):
        assert group["lr"] == 1e-2 and group["weight_decay"] == (0.0 if "norm" in name else 0.1), name


def test_groups_that_are_cut_otherwise_take_the_hyperparameters_of_their_parameters(tmp_path):
    write_deepspeed(tmp_path / "saved", *plain_run(), 1, 2)
    assert convert(tmp_path) == 0
    run_ranks(cut_otherwise, 1, tmp_path / "new")


def test_small_files_come_along_and_a_folder_that_is_not_empty_is_refused(tmp_path, capsys):
    write_deepspeed(tmp_path / "saved", *plain_run(), 1, 2)
    small = {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"}
    for name in small:
        torch.save({"last_epoch": 3}, tmp_path / "saved" / name)
    (tmp_path / "saved" / "zero_to_fp32.py").touch()
    (tmp_path / "new").mkdir()
    assert convert(tmp_path) == 0
    ours = {"config.json", "generation_config.json", "model.safetensors", "zero", "zero_manifest.json"}
    assert {path.name for path in (tmp_path / "new").iterdir()} == small | ours
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "new")]) == 2
    assert "exists and is not empty; give another folder" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "other")]) == 2
    assert "has no config of its model; name a folder or hub id that has it with --model" in capsys.readouterr().err


def goes_on_in_bf16(comm, folder, stage, losses):
    engine, optimizer = start(stage, compute_dtype=torch.bfloat16)
    load(engine, optimizer, folder)
    # A rounding of bf16 is 2**-9 of the logits, and the losses are means over them.
    assert train(engine.model, optimizer, NUM_STEPS, 2 * NUM_STEPS) == pytest.approx(losses, rel=1e-3)


# torch


def save_with_torch(comm, folder):
    """A run under FSDP on these ranks, saved in every way that torch and accelerate have."""
    from torch.distributed.fsdp import fully_shard

    model = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer, 0, NUM_STEPS)
    _save_dcp(folder, model, optimizer)
    _save_accelerate(folder / "sharded", model, optimizer, "SHARDED_STATE_DICT")
    _save_accelerate(folder / "full", model, optimizer, "FULL_STATE_DICT")
    _save_fsdp1(folder / "fsdp1")


def _save_dcp(folder, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "dcp")
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "dcp_flattened")


def _save_fsdp1(folder):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = build()
    policy = ModuleWrapPolicy([type(model.model.layers[0])])
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    named = {True: [], False: []}
    for name, parameter in model.named_parameters():  # 1-D, all of them
        if parameter.requires_grad:
            named["norm" in name].append(parameter)
    groups = [{"params": named[False], "weight_decay": 0.1}, {"params": named[True], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, betas=(0.8, 0.95))
    train(model, optimizer, 0, NUM_STEPS)
    configs = (ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True))
    _save_accelerate(folder, model, optimizer, "SHARDED_STATE_DICT", version=1, configs=configs)


def _save_accelerate(folder, model, optimizer, state_dict_type, *, version=2, configs=None):
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

    accelerator = SimpleNamespace(num_processes=dist.get_world_size(), process_index=dist.get_rank())
    weights_config, state_config = configs or (SimpleNamespace(offload_to_cpu=True, rank0_only=False), None)
    plugin = SimpleNamespace(
        fsdp_version=version,
        state_dict_type=StateDictType[state_dict_type],
        state_dict_config=weights_config,
        optim_state_dict_config=state_config,
    )
    PartialState(cpu=True)  # accelerate's logger wants it
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    PartialState._reset_state()


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    run_ranks(save_with_torch, 2, folder)
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param("dcp", marks=pytest.mark.quick), "dcp_flattened", "sharded", "full", "fsdp1"]
)
def test_an_fsdp_checkpoint_is_converted_as_it_is(torch_run, tmp_path, name):
    shutil.copytree(torch_run / name, tmp_path / "saved")
    assert program_of(tmp_path / "saved").name == ("torch.distributed.checkpoint" if "dcp" in name else "FSDP")
    assert convert(tmp_path) == 0
    # Two ranks have summed the gradients in another order than one.
    check_values(tmp_path / "new", partial(torch.allclose, rtol=1e-4, atol=1e-6))


@pytest.mark.parametrize("name", ["dcp", "dcp_flattened", "full"])
def test_torch_checkpoints_are_converted_bit_for_bit(tmp_path, name):
    model, optimizer = plain_run()
    if name == "full":
        (tmp_path / "saved").mkdir()
        torch.save(model.state_dict(), tmp_path / "saved" / "pytorch_model_fsdp.bin")
        torch.save(get_optimizer_state_dict(model, optimizer), tmp_path / "saved" / "optimizer.bin")
    else:
        _save_dcp(tmp_path, model, optimizer)
        (tmp_path / name).rename(tmp_path / "saved")
    assert convert(tmp_path) == 0
    check_values(tmp_path / "new")


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(("stage", "num_ranks"), STAGES_AND_RANKS)
def test_a_plain_run_goes_on(tmp_path, stage, num_ranks):
    """It is not converted: training reads it as it is."""
    model, optimizer = plain_run()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    check_goes_on(tmp_path, stage, num_ranks)


# What is refused


def refused(comm, folder, match, make=adamw, stage=3):
    engine, optimizer = start(stage, make)
    with pytest.raises(CheckpointError, match=match) as error:
        load(engine, optimizer, folder)
    assert "\n" not in str(error.value)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def trap_in_deepspeed(folder, torch_run):
    write_deepspeed(folder, *plain_run(), 2, 2)
    path = next(folder.glob("*/mp_rank_00_model_states.pt"))
    torch.save(torch.load(path, weights_only=True) | {"trap": Trap(folder.parent / "sprung")}, path)


def trap_in_an_index(name, folder, torch_run):
    kind, _, part = name.partition("/")
    shutil.copytree(torch_run / kind, folder)
    index = folder / part / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.version = Trap(folder.parent / "sprung")
    index.write_bytes(pickle.dumps(metadata))


def trap_among_objects(folder, torch_run):
    model, optimizer = plain_run()
    state = {"state": {}, "param_groups": [{"lr": Trap(folder.parent / "sprung"), "params": [1]}]}
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=folder, no_dist=True)


def another_model(folder, torch_run):
    model, optimizer = plain_run()
    model.model.layers[1].extra = torch.nn.Linear(2, 2)
    write_deepspeed(folder, model, optimizer, 2, 2)


def a_missing_weight(folder, torch_run):
    shutil.copytree(torch_run / "full", folder)
    weights = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    del weights["model.norm.weight"]
    torch.save(weights, folder / "pytorch_model_fsdp.bin")


def a_missing_rank(folder, torch_run):
    write_deepspeed(folder, *plain_run(), 3, 3)
    next(folder.glob("*/zero_pp_rank_2_*_optim_states.pt")).unlink()


def a_truncated_file(folder, torch_run):
    shutil.copytree(torch_run / "dcp", folder)
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:1000])


def an_unknown_kind(folder, torch_run):
    folder.mkdir()


RUNS_CODE = r"refers to (io|_io|builtins)\.open, which may run code"


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (trap_in_deepspeed, RUNS_CODE),
        (partial(trap_in_an_index, "dcp"), RUNS_CODE),
        (partial(trap_in_an_index, "sharded/optimizer_0"), RUNS_CODE),
        (trap_among_objects, "may run code"),
        (another_model, r"2 are not the model's \(model.layers.1.extra.weight, model.layers.1.extra.bias\)"),
        (a_missing_weight, r"1 tensors are missing \(model.norm.weight\)"),
        (a_missing_rank, "found optimizer states of 2 ranks, 3 saved"),
        (a_truncated_file, "cannot be read .*, copy it again"),
        (an_unknown_kind, "is no checkpoint of DeepSpeed"),
    ],
)
def test_what_cannot_be_converted_is_one_line_leaves_nothing_and_runs_nothing(
    tmp_path, torch_run, capsys, prepare, match
):
    prepare(tmp_path / "saved", torch_run)
    assert convert(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(match, said), said
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob("_*")) and not (tmp_path / "sprung").exists()


def test_code_in_optimizer_pt_is_refused_and_not_run(tmp_path):
    model, optimizer = plain_run()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict() | {"trap": Trap(tmp_path / "sprung")}, tmp_path / "optimizer.pt")
    run_ranks(refused, 2, tmp_path, "may run code")
    assert not (tmp_path / "sprung").exists()


def test_state_of_parameters_that_are_not_trained_is_refused(tmp_path):
    model = build()
    model.requires_grad_(True)
    optimizer = adamw(model)
    train(model, optimizer, 0, NUM_STEPS)
    write_deepspeed(tmp_path / "saved", model, optimizer, 3, 2)
    assert convert(tmp_path) == 0
    run_ranks(refused, 2, tmp_path / "new", "optimizer groups: the checkpoint has")


def sgd(model):
    return torch.optim.SGD(foreign_runs.groups_of(model), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.Adam(foreign_runs.groups_of(model), lr=0.1)


def adamw_in_one_group(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (sgd, "by an optimizer with betas"),
        (adam, "decoupled_weight_decay=True"),
        (adamw_in_one_group, "weight_decay is 0.1 for .*, 0.0 for .* use the groups of the run"),
    ],
)
def test_another_optimizer_is_refused(tmp_path, make, match):
    write_deepspeed(tmp_path / "saved", *plain_run(), 1, 2)
    assert convert(tmp_path) == 0
    run_ranks(refused, 2, tmp_path / "new", match, make)


def test_state_without_a_moment_is_refused(tmp_path):
    model, optimizer = plain_run()
    model.save_pretrained(tmp_path)
    for values in optimizer.state.values():
        del values["exp_avg_sq"]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    run_ranks(refused, 2, tmp_path, r"is exp_avg \[\d.*, but this run's is exp_avg \[\d.*, exp_avg_sq \[\d")
