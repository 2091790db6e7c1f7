"""Tiny models on disk, loaded whole or with transformers' tensor parallelism, and trained alike."""

from functools import partial

import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.activation.subjects import checkpointed
from tests.training import Record, adamw, loss_of


def qwen3() -> nn.Module:
    """Its norms inside attention see this rank's heads only: whole parameters whose gradients are parts of a sum."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=models.VOCAB,
        hidden_size=24,
        intermediate_size=52,
        num_hidden_layers=models.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def saved(name: str, folder) -> str:
    """The folder of a model with weights drawn from a seed."""
    torch.manual_seed(0)
    model = qwen3() if name == "qwen3" else models.build(name)
    path = folder / name
    model.save_pretrained(path)
    return str(path)


def loaded(folder: str, tp_size: int = 1, **settings) -> nn.Module:
    """The model of a folder; over so many tensor-parallel ranks."""
    from transformers import AutoModelForCausalLM

    if tp_size > 1:
        settings["distributed_config"] = hf_zero.TensorParallel(tp_size)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).train()


def batch_of(dp_rank: int, step: int) -> dict:
    return models.batch("llama", seed=1000 * step + dp_rank)


def whole(param: Tensor) -> Tensor:
    return param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach().clone()


class Parallel:
    """A tensor-parallel model in hf_zero; all ranks of a group see one batch."""

    def __init__(self, folder: str, stage: int, tp_size: int = 2, use_reentrant: bool | None = None, **settings):
        self.model = loaded(folder, tp_size)
        if use_reentrant is not None:
            checkpointed(self.model, use_reentrant)
        self.engine = engine_of(hf_zero.shard(self.model, stage=stage, **settings))
        self.optimizer = hf_zero.ShardedOptimizer(self.engine, adamw(self.model))

    def train(self, **settings) -> Record:
        clip, rank = self.optimizer.clip_grad_norm_, self.engine.comm.rank
        return Record(*_train(self.model, self.optimizer, clip, [rank], **settings), self.weights())

    def weights(self) -> dict[str, Tensor]:
        with hf_zero.gathered(self.model):
            return {name: whole(p).float() for name, p in self.model.named_parameters()}

    def gradients(self, step: int) -> dict[str, Tensor]:
        loss_of(self.model(**batch_of(self.engine.comm.rank, step))).backward()
        return {
            name: whole(hf_zero.ShardedModel(self.engine.model).full_grad(name))
            for name, _ in self.model.named_parameters()
        }


def train_whole(folder: str, dp_size: int, dp_rank: int, **settings) -> Record:
    """The same in plain torch, in one process: gradients averaged over the data-parallel ranks' batches."""
    model = loaded(folder)
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    losses, norms = _train(model, adamw(model), clip, [dp_rank, *({*range(dp_size)} - {dp_rank})], **settings)
    return Record(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def _train(
    model, optimizer, clip, dp_ranks: list[int], num_steps=3, num_micro=1, max_norm=0.1, norm_type=2.0
) -> tuple[Tensor, Tensor]:
    """Returns the losses of the first of these data-parallel ranks, and the norms of gradients averaged over all."""
    losses, norms = [], []
    for step in range(num_steps):
        for micro in range(num_micro):
            own = [loss_of(model(**batch_of(rank, 10 * step + micro))) for rank in dp_ranks]
            (sum(own) / len(own)).backward()
            losses.append(own[0].detach().float())
        norms.append(clip(max_norm, norm_type))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), torch.stack(norms)
