"""`save_state` and `load_state`: a run goes on bit for bit, at any stage; the checkpoint is a folder of a model."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

import hf_zero
from hf_zero.checkpoint import check_checkpoint
from hf_zero.errors import CheckpointError, ConfigError, UnsupportedError
from tests import models
from tests.accelerator import example
from tests.compare import weights_of
from tests.distributed import ranks, run_ranks


def _run(stage, folder, **settings):
    """Losses by step, weights, and the last rates."""
    accelerator = example.with_zero(stage, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    losses, _, rates, model = example.train(accelerator, folder, **settings)
    return losses, weights_of(model), rates


def _goes_on(folder, stage, other_stage, save_at, dropout):
    wanted, weights, rates = _run(stage, folder, dropout=dropout, save_at=save_at)
    assert len(wanted) == 2 * example.STEPS
    losses, again, rates_again = _run(other_stage, folder, dropout=dropout, go_on_at=save_at)
    assert losses == {step: loss for step, loss in wanted.items() if step >= save_at}
    assert all(torch.equal(weights[name], again[name]) for name in weights) and rates == rates_again


@pytest.mark.parametrize(
    "stage, other_stage, save_at, dropout",
    [(3, 3, example.STEPS, 0.1), (3, 1, 3, 0.0), (2, 3, 7, 0.0)],
    ids=["dropout, at an epoch's end", "3 to 1, within an epoch", "2 to 3, within an epoch"],
)
def test_a_run_goes_on_bit_for_bit(tmp_path, stage, other_stage, save_at, dropout):
    run_ranks(_goes_on, 2, str(tmp_path / "state"), stage, other_stage, save_at, dropout, timeout=120)
    run = check_checkpoint(tmp_path / "state").run
    assert run.step == save_at and run.loss > 0 and run.grad_norm > 0
    assert sorted(os.listdir(tmp_path)) == ["state"]


def _trained(folder):
    return _run(3, folder, save_at=3, num_steps=3)[1]


def _loaded(folder):
    return _run(3, folder, go_on_at=3, num_steps=3)[1]


def test_another_number_of_ranks_loads_it(tmp_path):
    folder = str(tmp_path / "state")
    (wanted, _) = run_ranks(_trained, 2, folder, timeout=120)
    for found in run_ranks(_loaded, 3, folder, timeout=120):
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_several_models_are_saved_and_loaded_each_with_its_optimizer(tmp_path, stage):
    """Two that are trained, and a judge that is not."""
    folder = tmp_path / "state"
    saved = []
    for seed in (0, 1):
        accelerator = example.with_zero(stage)
        judge = accelerator.prepare_model(models.build("llama", seed=seed + 5), evaluation_mode=True)
        assert not any(p.requires_grad for p in judge.parameters())
        built = {name: models.build(name, seed=seed) for name in ("mlp", "bert")}
        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-2) for name, model in built.items()}
        accelerator.prepare(*built.values())
        optimizers = {name: accelerator.prepare(optimizer) for name, optimizer in optimizers.items()}
        for name in built if seed == 0 else ():
            output = built[name](**models.batch(name, seed=dist.get_rank()))
            accelerator.backward(output.loss if hasattr(output, "loss") else output.square().mean())
            optimizers[name].step()
            optimizers[name].zero_grad()
        (accelerator.save_state if seed == 0 else accelerator.load_state)(folder)
        states = {
            f"{name}.{key}.{shard.name}": shard.tensor.clone()
            for name in built
            for key, shard in optimizers[name].optimizer.named_state_shards()
        }
        weights = {name: weights_of(model) for name, model in {"judge": judge, **built}.items()}
        saved.append((weights, states))
    (weights, states), (weights_again, states_again) = saved
    for name, found in weights.items():
        assert all(torch.equal(weight, weights_again[name][key]) for key, weight in found.items())
    assert states and states.keys() == states_again.keys()
    assert all(torch.equal(state, states_again[key]) for key, state in states.items())
    for each in (folder, folder / "model_1", folder / "model_2"):
        check_checkpoint(each)
    dist.barrier()
    if dist.get_rank() == 0:
        path = folder / "model_2" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    dist.barrier()
    with pytest.raises(CheckpointError, match="model_2/model.safetensors"):
        accelerator.load_state(folder)
    accelerator._models.pop()
    with pytest.raises(CheckpointError, match="has more models than the 2 prepared ones"):
        accelerator.load_state(folder)
    assert not (folder / "zero").exists() and (folder / "model_2" / "zero").exists()


def _refuses_to_lose(accelerator, folder):
    from peft import LoraConfig, get_peft_model

    accelerator = example.with_zero()
    model = get_peft_model(example.bert(), LoraConfig(r=2, target_modules=["query"]))
    model.base_model.model.classifier.requires_grad_(True)
    accelerator.prepare(model)
    with pytest.raises(UnsupportedError, match="classifier.weight: is trained but not saved .* modules_to_save"):
        accelerator.save_state(f"{folder}/lost")


@ranks(2)
def test_adapters_are_saved_as_peft_does(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    found = []
    for seed in (0, 1):
        accelerator = example.with_zero()
        torch.manual_seed(3)
        base = example.bert()
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if seed == 0:
            accelerator.backward(model(**example.collate(example.rows(4, dist.get_rank()))).loss)
            optimizer.step()
            accelerator.save_state(f"{tmp_path}/state")
            accelerator.save_model(model, f"{tmp_path}/model")
            model.save_pretrained(f"{tmp_path}/plain", is_main_process=accelerator.is_main_process)
            _refuses_to_lose(accelerator, tmp_path)
        else:
            accelerator.load_state(f"{tmp_path}/state")
        found.append((weights_of(model), optimizer.optimizer.num_steps))
    assert found[0][1] == found[1][1] == 1
    assert all(torch.equal(weight, found[1][0][name]) for name, weight in found[0][0].items())
    for name in ("state", "model", "plain"):
        torch.manual_seed(3)
        loaded = PeftModel.from_pretrained(example.bert(), f"{tmp_path}/{name}")
        assert all(torch.equal(p, found[0][0][key]) for key, p in loaded.named_parameters())


@ranks(2)
def test_numbered_checkpoints_the_oldest_of_which_go(tmp_path):
    settings = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = example.with_zero(project_config=settings)
    model = models.build("mlp")
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    accelerator.register_save_state_pre_hook(lambda models, weights, path: seen.append((models, weights)))
    for _ in range(4):
        accelerator.save_state()
    assert seen == [([], [])] * 4
    wanted = weights_of(model)
    with hf_zero.gathered(model, writeback=True):
        for p in model.parameters():
            p.data.zero_()
    accelerator.load_state()
    assert all(torch.equal(wanted[name], found) for name, found in weights_of(model).items())
    settings.iteration = 3
    with pytest.raises(ConfigError, match="checkpoint_3: already exists"):
        accelerator.save_state()
    settings.automatic_checkpoint_naming = False
    for act in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(ConfigError, match="automatic_checkpoint_naming=True"):
            act()
    with pytest.raises(CheckpointError, match="nowhere: does not exist; pass a folder of save_state"):
        accelerator.load_state(f"{tmp_path}/nowhere")
    with pytest.raises(ConfigError, match="save_state: no model is prepared"):
        example.with_zero().save_state(tmp_path)
    dist.barrier()
    assert sorted(path.name for path in Path(tmp_path, "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
