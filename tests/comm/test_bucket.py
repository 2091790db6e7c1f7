"""Communication memory is of one size whatever the model: buckets cut into pieces, and nothing made beside them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_zero
from hf_zero.comm.base import Bucket
from hf_zero.comm.distributed import DistributedComm, NativeComm
from hf_zero.config import ZeroConfig
from hf_zero.engine import build, engine_of, memory, opaque, partition
from hf_zero.errors import ConfigError
from tests.tiers import more


BUCKET_NBYTES = 16 * 2**20
NUM_RANKS = 8
# (vocabulary, width, layers): embeddings of 6 and of 460 M parameters, both larger than the bucket
SHAPES = {
    "10 M": (16_000, 384, 2),
    "1 B": (150_000, 3072, 5),
}


@pytest.mark.parametrize(
    "numel, num_rows, dtype", [(1, 7, torch.float64), (5000, 3, torch.bfloat16), (64, 2, torch.int8)]
)
def test_pieces_cover_a_range_and_each_fits(numel, num_rows, dtype):
    bucket = Bucket(1000, torch.device("cpu"))
    pieces = bucket.pieces(numel, num_rows, dtype)
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])] and pieces[-1][1] == numel
    assert bucket.memory is None
    for start, stop in pieces:
        rows = bucket.rows(num_rows, stop - start, dtype)
        assert rows.shape == (num_rows, stop - start) and rows.dtype is dtype and rows.is_contiguous()
    assert bucket.memory.numel() == 1000
    assert Bucket(16, torch.device("cpu")).rows(5, 1, torch.float64).shape == (5, 1)  # more ranks than it has room for


@pytest.mark.parametrize("value", ["large", 100, -1, 2.5])
def test_a_size_that_is_none_is_refused_in_one_line(value):
    with pytest.raises(ConfigError, match=f"bucket_nbytes: {value!r} is not a size; give 4096 bytes or more, or auto"):
        ZeroConfig(bucket_nbytes=value)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {_storage(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        self.nbytes += sum(made[key].untyped_storage().nbytes() for key in made.keys() - given)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def fake_ranks(monkeypatch) -> Iterator[None]:
    """A process group whose collectives do nothing, and an engine that takes tensors without memory: they are of a
    subclass of torch's, which stands for plain tensors here, and have no values to be looked at or sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for module in (build, memory, opaque, partition):
        monkeypatch.setattr(module, "is_opaque", lambda param: False)
    monkeypatch.setattr(partition, "can_be_moved", lambda param: True)
    monkeypatch.setattr(DistributedComm, "all_gather_object", lambda self, obj, **_: [obj] * self.num_ranks)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


@contextmanager
def _counting(comm: NativeComm) -> Iterator[_Allocations]:
    """Counts what is allocated inside the collectives."""
    made = _Allocations()

    def counted(collective, *args, **kwargs):
        with made:
            return collective(*args, **kwargs)

    for name in ("all_gather", "reduce_scatter"):
        setattr(comm, name, partial(counted, getattr(comm, name)))
    yield made


def _train(name: str, stage: int) -> tuple[int, int, int]:
    """Two micro-batches. Returns the number of parameters, the bytes that the comm accounts for, and those counted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab, width, layers = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    num_params = sum(p.numel() for p in model.parameters())
    engine = engine_of(hf_zero.shard(model, stage=stage, compute_dtype=torch.bfloat16, bucket_nbytes=BUCKET_NBYTES))
    assert isinstance(engine.comm, NativeComm)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with _counting(engine.comm) as made:
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
    assert engine.comm.counters.sent_nbytes["reduce"] >= 2 * 4 * num_params * (NUM_RANKS - 1) / NUM_RANKS
    held = sum(bucket.memory.numel() for bucket in engine.comm.buckets)
    assert held == engine.comm.buffer_nbytes
    return num_params, held, made.nbytes


@pytest.mark.full("slow")
@pytest.mark.parametrize("stage", [3, *more(2)])
def test_communication_memory_is_that_of_a_model_of_a_hundredth_of_the_size(fake_ranks, stage):
    from torch._subclasses.fake_tensor import FakeTensorMode

    sizes = {}
    for name, mode in (("10 M", nullcontext()), ("1 B", FakeTensorMode())):
        with mode:
            num_params, *sizes[name] = _train(name, stage)
        assert num_params == pytest.approx({"10 M": 1e7, "1 B": 1e9}[name], rel=0.15)
    assert sizes["10 M"] == sizes["1 B"] == [2 * BUCKET_NBYTES, 2 * BUCKET_NBYTES]
