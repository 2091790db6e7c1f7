"""Six tiny models, one of each kind, and batches of full length."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_zero.config import ZeroConfig
from hf_zero.planner import Prediction, Predictor


VOCAB, HIDDEN, LAYERS, LENGTH, ROWS = 512, 128, 4, 64, 4
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 344,
    "num_hidden_layers": LAYERS,
    **_HEADS,
}


def gpt2() -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes))


def llama(**sizes: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, **sizes}))


def qwen3() -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=32, tie_word_embeddings=True, **_DECODER))


def t5() -> PreTrainedModel:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": HIDDEN, "d_kv": 32, "d_ff": 344, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 3}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes))


def mixtral() -> PreTrainedModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **_DECODER))


def bert() -> PreTrainedModel:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 512}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, num_labels=3, **sizes)
    )


BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "t5": t5,
    "mixtral": mixtral,
    "bert": bert,
}


def build(name: str, **sizes: int) -> PreTrainedModel:
    """The model of this name, in training mode, as `Trainer` sets it up. `sizes` replace some of its config."""
    torch.manual_seed(0)
    model = BUILDERS[name](**sizes).train()
    model.config.use_cache = False
    return model


def batch(name: str, length: int = LENGTH) -> dict[str, Tensor]:
    """Rows of full length, none padded."""
    ids = torch.randint(5, VOCAB, (ROWS, length))
    labels = torch.randint(0, 3, (ROWS,)) if name == "bert" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def predict(
    model: nn.Module, *, batch: dict[str, Tensor] | None = None, gradient_checkpointing: bool = False, **settings
) -> Prediction:
    """Predicts one run. `settings` are fields of [`Predictor`] and of `ZeroConfig`."""
    of_run = {each.name: settings.pop(each.name) for each in fields(Predictor) if each.name in settings}
    config = ZeroConfig(**settings)
    return Predictor(model, **of_run).predict(config, batch, gradient_checkpointing=gradient_checkpointing)


QUANTIZATIONS = {
    "4-bits": {"load_in_4bit": True},
    "4-bits-nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
}


def read_quantized(folder: str, kind: str, dtype: torch.dtype) -> nn.Module:
    """The model of a folder, quantized as it is read, with an adapter."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(**QUANTIZATIONS[kind])
    return _adapted(AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=dtype))


def quantized_without_data(kind: str, dtype: torch.dtype) -> nn.Module:
    """The same without reading anything."""
    from transformers import BitsAndBytesConfig

    from hf_zero.recipes.plan_input import quantize

    with torch.device("meta"):
        model = llama().to(dtype)
        quantize(model, BitsAndBytesConfig(**QUANTIZATIONS[kind]))
        return _adapted(model)


def with_adapter(name: str, **settings: Any) -> nn.Module:
    """The model of this name with an adapter on all of its layers."""
    return _adapted(build(name), **settings)


def _adapted(model: PreTrainedModel, **settings: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model.config.use_cache = False
    return get_peft_model(model.train(), LoraConfig(**{"r": 8, "target_modules": "all-linear", **settings}))
