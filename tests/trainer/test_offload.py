"""Offload under `ZeroTrainer`: the same bits as without, and checkpoints that go on either way."""

import pytest
from transformers import TrainerCallback

from hf_zero.optim import sharded_of
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.trainer.harness import Rows, assert_learned, make, record, seed_everything, train


LIMIT = 300.0
PLACES = [(2, "optimizer"), (3, "params")]
each_place = pytest.mark.parametrize("stage, offload", PLACES)
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5, "gradient_accumulation_steps": 2}


def feature(name: str):
    return pytest.mark.support(name, area="Offload")


class ClipsLater(TrainerCallback):
    """Clips from the third step on."""

    def on_step_begin(self, args, state, control, **kwargs):
        args.max_grad_norm = 0.05 if state.global_step >= 2 else 0.0


def _built(name: str = "llama"):
    seed_everything()
    return models.build(name)


def _watch(trainer) -> list:
    """The units that were updated while backward still ran."""
    updated, prepare = [], trainer.accelerator.prepare_optimizer

    def watched(*args, **kwargs):
        prepared = prepare(*args, **kwargs)
        host = sharded_of(prepared)._host
        post = host._post
        host._post = lambda *given: (updated.append(given[-1]), post(*given))
        return prepared

    trainer.accelerator.prepare_optimizer = watched
    return updated


@pytest.mark.quick(cases=1)
@feature("ZeroTrainer: accumulation and clipping; bf16 without clipping, updated in backward")
@each_place
@ranks(2, timeout=LIMIT)
def test_a_trainer_that_offloads_gives_the_same_bits(tmp_path, stage, offload):
    later = {"bf16": True, "max_grad_norm": 0.0, "parts": {"callbacks": [ClipsLater()]}}
    for settings in ({"gradient_accumulation_steps": 2}, later):
        plain = train(stage, tmp_path, "llama", **settings)
        trainer = make(stage, tmp_path, _built(), Rows("llama"), zero_offload=offload, **settings)
        stepped_early = _watch(trainer)
        trainer.train()
        assert_equal(record(trainer), plain, f"{settings}")
        assert bool(stepped_early) is (settings.get("max_grad_norm") == 0.0), "without clipping, in backward"


@pytest.mark.full("more cases", after=1)
@feature("PEFT: LoRA over a frozen base, gradient checkpointing")
@each_place
@ranks(2, timeout=LIMIT)
def test_adapters_train_with_offload(tmp_path, stage, offload):
    from peft import LoraConfig, get_peft_model

    def adapted():
        seed_everything()
        return get_peft_model(
            models.build("llama"), LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
        )

    settings = {"learning_rate": 1e-2, "bf16": True, "gradient_checkpointing": True}
    plain = train(stage, tmp_path, "llama", model=adapted(), **settings)
    assert_learned(plain)
    away = train(stage, tmp_path, "llama", model=adapted(), zero_offload=offload, **settings)
    assert_equal(away, plain, "LoRA over a frozen base")


@pytest.mark.full("more cases", after=1)
@feature("Resuming with and without offload, background saves")
@each_place
@ranks(2, timeout=LIMIT)
def test_a_checkpoint_goes_on_with_and_without_offload(tmp_path, stage, offload):
    away = {"zero_offload": offload, "bf16": True}
    plain = train(1, f"{tmp_path}/plain", "llama-tied", bf16=True, **SAVING)
    saved = train(stage, f"{tmp_path}/away", "llama-tied", zero_async_save=True, **away, **SAVING)
    assert_equal(saved, plain, "saved in the background, offloaded, and not")
    back = train(1, tmp_path, "llama-tied", resume=f"{tmp_path}/away/checkpoint-3", bf16=True, **SAVING)
    assert_equal(back, plain, "saved offloaded, resumed on the device")
    there = train(stage, tmp_path, "llama-tied", resume=f"{tmp_path}/plain/checkpoint-3", **away, **SAVING)
    assert_equal(there, plain, "saved from the device, resumed offloaded")
