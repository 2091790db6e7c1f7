"""Tiny models and their batches, one builder per architecture; sizes that no world size divides.

transformers is imported when a model is built: tests that need none of it do not wait for it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


VOCAB = 61
HIDDEN = 24
LAYERS = 3  # one more than there are slots, so that units are gathered again in backward


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of this name, in training mode, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    return BUILDERS[name]().train()


def batch(name: str, seed: int) -> dict[str, Tensor]:
    """A batch for the model of this name: one sequence shorter than the other, its labels ragged (-100)."""
    generator = torch.Generator().manual_seed(seed)
    return BATCHES[name](generator)


def decay_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict]:
    """Weight decay for matrices only, as is the custom."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def llama(tied: bool = False, hidden: int = HIDDEN, layers: int = LAYERS, vocab: int = VOCAB) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden + 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=3, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(max_position_embeddings=32, num_labels=5, **_encoder()))


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        embedding_size=10,
        max_position_embeddings=32,
        num_hidden_groups=1,
        inner_group_num=1,
        num_labels=5,
        classifier_dropout_prob=0.0,
        **_encoder(),
    )
    return AlbertForSequenceClassification(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=6,
        d_ff=50,
        num_layers=LAYERS,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def mixtral(hidden: int = HIDDEN, layers: int = LAYERS, experts: int = 44) -> nn.Module:
    """Of so many experts the 20 tokens of a batch reach at most 40: the others are never routed to."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=experts,
        num_experts_per_tok=2,
        output_router_logits=True,
        pad_token_id=0,
    )
    return MixtralForCausalLM(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=12, patch_size=4, num_channels=3, num_labels=5, **_encoder())
    config.__dict__.pop("vocab_size", None)
    return ViTForImageClassification(config)


def _encoder() -> dict:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 3,
        "intermediate_size": 50,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


class Block(nn.Module):
    """A residual layer with a matrix, a vector and a scalar."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.linear(x))


class Mlp(nn.Module):
    """A few blocks between two linear layers; its forward returns the loss."""

    def __init__(self, width: int = 13, depth: int = 4):
        super().__init__()
        self.embed = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


class Switch(nn.Module):
    """Layers of two experts each; `routes[layer]` names the one that is used, and the other gets no gradient."""

    def __init__(self, width: int = 13, depth: int = 3):
        super().__init__()
        self.embed = nn.Linear(7, width)
        self.layers = nn.ModuleList(nn.ModuleList(Block(width) for _ in range(2)) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.spare = nn.Parameter(torch.ones(5))  # nobody ever uses it

    def forward(self, x: Tensor, y: Tensor, routes: list[int]) -> Tensor:
        x = self.embed(x)
        for experts, route in zip(self.layers, routes, strict=True):
            x = experts[route](x)
        return nn.functional.mse_loss(self.head(x), y)


def _tokens(generator: torch.Generator, labels: int | None = None) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (2, 10), generator=generator)
    length = int(torch.randint(4, 10, (), generator=generator))
    mask = torch.ones_like(ids)
    mask[1, length:] = 0
    ids[1, length:] = 0
    if labels is not None:
        target = torch.randint(0, labels, (2,), generator=generator)
    else:
        target = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": target}


def _seq2seq(generator: torch.Generator) -> dict[str, Tensor]:
    target = torch.randint(3, VOCAB, (2, 7), generator=generator)
    target[0, int(torch.randint(3, 7, (), generator=generator)) :] = -100
    return {**_tokens(generator), "labels": target}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(2, 3, 12, 12, generator=generator),
        "labels": torch.randint(0, 5, (2,), generator=generator),
    }


def _vectors(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(5, 7, generator=generator), "y": torch.randn(5, 3, generator=generator)}


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama-tied": partial(llama, tied=True),
    "gpt2": gpt2,
    "bert": bert,
    "albert": albert,
    "t5": t5,
    "mixtral": mixtral,
    "vit": vit,
    "mlp": Mlp,
    "switch": Switch,
}

_classified = partial(_tokens, labels=5)

BATCHES: dict[str, Callable[[torch.Generator], dict[str, Tensor]]] = {
    "llama": _tokens,
    "llama-tied": _tokens,
    "gpt2": _tokens,
    "bert": _classified,
    "albert": _classified,
    "t5": _seq2seq,
    "mixtral": _tokens,
    "vit": _images,
    "mlp": _vectors,
    "switch": _vectors,
}
