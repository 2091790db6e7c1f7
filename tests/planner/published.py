"""Rows of tables that others have published, with their sources: what predictions are compared with.

Nothing here was measured by this project.
"""

from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_zero.planner import Cluster, Device, Prediction, device_named
from hf_zero.recipes.plan_input import example_batch
from tests.planner.subjects import predict


# torchtitan's tables call models by these names: https://github.com/pytorch/torchtitan (llama2, llama3).
LLAMAS = {
    "Llama 3 8B": (4096, 14336, 32, 32, 8, 128256),
    "Llama 3 70B": (8192, 28672, 80, 64, 8, 128256),
    "Llama 2 13B": (5120, 13824, 40, 40, 40, 32000),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 32000),
}
# MPT of llm-foundry, https://github.com/mosaicml/llm-foundry, scripts/train/yamls/pretrain: width, blocks, heads.
MPTS = {
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}


@dataclass(frozen=True)
class Row:
    """One row: fully sharded, bf16 compute over fp32 masters, hosts of 8 devices.

    Args:
        model (`str`): its name in the table.
        device (`str`): on which.
        num_gpus (`int`): on how many.
        rows (`int`): of a device's micro-batch.
        length (`int`): tokens of a sequence.
        checkpointing (`str`): "no", "full" or "selective" (the outputs of every other matrix product are kept).
        tokens (`float`): per second and device, as published.
        passes (`int`): micro-batches of a step.
        peak_gib (`float`, *optional*): of memory, as published.
    """

    model: str
    device: str
    num_gpus: int
    rows: int
    length: int
    checkpointing: str
    tokens: float
    passes: int = 1
    peak_gib: float | None = None

    def __str__(self) -> str:
        name = f"{self.model} on {self.num_gpus} {self.device}, {self.rows} x {self.length}"
        return f"{name}, {self.checkpointing} checkpointing".replace(" ", "_")


# benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan, tables 1 and 3, lines "FSDP": 8192 tokens, eager.
# The page says that these H100 have 96 GB of HBM2e with 2.4 TB/s and are limited to 500 W, with 400 Gb/s each.
TITAN_H100 = [
    Row("Llama 3 8B", "h100", 8, 2, 8192, "selective", 5762, peak_gib=82.4),
    Row("Llama 3 8B", "h100", 128, 2, 8192, "selective", 5605, peak_gib=67.0),
]
# docs/performance.md of pytorch/torchtitan at 0413364: FSDP2 on 64 A100 of 80 GB; Llama 3 with 8192 tokens, Llama 2
# with 4096. "selective layer" is left out: no policy here keeps every other block.
TITAN_A100 = [
    Row("Llama 3 8B", "a100", 64, 1, 8192, "selective", 2973),
    Row("Llama 3 70B", "a100", 64, 1, 8192, "full", 331),
    Row("Llama 2 13B", "a100", 64, 2, 4096, "no", 2162),
    Row("Llama 2 13B", "a100", 64, 2, 4096, "selective", 1904),
    Row("Llama 2 70B", "a100", 64, 1, 4096, "selective", 355),
    Row("Llama 2 70B", "a100", 64, 2, 4096, "full", 353),
]
# scripts/train/benchmarking/README.md of mosaicml/llm-foundry at 061f2c7, "H100 80GB BF16" and "A100 80GB with 1600
# Gbps": FULL_SHARD. On them, all at 2048 tokens, the utilization in devices.yaml was fitted.
FITTED = [
    Row("70b", "h100", 64, 8, 2048, "full", 1039, passes=4),
    Row("70b", "h100", 32, 2, 2048, "full", 882, passes=16),
    Row("30b", "h100", 32, 14, 2048, "full", 2308, passes=3),
    Row("13b", "h100", 64, 2, 2048, "no", 4800),
    Row("13b", "h100", 8, 2, 2048, "no", 4792),
    Row("7b", "h100", 8, 6, 2048, "no", 10643),
    Row("3b", "h100", 64, 6, 2048, "no", 22525, passes=3),
    Row("3b", "h100", 16, 10, 2048, "no", 24142, passes=3),
    Row("1b", "h100", 8, 14, 2048, "no", 45455),
    Row("1b", "h100", 64, 20, 2048, "no", 44402),
    Row("70b", "a100", 64, 8, 2048, "full", 410, passes=4),
    Row("70b", "a100", 32, 2, 2048, "full", 373, passes=16),
    Row("30b", "a100", 8, 3, 2048, "full", 916, passes=21),
    Row("13b", "a100", 8, 2, 2048, "no", 2262, passes=3),
    Row("7b", "a100", 8, 6, 2048, "no", 4641, passes=2),
    Row("3b", "a100", 8, 10, 2048, "no", 10811, passes=2),
    Row("1b", "a100", 8, 14, 2048, "no", 20513, passes=4),
]

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default  # the meter's stand-in for a fused kernel


def _keep_every_other_product():
    """torchtitan's policy "op": attention is kept, and of matrix products every other one."""
    count = {False: 0, True: 0}

    def decide(context, func, *_, **__):
        if func in _PRODUCTS:
            count[context.is_recompute] += 1
            is_kept = count[context.is_recompute] % 2 == 1
        else:
            is_kept = func is _ATTENTION
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def empty_model(name: str, length: int) -> PreTrainedModel:
    """A model on the meta device with the matrices of a published one."""
    with torch.device("meta"):
        if name in LLAMAS:
            width, inner, blocks, heads, groups, vocab = LLAMAS[name]
            sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": blocks}
            sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocab}
            config = LlamaConfig(max_position_embeddings=length, use_cache=False, **sizes)
            return LlamaForCausalLM(config).train()
        width, blocks, heads = MPTS[name]
        sizes = {"n_embd": width, "n_layer": blocks, "n_head": heads, "n_positions": length, "vocab_size": 50368}
        off = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(activation_function="gelu", use_cache=False, **sizes, **off)).train()


def device_of(row: Row) -> Device:
    """The device of a row, as its page describes it."""
    device = device_named(row.device)
    return replace(device, memory_gib=96, memory_gbytes_per_s=2400) if row in TITAN_H100 else device


def predicted(row: Row) -> Prediction:
    """What is predicted of a row."""
    model = empty_model(row.model, row.length)
    if row.checkpointing == "selective":
        kwargs = {"use_reentrant": False, "context_fn": _keep_every_other_product}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    return predict(
        model,
        num_ranks=row.num_gpus,
        batch=example_batch(model, row.rows, row.length),
        compute_dtype=torch.bfloat16,
        gradient_checkpointing=row.checkpointing == "full",
        cluster=Cluster(device_of(row), row.num_gpus // 8, 8),
    )


def tokens_per_second(row: Row, prediction: Prediction) -> float:
    """Tokens per second and device, of a step with the micro-batches of the row."""
    return row.rows * row.length * row.passes / prediction.time.step_seconds(row.passes)


def utilization_of(row: Row) -> float:
    """The utilization with which the prediction would be what was published."""
    prediction, device = predicted(row), device_of(row)
    products = prediction.time.flops / (device.bf16_tflops * 1e12)
    others = prediction.time.step_seconds(row.passes) / row.passes - products / device.utilization
    return products / (row.rows * row.length / row.tokens - others)
