"""Runs of other programs go on here: their next steps are those of the plain run that was not broken off."""

import shutil

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint.foreign import carried, detect, load_foreign
from hf_zero.engine import engine_of
from hf_zero.errors import CheckpointError
from tests.checkpoint import foreign_runs
from tests.checkpoint.fakes import run_ranks
from tests.checkpoint.foreign_runs import NUM_STEPS, adamw, build, plain_run, train, write_deepspeed


STAGES_AND_RANKS = [(1, 1), (3, 1), (1, 2), (3, 2)]


def start(stage, make=adamw, **settings):
    """A fresh engine with values that are surely not those of the checkpoint."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    engine = engine_of(hf_zero.shard(model, stage=stage, **settings))
    return engine, hf_zero.ShardedOptimizer(engine, make(model))


def goes_on(comm, folder, name, stage, losses, weights):
    engine, optimizer = start(stage, lambda model: adamw(model, lr=5.0, betas=(0.1, 0.1)))
    load_foreign(engine, optimizer, folder / name)
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert train(engine.model, optimizer, NUM_STEPS, 2 * NUM_STEPS) == pytest.approx(losses, rel=1e-5)
    with hf_zero.gathered(engine.model):
        for key, tensor in engine.model.state_dict().items():
            torch.testing.assert_close(tensor, weights[key], rtol=1e-5, atol=1e-6, msg=key)


def check_goes_on(tmp_path, name, stage, num_ranks):
    model, optimizer = plain_run()
    losses = train(model, optimizer, NUM_STEPS, 2 * NUM_STEPS)
    weights = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    run_ranks(goes_on, num_ranks, tmp_path, name, stage, losses, weights)


# DeepSpeed


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    ("from_stage", "from_ranks", "stage", "num_ranks"),
    [
        *((1, 2, *to) for to in STAGES_AND_RANKS),
        *((3, 3, *to) for to in STAGES_AND_RANKS),
        (2, 3, 3, 2),
        (3, 1, 1, 2),
    ],
)
@pytest.mark.full("more cases", after=3)
def test_a_deepspeed_run_goes_on(tmp_path, from_stage, from_ranks, stage, num_ranks):
    write_deepspeed(tmp_path / "saved", *plain_run(), from_stage, from_ranks)
    assert detect(tmp_path / "saved").name == "DeepSpeed ZeRO"
    assert carried(tmp_path / "saved").num_steps == NUM_STEPS
    check_goes_on(tmp_path, "saved", stage, num_ranks)


@pytest.mark.parametrize("from_stage", [1, 3])
def test_a_deepspeed_run_in_bf16_gives_its_fp32_values(tmp_path, from_stage):
    model, optimizer = plain_run()
    write_deepspeed(tmp_path / "saved", model, optimizer, from_stage, 2, torch.bfloat16)
    run_ranks(bf16_values, 2, tmp_path, {name: p.detach() for name, p in model.named_parameters()})


def bf16_values(comm, folder, weights):
    engine, optimizer = start(3, compute_dtype=torch.bfloat16)
    load_foreign(engine, optimizer, folder / "saved")
    for shard in engine.named_shards():
        wanted = weights[shard.name].reshape(-1)[shard.start : shard.start + shard.tensor.numel()]
        frozen = not weights[shard.name].requires_grad and "up_proj" in shard.name and "layers.0" in shard.name
        assert torch.equal(shard.tensor, wanted.bfloat16().to(shard.tensor.dtype) if frozen else wanted), shard.name


def goes_on_in_bf16(comm, folder, stage, losses):
    engine, optimizer = start(stage, compute_dtype=torch.bfloat16)
    load_foreign(engine, optimizer, folder / "saved")
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
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

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


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(
    ("name", "stage", "num_ranks"),
    [
        *(("dcp", *to) for to in STAGES_AND_RANKS),
        ("dcp_flattened", 3, 2),
        ("sharded", 1, 1),
        ("sharded", 3, 2),
        ("full", 1, 2),
        ("full", 3, 1),
        ("fsdp1", 3, 2),
    ],
)
@pytest.mark.full("more cases", after=3)
def test_an_fsdp_run_goes_on(torch_run, name, stage, num_ranks):
    check_goes_on(torch_run, name, stage, num_ranks)


def test_fsdp2_folders_are_known_by_their_files(torch_run):
    names = {name: detect(torch_run / name).name for name in ("dcp", "sharded", "full")}
    assert names == {"dcp": "torch distributed checkpoint", "sharded": "FSDP", "full": "FSDP"}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize(("stage", "num_ranks"), STAGES_AND_RANKS)
def test_a_plain_run_goes_on(tmp_path, stage, num_ranks):
    model, optimizer = plain_run()
    model.save_pretrained(tmp_path / "saved")
    torch.save(optimizer.state_dict(), tmp_path / "saved" / "optimizer.pt")
    check_goes_on(tmp_path, "saved", stage, num_ranks)


# What is refused


def refused(comm, folder, match, make=adamw, stage=3):
    engine, optimizer = start(stage, make)
    with pytest.raises(CheckpointError, match=match) as error:
        load_foreign(engine, optimizer, folder / "saved")
    assert "\n" not in str(error.value)


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_deepspeed_files_is_refused_and_not_run(tmp_path):
    write_deepspeed(tmp_path / "saved", *plain_run(), 2, 2)
    path = next((tmp_path / "saved").glob("*/mp_rank_00_model_states.pt"))
    torch.save(torch.load(path, weights_only=True) | {"trap": Trap(tmp_path / "sprung")}, path)
    run_ranks(refused, 2, tmp_path, r"names (io|_io|builtins)\.open, which may run code")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["dcp", "sharded/optimizer_0"])
def test_code_in_the_index_of_a_torch_checkpoint_is_refused_and_not_run(torch_run, tmp_path, name):
    import pickle

    shutil.copytree(torch_run / name.partition("/")[0], tmp_path / "saved")
    index = tmp_path / "saved" / name.partition("/")[2] / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.version = Trap(tmp_path / "sprung")
    index.write_bytes(pickle.dumps(metadata))
    run_ranks(refused, 2, tmp_path, r"names (io|_io|builtins)\.open, which may run code")
    assert not (tmp_path / "sprung").exists()


def test_code_among_the_objects_of_a_torch_checkpoint_is_refused_and_not_run(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, optimizer = plain_run()
    state = {"state": {}, "param_groups": [{"lr": Trap(tmp_path / "sprung"), "params": [1]}]}
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
    run_ranks(refused, 1, tmp_path, "may run code")
    assert not (tmp_path / "sprung").exists()


def test_code_in_optimizer_pt_is_refused_and_not_run(tmp_path):
    model, optimizer = plain_run()
    model.save_pretrained(tmp_path / "saved")
    torch.save(optimizer.state_dict() | {"trap": Trap(tmp_path / "sprung")}, tmp_path / "saved" / "optimizer.pt")
    run_ranks(refused, 2, tmp_path, "may run code")
    assert not (tmp_path / "sprung").exists()


def test_another_model_is_refused_by_the_names_that_differ(tmp_path):
    model, optimizer = plain_run()
    model.model.layers[1].extra = torch.nn.Linear(2, 2)
    write_deepspeed(tmp_path / "saved", model, optimizer, 2, 2)
    run_ranks(refused, 2, tmp_path, r"2 are not this run's \(model.layers.1.extra.weight, model.layers.1.extra.bias\)")


def test_missing_weights_are_named(tmp_path, torch_run):
    shutil.copytree(torch_run / "full", tmp_path / "saved")
    path = tmp_path / "saved" / "pytorch_model_fsdp.bin"
    weights = torch.load(path, weights_only=True)
    del weights["model.norm.weight"]
    torch.save(weights, path)
    run_ranks(refused, 2, tmp_path, r"1 tensors are missing \(model.norm.weight\)")


def test_state_of_parameters_that_are_not_trained_is_refused(tmp_path):
    model = build()
    model.requires_grad_(True)
    optimizer = adamw(model)
    train(model, optimizer, 0, NUM_STEPS)
    write_deepspeed(tmp_path / "saved", model, optimizer, 3, 2)
    run_ranks(refused, 2, tmp_path, r"1 are not this run's \(model.layers.0.mlp.up_proj.weight\)")


def sgd(model):
    return torch.optim.SGD(foreign_runs.groups_of(model), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.Adam(foreign_runs.groups_of(model), lr=0.1)


def adamw_in_one_group(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (sgd, "by an optimizer without momentum"),
        (adam, "decoupled_weight_decay=True"),
        (adamw_in_one_group, "weight_decay is 0.1 for .*, 0.0 for .* make the groups as in the run"),
    ],
)
def test_another_optimizer_is_refused(tmp_path, make, match):
    write_deepspeed(tmp_path / "saved", *plain_run(), 1, 2)
    run_ranks(refused, 2, tmp_path, match, make)


def test_state_without_a_moment_is_refused(tmp_path):
    model, optimizer = plain_run()
    model.save_pretrained(tmp_path / "saved")
    for values in optimizer.state.values():
        del values["exp_avg_sq"]
    torch.save(optimizer.state_dict(), tmp_path / "saved" / "optimizer.pt")
    run_ranks(refused, 2, tmp_path, r"is \['exp_avg'\], this run's \['exp_avg', 'exp_avg_sq'\]")


def test_files_of_a_rank_that_are_missing_are_noticed(tmp_path):
    write_deepspeed(tmp_path / "saved", *plain_run(), 3, 3)
    next((tmp_path / "saved").glob("*/zero_pp_rank_2_*_optim_states.pt")).unlink()
    run_ranks(refused, 2, tmp_path, "found optimizer states of 2 ranks, 3 saved")


def test_a_truncated_file_is_one_clear_error(tmp_path, torch_run):
    shutil.copytree(torch_run / "dcp", tmp_path / "saved")
    path = tmp_path / "saved" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:1000])
    run_ranks(refused, 2, tmp_path, "ends inside .*, copy it again")


def test_a_folder_of_no_known_kind_is_refused(tmp_path):
    (tmp_path / "saved").mkdir()
    run_ranks(refused, 1, tmp_path, "is no checkpoint of DeepSpeed")
