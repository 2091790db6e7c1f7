"""What training offers besides: each feature gives the numbers of plain `Trainer` under DDP."""

from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from tests import models
from tests.distributed import ranks
from tests.tiers import in_core
from tests.trainer.harness import compare, train


STAGES = (1, 2, 3)


def dropping(rate: float = 0.2) -> nn.Module:
    """BERT with dropout everywhere that it has some."""
    from transformers import BertConfig, BertForSequenceClassification

    settings = {**models._encoder(), "hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    return BertForSequenceClassification(BertConfig(max_position_embeddings=32, num_labels=5, **settings)).train()


def partly_frozen() -> nn.Module:
    """Embeddings and one block frozen; of another block all but a bias-free matrix."""
    model = models.llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[2].requires_grad_(False)
    model.model.layers[2].mlp.up_proj.requires_grad_(True)
    model.enable_input_require_grads()  # else a reentrant segment gives no gradients
    return model


def with_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(models.llama(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)  # zero at first, which would leave A without gradients
    return model


def with_lora_everywhere() -> nn.Module:
    """Without dropout, which draws for each tile."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(models.llama(), config)


def every_second(use_reentrant: bool) -> nn.Module:
    model = models.llama(layers=4)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.config.use_cache = False
    for layer in model.model.layers[1::2]:
        layer.gradient_checkpointing = False
    return model


def attending(implementation: str) -> nn.Module:
    model = models.llama()
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


class FusedLoss(torch.autograd.Function):
    """Linear layer and cross-entropy in one, in chunks of rows; gradients are computed in the forward already."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        grad_hidden, grad_weight, loss = torch.zeros_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for rows in torch.arange(len(hidden)).split(5):
            logits = hidden[rows] @ weight.t()
            loss += F.cross_entropy(logits, labels[rows], ignore_index=-100, reduction="sum") / count
            probabilities = logits.softmax(-1) - F.one_hot(labels[rows].clamp(min=0), len(weight))
            grad = probabilities * (labels[rows] != -100)[:, None] / count
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad * grad_hidden, grad * grad_weight, None, None


def _fused_forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
    hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, :-1]
    labels = labels[:, 1:].reshape(-1)
    count = num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum()
    return CausalLMOutput(loss=FusedLoss.apply(hidden.reshape(len(labels), -1), self.lm_head.weight, labels, count))


def fused(tied: bool) -> nn.Module:
    """As Liger's kernels do it: the head's weight is read, and the head never called."""
    model = models.llama(tied)
    model.forward = MethodType(_fused_forward, model)
    return model


def _checkpointing(use_reentrant: bool) -> dict:
    kwargs = {"use_reentrant": use_reentrant}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}


# The data, what makes the model, and settings.
FEATURES = {"dropout": ("bert", dropping, {})}
for kind, use_reentrant in (("reentrant", True), ("non-reentrant", False)):
    again = _checkpointing(use_reentrant)
    FEATURES |= {
        f"gradient checkpointing, {kind}": ("llama", models.llama, again),
        f"gradient checkpointing, {kind}, dropout": ("bert", dropping, again),
        f"gradient checkpointing, {kind}, frozen parameters": ("llama", partly_frozen, again),
        f"gradient checkpointing, {kind}, LoRA": ("llama", with_lora, again),
        f"gradient checkpointing, {kind}, every second block": ("llama", partial(every_second, use_reentrant), {}),
    }
FEATURES |= {
    "gradient checkpointing, T5": ("t5", models.t5, _checkpointing(False)),
    "NEFTune": ("llama", models.llama, {"neftune_noise_alpha": 5.0}),
    "NEFTune, LoRA": ("llama", with_lora, {"neftune_noise_alpha": 5.0}),
    "tiled MLPs": ("llama", models.llama, {"zero_tiled_mlp": 3}),
    "tiled MLPs, LoRA": ("llama", with_lora_everywhere, {"zero_tiled_mlp": 3}),
    "label smoothing": ("llama", models.llama, {"label_smoothing_factor": 0.2}),
    "label smoothing, classes": ("bert", models.bert, {"label_smoothing_factor": 0.2}),
    "SDPA attention": ("llama", partial(attending, "sdpa"), {}),
    "eager attention": ("llama", partial(attending, "eager"), {}),
    "fused linear cross-entropy": ("llama", partial(fused, False), {}),
    "fused linear cross-entropy, tied weights": ("llama", partial(fused, True), {}),
}
IN_CORE = (
    "gradient checkpointing, reentrant, frozen parameters",
    "gradient checkpointing, reentrant, LoRA",
    "gradient checkpointing, non-reentrant, every second block",
    "gradient checkpointing, non-reentrant, dropout",
    "NEFTune",
)


@pytest.mark.quick(cases=1)
@pytest.mark.support("{feature}", area="Training features", stages=STAGES)
@pytest.mark.parametrize("feature", in_core(IN_CORE, FEATURES))
@ranks(2, timeout=240)
def test_a_feature_gives_the_numbers_of_trainer(tmp_path, feature):
    name, build, settings = FEATURES[feature]

    def run(kind):
        torch.manual_seed(0)
        return train(kind, tmp_path, name, model=build().train(), **{"max_steps": 3, **settings})

    compare(run, steps=3)
