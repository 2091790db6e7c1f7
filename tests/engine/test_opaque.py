"""Parameters of classes of their own, such as quantized weights: their bytes are moved, and mean what they meant."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_zero
from hf_zero.checkpoint import save_pretrained
from hf_zero.engine import engine_of
from hf_zero.engine.away import class_of
from hf_zero.engine.opaque import can_be_moved
from hf_zero.engine.partition import refuse_what_cannot_be_sharded
from hf_zero.errors import CheckpointError, UnsupportedError
from tests import models
from tests.distributed import ranks


class Codes(nn.Parameter):
    """Weights in one byte each, with their scale; `codes` is the data again, as in bitsandbytes' 8 bits."""

    def __new__(cls, codes: Tensor, scale: Tensor):
        self = torch.Tensor._make_subclass(cls, codes, False)
        self.codes, self.scale = codes, scale
        return self


class Quantized(nn.Module):
    """A linear layer with coded weights, to which a trained one is added. It takes the codes when it is first used."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        codes = torch.randint(-9, 9, (width, width), dtype=torch.int8)
        codes = codes if dtype is torch.int8 else F.pad(codes, (0, 1)).view(dtype)  # two codes in one element
        self.weight = Codes(codes, torch.rand(width, 1) / 40)
        self.trained = nn.Linear(width, width)
        self.codes = self.scale = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.codes is not None:
            self.codes, self.scale = self.weight.codes, self.weight.scale
            self.weight.codes = self.weight.scale = None
        weight = self.codes.view(torch.int8)[:, : x.shape[-1]] * self.scale
        return x + F.linear(x, weight.to(x.dtype)) + torch.tanh(self.trained(x))


class Coded(nn.Module):
    def __init__(self, dtype: torch.dtype, width: int = 13, depth: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Quantized(width, dtype) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


@ranks(2)
def test_codes_are_never_cast_and_never_saved_without_what_they_mean():
    engine = engine_of(hf_zero.shard(Coded(torch.bfloat16), stage=3, compute_dtype=torch.bfloat16))
    wanted = [block.weight.detach().clone() for block in Coded(torch.bfloat16).blocks]
    with hf_zero.gathered(engine.model):
        assert engine.model.head.weight.dtype is torch.bfloat16
        for block, codes in zip(engine.model.blocks, wanted):
            assert torch.equal(block.weight.data.view(torch.int8), codes.view(torch.int8))
    with pytest.raises(CheckpointError, match="blocks.0.weight: quantized weights .Codes."):
        save_pretrained(engine, "nowhere")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=["bytes", "bytes stored as bf16"])
@pytest.mark.parametrize("stage", [1, 3])
@ranks(2)
def test_codes_are_what_they_were_when_the_rest_is_shown_in_another_dtype_or_given_back(stage, dtype):
    plain, batch = Coded(dtype), models.batch("mlp", seed=0)
    wanted = plain(**batch)
    model = Coded(dtype)
    engine = engine_of(hf_zero.shard(model, stage=stage, shared_memory=False))
    with torch.no_grad():
        assert torch.equal(model(**batch), wanted)
        with hf_zero.ShardedModel(engine).computing_in(torch.float64):
            double = {key: value.double() for key, value in batch.items()}
            torch.testing.assert_close(model(**double).float(), wanted, rtol=1e-5, atol=0.0)
            assert all(class_of(block.weight) is Codes for block in model.blocks)
    hf_zero.ShardedModel(engine).unshard()
    assert torch.equal(model(**batch), wanted), "after unshard"


def test_a_trained_bias_beside_codes_is_refused():
    model = Coded(torch.int8)
    model.blocks[1].bias = nn.Parameter(torch.zeros(13))
    with pytest.raises(UnsupportedError, match="blocks.1.weight: the bias beside it is trained, .*train no bias"):
        refuse_what_cannot_be_sharded(model)
    model.blocks[1].bias.requires_grad_(False)
    refuse_what_cannot_be_sharded(model)


def test_codes_stay_on_their_device():
    model = Coded(torch.int8)
    for device in ("cpu", "cpu:0"):
        refuse_what_cannot_be_sharded(model, torch.device(device))
    with pytest.raises(UnsupportedError, match=r"blocks.0.weight: Codes is on cpu, .* to cuda:0; load the model on"):
        refuse_what_cannot_be_sharded(model, torch.device("cuda", 0))


def test_only_frozen_dense_subclasses_can_be_moved():
    codes = Codes(torch.zeros(2, 3, dtype=torch.int8), torch.ones(1))
    assert can_be_moved(codes)
    assert not can_be_moved(torch.Tensor._make_subclass(Codes, torch.zeros(2, 3), True)), "it is trained"
    assert not can_be_moved(torch.Tensor._make_subclass(Codes, torch.zeros(2, 3).t(), False)), "it is transposed"
