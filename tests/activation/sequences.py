"""Tiny language models whose sequences several ranks share, beside the same models in one process."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.activation.subjects import checkpointed


WINDOW = 4  # shorter than a part of a sequence


@dataclass
class Case:
    """A model, and how it is trained.

    Args:
        name: of a builder below.
        kind: of the batch: `whole`, `padded` at either end, or `packed`, whose positions begin anew.
        length: of the sequences.
        attention: as transformers names it.
        use_reentrant: of gradient checkpointing; None: there is none.
        settings: of `hf_zero.shard`.
    """

    name: str
    stage: int = 3
    kind: str = "padded"
    length: int = 11
    attention: str = "sdpa"
    use_reentrant: bool | None = None
    lora: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """A language model of this name with four heads, two of keys where the architecture has fewer of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": models.VOCAB,
        "hidden_size": models.HIDDEN,
        "intermediate_size": 52,
        "num_hidden_layers": models.LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    if name == "gpt2":
        sizes = {"vocab_size": models.VOCAB, "n_embd": models.HIDDEN, "n_layer": models.LAYERS, "n_head": 4}
        sizes |= {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    if name in ("mistral", "gemma3_text", "gemma2"):
        sizes["sliding_window"] = WINDOW
    if name == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "gpt_oss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    config = AutoConfig.for_model(name, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def batch_of(case: Case, seed: int) -> dict[str, Tensor]:
    """A batch whose labels do not all count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, models.VOCAB, (2, case.length), generator=generator)
    labels, batch = ids.clone(), {"input_ids": ids}
    labels[0, : int(torch.randint(1, 5, (), generator=generator))] = -100
    if case.kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :2] = mask[1, case.length - 3 :] = 0
        batch["attention_mask"] = mask
        labels[mask == 0] = -100
    if case.kind == "packed":
        batch["position_ids"] = torch.arange(case.length).repeat(2, 1)
        for row, cut in ((0, case.length // 2 + 1), (1, 2)):
            batch["position_ids"][row, cut:] -= cut
            labels[row, cut] = -100
    return {**batch, "labels": labels}


def made(case: Case) -> nn.Module:
    model = build(case.name, case.attention)
    if case.lora:
        import peft

        kind = {"r": 2, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **kind))
    model.config.use_cache = case.kind == "whole"  # with a cache transformers makes no masks for packed sequences
    return model if case.use_reentrant is None else checkpointed(model, case.use_reentrant)


def compare(case: Case, num_parts: int) -> None:
    """Compares loss and gradients of two forwards with those of one process that has all batches whole."""
    model = made(case)
    plain = copy.deepcopy(model)
    groups, group = dist.get_world_size() // num_parts, dist.get_rank() // num_parts
    engine = engine_of(hf_zero.shard(model, stage=case.stage, sequence_parallel=num_parts, **case.settings))
    for step in range(2):
        batches = [batch_of(case, 10 * step + each) for each in range(groups)]
        losses = [plain(**each).loss for each in batches]
        (sum(losses) / groups).backward()
        output = model(**batches[group])
        output.loss.backward()
        torch.testing.assert_close(
            output.loss, losses[group], rtol=1e-5, atol=1e-6, msg=lambda text: f"{case}: {text}"
        )
        if "chunked_loss" in case.settings:  # whose logits are not there
            continue
        part = -(-case.length // num_parts)
        assert output.logits.shape[:2].numel() < 2 * part + (case.length if case.name == "gpt2" else 1), case
    largest = max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None)
    for name, param in plain.named_parameters():
        if param.grad is None:
            continue
        found = engine.full_grad(name)
        bound = 1e-5 * max(param.grad.abs().max(), 1e-3 * largest)
        assert (found - param.grad).abs().max() <= bound, (
            f"{case}, {name}: {(found - param.grad).abs().max()} > {bound}"
        )
    with torch.no_grad():  # as in generation: whole
        ids = batches[0]["input_ids"]
        with hf_zero.gathered(model):
            pass
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    hf_zero.ShardedModel(model).unshard()
