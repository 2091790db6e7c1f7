"""What every mode trains: one of a few Llama shapes, on the same random tokens, with the same AdamW."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Size:
    """A Llama shape."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int | None = None  # None: as many as heads
    tied: bool = True  # whether the head is the embedding

    @property
    def num_block_parameters(self) -> int:
        head = self.hidden // self.heads
        kv = head * (self.kv_heads or self.heads)
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        return (
            (1 if self.tied else 2) * self.vocab * self.hidden + self.layers * self.num_block_parameters + self.hidden
        )

    def flops_per_token(self, seq: int) -> float:
        """Forward and backward, counted as in PaLM (arXiv 2204.02311, appendix B)."""
        return 6.0 * self.num_parameters + 12.0 * self.layers * self.hidden * seq


SIZES = {
    # 0.1 M: for tests of the benchmark itself.
    "smoke": Size(hidden=64, layers=2, heads=4, intermediate=160, vocab=512),
    # 32 blocks too small to compute anything: what is left of the step is host time.
    "blocks": Size(hidden=32, layers=32, heads=2, intermediate=64, vocab=256),
    "tiny": Size(hidden=256, layers=8, heads=4, intermediate=704, vocab=8192),
    "mini": Size(hidden=512, layers=8, heads=8, intermediate=1408, vocab=16000),
    "small": Size(hidden=768, layers=12, heads=12, intermediate=2048, vocab=32000),
    # As many parameters under a vocabulary of four times as many words.
    "small-128k": Size(hidden=512, layers=14, heads=8, intermediate=1360, vocab=128256),
    "medium": Size(hidden=1024, layers=24, heads=16, intermediate=2944, vocab=32000),
    # The shape of Llama 3.2 1B: for a GPU.
    "1b": Size(hidden=2048, layers=16, heads=32, intermediate=8192, vocab=128256, kv_heads=8),
    # For a GPU: 493 M and 1.51 B, and Llama 3 8B whole.
    "0.5b": Size(hidden=1280, layers=26, heads=20, intermediate=3456, vocab=32000, kv_heads=5),
    "1.5b": Size(hidden=2048, layers=32, heads=32, intermediate=5632, vocab=32000, kv_heads=8),
    "llama-8b": Size(hidden=4096, layers=32, heads=32, intermediate=14336, vocab=128256, kv_heads=8, tied=False),
}


@dataclass(frozen=True)
class Workload:
    """One training job; equal in every mode. `dtype` is fp32, bf16 (fp32 weights and state, bf16 compute) or pure-bf16
    (weights and state too); `recompute` is for gradient checkpointing of every
    block."""

    size: str = "small"
    dtype: str = "fp32"
    seq: int = 256
    batch: int = 1
    accumulate: int = 1
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    seed: int = 0
    recompute: bool = False

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def tokens_per_step(self) -> int:
        """Per rank."""
        return self.seq * self.batch * self.accumulate

    def to_dict(self) -> dict:
        return asdict(self)

    def build_model(self, device: str = "cpu"):
        """The whole model, in fp32 but for pure bf16, with the same weights on every rank and in every mode."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        size = self.shape
        config = LlamaConfig(
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads or size.heads,
            intermediate_size=size.intermediate,
            vocab_size=size.vocab,
            max_position_embeddings=max(self.seq, 512),
            tie_word_embeddings=size.tied,
            use_cache=False,
            attn_implementation="sdpa",
        )
        torch.manual_seed(self.seed)
        with torch.device(device):
            model = LlamaForCausalLM(config).to(torch.bfloat16 if self.dtype == "pure-bf16" else torch.float32).train()
        if self.recompute:
            # by its newer name where there is one
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        return model

    def micro_batches(self, rank: int, step: int, device: str = "cpu") -> list[dict]:
        """The micro-batches of one step, drawn from (seed, rank, step) alone."""
        import torch

        vocab = SIZES[self.size].vocab
        generator = torch.Generator().manual_seed((self.seed * 1009 + rank) * 100_003 + step)
        batches = []
        for _ in range(self.accumulate):
            tokens = torch.randint(0, vocab, (self.batch, self.seq), generator=generator).to(device)
            batches.append({"input_ids": tokens, "labels": tokens})
        return batches
