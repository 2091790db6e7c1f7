"""PEFT adapters over sharded models: few trainable parameters in blocks of frozen ones."""

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import Manifest
from hf_zero.errors import CheckpointError
from tests import models
from tests.distributed import run_ranks
from tests.trainer.harness import (
    PLAIN,
    Rows,
    assert_close,
    assert_equal,
    assert_learned,
    make,
    record,
    seed_everything,
    train,
    weights_of,
)


pytest.importorskip("peft")


def _lora(name: str = "llama", **settings):
    from peft import LoraConfig, get_peft_model

    base = models.build(name)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)
    return get_peft_model(base, config)


def _trains(folder):
    runs = {kind: train(kind, folder, "llama", model=_lora(), learning_rate=1e-2) for kind in (1, 2, 3, PLAIN)}
    assert_learned(runs[PLAIN])
    start = weights_of(_lora())
    for stage in (1, 2, 3):
        assert_equal(runs[stage], runs[1], f"stage {stage} and stage 1")
        assert_close(runs[stage], runs[PLAIN], f"stage {stage} and Trainer")
        for name, weight in runs[stage].weights.items():
            assert torch.equal(weight, start[name]) is ("lora" not in name), name


def test_adapters_train_at_every_stage_as_under_trainer(tmp_path):
    run_ranks(_trains, 2, str(tmp_path), timeout=240)


def _saves_and_resumes(folder, stage):
    from peft import PeftModel

    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, "gradient_checkpointing": True}
    head = {"modules_to_save": ["lm_head"]}  # a trained copy of a whole module, saved with the adapter
    whole = train(stage, folder, "llama", model=_lora(**head), **settings)
    resumed = train(stage, folder, "llama", model=_lora(**head), resume=f"{folder}/checkpoint-2", **settings)
    assert_equal(resumed, whole, f"stage {stage}: resumed and unbroken")
    loaded = PeftModel.from_pretrained(models.build("llama"), f"{folder}/checkpoint-4")
    names = dict(loaded.named_parameters())
    assert names.keys() == whole.weights.keys()
    for name, weight in whole.weights.items():
        assert torch.equal(names[name], weight), f"stage {stage}: {name}"


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_are_saved_whole_and_resume(tmp_path, stage):
    run_ranks(_saves_and_resumes, 2, str(tmp_path), stage, timeout=240)
    size = (tmp_path / "checkpoint-4" / "adapter_model.safetensors").stat().st_size
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    # 3 layers, q and v, A and B of rank 3, and the head; in all below 24 KB with the header
    assert size < 24_000, "only the adapters are saved"
    name = "adapter_model.safetensors"
    assert len(Manifest.read(tmp_path / "checkpoint-4").checksums[name]) == 3 * 2 * 2 + 1
    with open(tmp_path / "checkpoint-4" / name, "r+b") as file:
        file.seek(-2, 2)
        file.write(b"?!")
    run_ranks(_refuses_damage, 2, str(tmp_path), stage, timeout=240)


def _refuses_damage(folder, stage):
    model = _lora(modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match="adapter_model.safetensors: tensor '.*' has checksum"):
        train(stage, folder, "llama", model=model, resume=f"{folder}/checkpoint-4", learning_rate=1e-2)


def _two_adapters(folder):
    from peft import LoraConfig, PeftModel

    model = _lora()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    seed_everything()
    trainer = make(3, folder, model, Rows("llama"), learning_rate=1e-2)
    trainer.train()
    trainer.save_model()
    wanted = weights_of(trainer.model)
    loaded = PeftModel.from_pretrained(models.build("llama"), folder)
    loaded.load_adapter(f"{folder}/other", adapter_name="other")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, wanted[name]), name


def test_an_adapter_at_rest_is_saved_beside_the_one_in_training(tmp_path):
    run_ranks(_two_adapters, 2, str(tmp_path), timeout=240)


def _keeps_the_best(folder):
    settings = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3}
    settings |= {"load_best_model_at_end": True, "learning_rate": 0.2}
    runs = {}
    for kind in (3, PLAIN):
        seed_everything()
        parts = {"eval_dataset": Rows("llama", 5, seed=1)}
        trainer = make(kind, f"{folder}/{kind}", _lora(), Rows("llama"), parts=parts, **settings)
        trainer.train()
        runs[kind] = record(trainer)
        evaluated = trainer.evaluate()["eval_loss"]
        assert evaluated == pytest.approx(min(runs[kind].evals), rel=1e-6)
    assert min(runs[3].evals) != runs[3].evals[-1], "the best was not to be the last"
    assert_close(runs[3], runs[PLAIN], "stage 3 and Trainer", rtol=1e-3, atol=1e-3)


def test_the_best_adapters_are_loaded_at_the_end(tmp_path):
    run_ranks(_keeps_the_best, 2, str(tmp_path), timeout=240)


def _prompts(folder):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(models.build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    trainer = make(3, folder, model, Rows("llama"))
    with pytest.raises(hf_zero.errors.UnsupportedError, match="LoRA"):
        trainer.save_model()


def test_learned_prompts_are_refused_with_a_reason(tmp_path):
    run_ranks(_prompts, 1, str(tmp_path), timeout=240)
