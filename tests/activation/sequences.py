"""Tiny language models whose sequences several ranks share, beside the same models in one process."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.activation.flash import Flash, flash_attention
from tests.activation.subjects import checkpointed
from tests.test_groups import on_two_hosts


WINDOW = 4  # shorter than a part of a sequence
FLASH = "flash_attention_2"
# Settings under which values are rounded, so that whole sequences are trained in the same way.
ROUNDING = ("compute_dtype", "gather_dtype")
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]  # of adapters


@dataclass
class Case:
    """A model, and how it is trained.

    Args:
        name: of a builder below.
        kind: of the batch: `whole`, `padded` at either end, `packed`, whose positions begin anew, or `joined`, with
            the bounds of what is packed beside it, as collators for flash attention give them.
        length: of the sequences.
        attention: as transformers names it. That of flash-attn is compared with "sdpa".
        use_reentrant: of gradient checkpointing; None: there is none.
        adapter: "lora" or "dora"; None: all parameters are trained.
        dtype: of the model.
        settings: of `hf_zero.shard`.
        on_two_hosts: whether four ranks are two of each of two hosts.
    """

    name: str
    stage: int = 3
    kind: str = "padded"
    length: int = 11
    attention: str = "sdpa"
    use_reentrant: bool | None = None
    adapter: str | None = None
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)
    on_two_hosts: bool = False

    @property
    def rounds(self) -> bool:
        return self.dtype is not torch.float32 or not self.settings.keys().isdisjoint(ROUNDING)

    @property
    def rtol(self) -> float:
        is_half = torch.bfloat16 in (self.dtype, self.settings.get("compute_dtype"))
        return 3e-2 if is_half else 1e-5


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
    if name in ("mistral", "gemma3_text", "gemma2"):
        sizes["sliding_window"] = WINDOW
    if name == "gemma3_text":  # which has six blocks for each that sees all positions
        sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
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
    if case.kind in ("packed", "joined"):
        batch["position_ids"] = torch.arange(case.length).repeat(2, 1)
        for row, cut in ((0, case.length // 2 + 1), (1, 2)):
            batch["position_ids"][row, cut:] -= cut
            labels[row, cut] = -100
    batch["labels"] = labels
    if case.attention == FLASH and "position_ids" in batch:  # which knows of packed sequences in one row alone
        batch = {key: value[:1] for key, value in batch.items()}
    if case.kind == "joined":
        bounds = torch.tensor(_cuts(case, batch), dtype=torch.int32)
        for side in "qk":
            batch |= {f"cu_seq_lens_{side}": bounds, f"max_length_{side}": int(bounds.diff().max())}
    return batch


def made(case: Case) -> nn.Module:
    model = build(case.name, "sdpa" if case.attention == FLASH else case.attention).to(case.dtype)
    if case.adapter is not None:
        import peft

        kind = {"r": 2, "target_modules": TARGETS, "init_lora_weights": False, "use_dora": case.adapter == "dora"}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **kind))
    model.config.use_cache = case.kind == "whole"  # with a cache transformers makes no masks for packed sequences
    return model if case.use_reentrant is None else checkpointed(model, case.use_reentrant)


def compare(case: Case, num_parts: int) -> None:
    """Compares loss and gradients of two forwards with those of whole sequences: of one process that has all batches,
    or where the case rounds, of ranks that are trained alike."""
    model = made(case)
    plain = copy.deepcopy(model)
    groups, group = dist.get_world_size() // num_parts, dist.get_rank() // num_parts
    with on_two_hosts(case.on_two_hosts):
        engine = engine_of(hf_zero.shard(model, stage=case.stage, sequence_parallel=num_parts, **case.settings))
    whole = hf_zero.shard(plain, stage=case.stage, **case.settings) if case.rounds else None
    with flash_attention(model) if case.attention == FLASH else nullcontext() as flash:
        for step in range(2):
            batches = [batch_of(case, 10 * step + each) for each in range(groups)]
            if whole is None:
                losses = [plain(**each).loss for each in batches]
                (sum(losses) / groups).backward()
            else:
                losses = {group: plain(**batches[group]).loss}
                losses[group].backward()
            output = model(**batches[group])
            output.loss.backward()
            torch.testing.assert_close(
                output.loss, losses[group], rtol=case.rtol, atol=1e-6, msg=lambda text: f"{case}: {text}"
            )
            if "chunked_loss" in case.settings:  # no logits
                continue
            part = -(-case.length // num_parts)
            assert output.logits.shape[:2].numel() <= 2 * part, case
    if flash is not None:
        _compare_calls(flash, case, num_parts)
    wanted = {name: param.grad if whole is None else whole.full_grad(name) for name, param in _trained(plain)}
    largest = max(grad.abs().max() for grad in wanted.values() if grad is not None)
    for name, grad in wanted.items():
        if grad is None:
            continue
        found = hf_zero.ShardedModel(engine.model).full_grad(name)
        bound = case.rtol * max(grad.abs().max(), 1e-3 * largest)
        assert (found - grad).abs().max() <= bound, f"{case}, {name}: {(found - grad).abs().max()} > {bound}"
    with torch.no_grad():  # as in generation: whole
        ids = batches[0]["input_ids"]
        with hf_zero.gathered(model):
            pass
        found, expected = model(input_ids=ids).logits, plain(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=max(case.rtol, 1e-4), atol=1e-5)
    for each in (model, plain) if case.rounds else (model,):
        hf_zero.ShardedModel(each).unshard()


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def _compare_calls(flash: Flash, case: Case, num_parts: int) -> None:
    """Compares what flash attention was called with to what whole sequences call it with, but for the heads."""
    cuts = [_cuts(case, batch_of(case, 10 * step + dist.get_rank() // num_parts)) for step in range(2)]
    assert flash.heads == {4 // num_parts} and flash.cuts == set(cuts), (case, flash.cuts)
    windows = {"mistral": {(WINDOW - 1, WINDOW - 1)}, "gemma3_text": {(WINDOW - 1, WINDOW - 1), (-1, -1)}}
    assert flash.windows == windows.get(case.name, {(-1, -1)}), case


def _cuts(case: Case, batch: dict[str, Tensor]) -> tuple[int, ...]:
    if case.kind == "whole":
        return ()
    if "position_ids" in batch:
        return (*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), case.length)
    return (0, *batch["attention_mask"].sum(1).cumsum(0).tolist())
