"""A plain torch run to switch away from, and the checkpoints that other programs leave of it.

The DeepSpeed files are written here as DeepSpeed writes them, without it: see `test_convert_deepspeed`, which compares
them with those of the real one where it is installed.
"""

import math
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from tests.checkpoint import models


NUM_STEPS = 3
VOCAB = 61


def build() -> nn.Module:
    """Tied embeddings, and a parameter that is not trained."""
    model = models.tied_llama()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    return model


def groups_of(model: nn.Module) -> list[dict]:
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, **settings) -> torch.optim.AdamW:
    # eps: where a gradient is nothing but rounding error, torch's 1e-8 would let Adam step in any direction.
    return torch.optim.AdamW(groups_of(model), **{"lr": 1e-2, "eps": 1e-4, "betas": (0.8, 0.95), **settings})


def train(model: nn.Module, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        # The whole batch on every rank: the average over ranks is then the same for any number of them.
        tokens = tokens_of(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(step))


def plain_run() -> tuple[nn.Module, torch.optim.AdamW]:
    """A run in plain torch after `NUM_STEPS` steps."""
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 0, NUM_STEPS)
    return model, optimizer


# DeepSpeed's files


class ZeroStageEnum(int):
    """Pickled by DeepSpeed as a call with its value."""

    def __reduce__(self):
        return type(self), (int(self),)


class LossScaler:
    def __init__(self):
        self.cur_scale, self.dynamic = 1.0, False


class fragment_address:  # noqa: N801 - the name that DeepSpeed gives it
    def __init__(self, numel: int, start: int):
        self.numel, self.start = numel, start


CLASSES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextmanager
def deepspeed_names():
    """Classes of this file are pickled under DeepSpeed's names."""
    own = fragment_address.__module__
    names = {".".join(name.split(".")[: depth + 1]) for name in CLASSES for depth in range(name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    for name, cls in CLASSES.items():
        setattr(sys.modules[name], cls.__name__, cls)
        cls.__module__ = name
    try:
        yield
    finally:
        for cls in CLASSES.values():
            cls.__module__ = own
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def write_deepspeed(
    folder: Path, model: nn.Module, optimizer, stage: int, num_ranks: int, dtype=torch.float32
) -> None:
    """Writes what `engine.save_checkpoint(folder)` of DeepSpeed writes after `NUM_STEPS` steps.

    Args:
        folder (`Path`): like `checkpoint-3`.
        model (`nn.Module`): with fp32 parameters, the masters.
        optimizer (`torch.optim.Optimizer`): that has stepped on them.
        stage (`int`): 1, 2 or 3.
        num_ranks (`int`): of the run that is played.
        dtype (`torch.dtype`): of the model in that run.
    """
    tag = folder / f"global_step{NUM_STEPS}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name, encoding="utf-8")
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [{name_of[id(p)]: p for p in group["params"]} for group in optimizer.param_groups]
    prefix = "bf16_" if dtype is torch.bfloat16 else ""
    with deepspeed_names():
        for rank in range(num_ranks):
            states = (_states_3 if stage == 3 else _states_1_2)(groups, optimizer, stage, rank, num_ranks)
            saved = {"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}
            torch.save(saved, tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        for rank in range(num_ranks if stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(_model_states(model, groups, stage, rank, num_ranks, dtype), tag / f"{name}_model_states.pt")


def _states_1_2(groups, optimizer, stage, rank, num_ranks) -> dict:
    flats, paddings, state = [], [], {}
    for index, group in enumerate(groups):
        numel = sum(p.numel() for p in group.values())
        part = math.ceil(numel / (2 * num_ranks)) * 2
        padding = min(part, max(0, (rank + 1) * part - numel))
        window = slice(rank * part, (rank + 1) * part)
        flats.append(_joined(group.values(), part * num_ranks)[window][: part - padding].clone())
        paddings.append(padding)
        state[index] = {"step": torch.tensor(float(NUM_STEPS))}
        for key in ("exp_avg", "exp_avg_sq"):
            moments = [optimizer.state[p][key] for p in group.values()]
            state[index][key] = _joined(moments, part * num_ranks)[window].clone()
    return {
        "loss_scaler": LossScaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "base_optimizer_state": {"state": state, "param_groups": _param_groups(optimizer)},
        "single_partition_of_fp32_groups": flats,
        "zero_stage": ZeroStageEnum(stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group) for group in groups],
        "partition_count": [num_ranks] * len(groups),
        "param_slice_mappings": [{name: fragment_address(p.numel(), 0) for name, p in g.items()} for g in groups],
    }


def _joined(tensors, numel: int) -> torch.Tensor:
    """All tensors one behind the other, padded."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


def _states_3(groups, optimizer, stage, rank, num_ranks) -> dict:
    def flat(of, group):
        return torch.cat([_part(of(p), rank, num_ranks) for p in group.values()])

    state = {
        index: {key: flat(lambda p, key=key: optimizer.state[p][key], group) for key in ("exp_avg", "exp_avg_sq")}
        | {"step": torch.tensor(float(NUM_STEPS))}
        for index, group in enumerate(groups)
    }
    return {
        "zero_stage": ZeroStageEnum(stage),
        "loss_scaler": LossScaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": num_ranks,
        "optimizer_state_dict": {"state": state, "param_groups": _param_groups(optimizer)},
        "fp32_flat_groups": [flat(lambda p: p, group) for group in groups],
    }


def _model_states(model, groups, stage, rank, num_ranks, dtype) -> dict:
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    tensors = {name: tensor.detach().to(dtype) for name, tensor in model.state_dict().items()}
    if stage == 3:
        tensors = {name: tensor.new_empty(0) for name, tensor in tensors.items()}
        fragments = {name: _part(p, rank, num_ranks).to(dtype) for name, p in frozen.items()}
    else:
        fragments = {name: p.detach().to(dtype) for name, p in frozen.items()}
    return {
        "module": tensors,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: p.shape for name, p in group.items()} for group in groups],
        "frozen_param_shapes": {name: p.shape for name, p in frozen.items()} if stage > 1 else None,
        "shared_params": tied if rank == 0 else {},
        "frozen_param_fragments": fragments if stage > 1 else None,
        "lr_scheduler": None,
        "global_steps": NUM_STEPS,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
    }


def _part(tensor, rank, num_ranks):
    """A rank's part of a parameter at stage 3, padded to the length of the others."""
    flat = tensor.detach().reshape(-1)
    numel = math.ceil(flat.numel() / num_ranks)
    part = flat[rank * numel : (rank + 1) * numel]
    return torch.cat([part, part.new_zeros(numel - part.numel())])


def _param_groups(optimizer) -> list[dict]:
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [index]}
        for index, group in enumerate(optimizer.param_groups)
    ]
