"""Tiny models, one for each way in which names, ties and buffers can be."""

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


def llama(tie: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=23,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config)


def tied_llama() -> LlamaForCausalLM:
    return llama(tie=True)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=32))


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=23
    )
    return BertForMaskedLM(config)


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=23, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config)


class Plain(nn.Module):
    """No config; a tie that nothing declares, an empty and a 0-d parameter, buffers of both kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.low = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("columns", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
