"""Adapters over bases in 4 and 8 bits: bitsandbytes' weights are sharded as bytes, other quantizers refused early."""

import json

import pytest
import torch

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.engine.opaque import is_opaque
from hf_zero.errors import UnsupportedError
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
from tests.tiers import in_core
from tests.trainer.harness import PLAIN, Rows, assert_close, assert_learned, make, record, seed_everything


pytest.importorskip("peft")

KINDS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4 bits, quantized twice, stored as bf16": {
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "8 bits": {"load_in_8bit": True},
}
ALWAYS = (("4 bits", 3), ("8 bits", 3))
TRAIN = {"learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture
def base(tmp_path):
    """A folder with an ordinary model, to be quantized as it is loaded."""
    pytest.importorskip("bitsandbytes", reason="bases in 4 and 8 bits are those of bitsandbytes")
    models.build("llama").save_pretrained(tmp_path / "base")
    return str(tmp_path)


def _quantized(folder: str, kind: str, **settings):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = {"quantization_config": BitsAndBytesConfig(**KINDS[kind]), "dtype": torch.float32, **settings}
    return AutoModelForCausalLM.from_pretrained(f"{folder}/base", **settings)


def _with_adapter(model, r: int = 3):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=r, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model.train(), config)


def _bytes_of(model) -> dict[str, torch.Tensor]:
    with hf_zero.gathered(model):
        return {name: p.data.clone().view(torch.uint8) for name, p in model.named_parameters() if is_opaque(p)}


def _train(folder: str, run: str, kind: str, stage, resume=None, **settings):
    """What a training leaves behind, without the quantized weights, and its trainer."""
    model = _with_adapter(_quantized(folder, kind))
    for module in model.modules() if stage == PLAIN else ():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # an evaluation would repack it, and end its gradients
    seed_everything()
    parts = {"eval_dataset": Rows("llama", 5, seed=1)}
    trainer = make(stage, f"{folder}/{run}", model, Rows("llama"), parts=parts, **{**TRAIN, **settings})
    trainer.train(resume_from_checkpoint=resume)
    left = record(trainer)
    opaque = {name for name, p in model.named_parameters() if is_opaque(p)}
    left.weights = {name: weight for name, weight in left.weights.items() if name not in opaque}
    return left, trainer


def _trains_as_under_trainer(folder, kind, stage):
    from peft import PeftModel

    plain, _ = _train(folder, "plain", kind, PLAIN)
    assert_learned(plain)
    run, trainer = _train(folder, "zero", kind, stage)
    assert_close(run, plain, f"{kind}, stage {stage}")
    quantized, found = _bytes_of(_with_adapter(_quantized(folder, kind))), _bytes_of(trainer.model)
    assert len(found) == 7 * models.LAYERS and found.keys() == quantized.keys()
    assert all(torch.equal(found[name], quantized[name]) for name in found)

    again, _ = _train(folder, "again", kind, stage, f"{folder}/zero/checkpoint-2")
    assert_equal(again, run, f"{kind}, stage {stage}: resumed and unbroken")
    loaded = PeftModel.from_pretrained(_quantized(folder, kind), f"{folder}/zero/checkpoint-4")
    adapter = {name: p for name, p in loaded.named_parameters() if "lora" in name}
    assert len(adapter) == 6 * models.LAYERS
    assert all(torch.equal(p, run.weights[name]) for name, p in adapter.items())

    held = sum(s.tensor.nbytes for s in engine_of(trainer.model).named_shards(resident=True) if s.name in found)
    whole = sum(weight.numel() for weight in quantized.values())
    report = trainer.memory_report()
    trained = sum(p.numel() for p in adapter.values()) * 4
    # on two ranks: half of the adapter's two moments, and of its gradient where that is sharded; padding beyond that
    assert trained <= report.optimizer_nbytes <= 1.1 * trained + 4096
    assert report.gradient_nbytes <= (1.1 * trained + 4096 if stage == 1 else 0.6 * trained + 4096)
    return held, whole


@pytest.mark.quick(cases=1)
@pytest.mark.support("Base in {kind} (bitsandbytes)", area="Adapters")
@pytest.mark.parametrize(
    ("kind", "stage"),
    in_core(ALWAYS, [(kind, stage) for kind in KINDS for stage in (1, 2, 3)]),
)
def test_an_adapter_over_a_quantized_base_trains_as_under_trainer(base, kind, stage):
    held, whole = zip(*run_ranks(_trains_as_under_trainer, 2, base, kind, stage, timeout=240))
    assert sum(held) == whole[0] and max(held) < 0.6 * whole[0], "each rank holds its part of the bytes"


@pytest.mark.full("more cases", after=1)
@pytest.mark.support("Base in {kind} (bitsandbytes)", area="Adapters", stages=(2, 3))
@pytest.mark.parametrize("kind", ["4 bits, quantized twice, stored as bf16", "8 bits"])
@ranks(2, timeout=240)
def test_a_base_that_was_prepared_with_checkpointing_and_used_trains_as_under_trainer(base, kind):
    from peft import prepare_model_for_kbit_training

    def run(stage, **settings):
        model = _quantized(base, kind, device_map={"": "cpu"})
        model = _with_adapter(prepare_model_for_kbit_training(model))
        if stage == 3:
            model.eval()(**models.batch("llama", 0))  # the 8-bit layers take their bytes out of the parameters
            model.train()
        seed_everything()
        settings |= {"gradient_checkpointing": True, "learning_rate": 1e-2, "max_steps": 3}
        trainer = make(stage, f"{base}/{stage}", model, Rows("llama"), **settings)
        trainer.train()
        left = record(trainer)
        left.weights = {name: weight for name, weight in left.weights.items() if "lora" in name}
        return left

    wanted = run(PLAIN)
    for stage in (2, 3):
        for shared in (True, False):
            what = f"{kind}, stage {stage}, shared memory {shared}"
            assert_close(run(stage, zero_shared_memory=shared), wanted, what)


@pytest.mark.support("4-bit base that was evaluated before, on a CPU with AVX512-BF16", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_reordered_for_the_cpu_are_refused(base, stage):
    model = _with_adapter(_quantized(base, "4 bits"))
    name, weight = next((name, p) for name, p in model.named_parameters() if is_opaque(p))
    weight.quant_state.packing_format_for_cpu = True  # as the first evaluation leaves it on such a CPU
    with pytest.raises(UnsupportedError, match=f"{name}: bitsandbytes reordered it .* load the model again"):
        hf_zero.ZeroTrainer(model=model, args=_arguments(base, stage))


def _arguments(folder, stage):
    return hf_zero.ZeroTrainingArguments(output_dir=str(folder), use_cpu=True, zero_stage=stage, report_to=[])


@pytest.mark.support("Base of another quantizer (GPTQ, torchao, ...)", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_quantizers_are_refused_before_anything_is_loaded(tmp_path, monkeypatch, stage):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    models.build("llama").save_pretrained(tmp_path)
    settings = {"quant_method": "gptq", "bits": 4}
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", None)  # nobody comes this far
    refusal = "is quantized with gptq, whose weights cannot be sharded; quantize it with bitsandbytes"
    with pytest.raises(UnsupportedError, match=refusal):
        hf_zero.load_pretrained(AutoModelForCausalLM, tmp_path, quantization_config=settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(UnsupportedError, match=refusal):
        hf_zero.ZeroTrainer(model=str(tmp_path), args=_arguments(tmp_path / "out", stage))


@pytest.mark.support("Base of another quantizer (GPTQ, torchao, ...)", area="Adapters", refused=True, stages=(3,))
def test_a_loaded_model_of_another_quantizer_is_refused_by_the_trainer(tmp_path):
    model = models.build("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM: is quantized with gptq"):
        hf_zero.ZeroTrainer(model=model, args=_arguments(tmp_path, 3))


@pytest.mark.support("Base of another quantizer (GPTQ, torchao, ...)", area="Adapters", refused=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_tensors_of_another_class_are_refused_by_the_trainer(tmp_path, stage):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao's weights are such tensors")
    model = models.build("llama").requires_grad_(False)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(
        UnsupportedError, match="q_proj.base_layer.weight: Int8Tensor of torchao cannot be sharded.*bitsandbytes"
    ):
        hf_zero.ZeroTrainer(model=_with_adapter(model), args=_arguments(tmp_path, stage))
