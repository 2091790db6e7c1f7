"""Adapters that TRL makes over bases in 4 bits: what counts is what is trained afterwards."""

import pytest
import torch

from hf_zero.errors import UnsupportedError
from tests import models
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.trainer.harness import assert_learned
from tests.trl.harness import data, make, tokenizer, train


pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.fixture
def folder(tmp_path) -> str:
    """Of a model whose projections have biases, as those of Qwen2 have."""
    pytest.importorskip("bitsandbytes", reason="bases in 4 bits are those of bitsandbytes")
    from transformers import LlamaForCausalLM

    config = models.build("llama").config
    config.attention_bias = True
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    return str(tmp_path)


def _settings() -> dict:
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "dtype": torch.float32}


def _quantized(folder: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"{folder}/policy", **_settings())


def _lora(**settings) -> dict:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=3, target_modules=["q_proj", "v_proj"], **settings)}


@ranks(2, timeout=240)
def test_adapters_over_quantized_layers_with_biases_are_trained(folder):
    lines = data("text")
    runs = [
        train(3, "SFT", folder, _quantized(folder), lines, parts=_lora()),
        train(1, "SFT", folder, _quantized(folder), lines, parts=_lora()),
        train(3, "SFT", folder, f"{folder}/policy", lines, parts=_lora(), model_init_kwargs=_settings()),
    ]
    assert_learned(runs[0], 3)
    opaque = {name for name in runs[0].weights if "lora" not in name}
    for run in runs:
        run.weights = {name: weight for name, weight in run.weights.items() if name not in opaque}
    assert_equal(runs[1], runs[0], "stages 1 and 3")
    assert_equal(runs[2], runs[0], "by name, and loaded")


@ranks(1, timeout=240)
def test_biases_that_are_trained_beside_quantized_weights_are_still_refused(folder):
    lines = data("text", 4)
    with pytest.raises(UnsupportedError, match=r"weight: the bias beside it is trained.*LoraConfig\(bias='none'\)"):
        make(3, "SFT", folder, _quantized(folder), lines, parts=_lora(bias="all"))
    with pytest.raises(UnsupportedError, match="the bias beside it is trained"):
        make(3, "SFT", folder, _quantized(folder), lines)
