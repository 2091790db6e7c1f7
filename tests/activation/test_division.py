"""Checkpointed inputs that are equal on tensor-parallel ranks, divided among them until they are needed."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.activation.partition import Division
from hf_zero.comm import Counters, connect
from hf_zero.engine import engine_of
from hf_zero.errors import ConfigError, UnsupportedError
from tests import models
from tests.activation.parallel import Parallel, batch_of
from tests.activation.subjects import NOISE_NBYTES, checkpointed, held_between, input_nbytes
from tests.compare import assert_equal
from tests.distributed import ranks, run_ranks
from tests.tiers import more
from tests.training import loss_of


divided = pytest.mark.support("Activations: checkpointed inputs partitioned over tensor-parallel ranks", area="ZeRO-R")


HALF = {"compute_dtype": torch.bfloat16, "shared_memory": False}
CASES = [
    (3, False, {}),
    *more((3, False, HALF), (3, True, {}), (1, False, {}), (1, True, {}), (2, False, {}), (2, True, {})),
]


@divided
@pytest.mark.parametrize("stage, use_reentrant, settings", CASES)
@ranks(4)
def test_divided_inputs_come_back_bit_for_bit_by_one_gather_each(llama, stage, use_reentrant, settings):
    """Values, and what it costs: one all-gather for each block and backward, of all but this rank's part."""
    plain = Parallel(llama, stage, use_reentrant=use_reentrant, **settings)
    wanted, grads = plain.train(), plain.gradients(9)
    for away in (False, True):
        both = {"partition_activations": True, "offload_activations": away, **settings}
        subject = Parallel(llama, stage, use_reentrant=use_reentrant, **both)
        gathers = _count_gathers(subject)
        assert_equal(subject.train(), wanted, f"stage {stage}, offloaded {away}")
        for name, grad in subject.gradients(9).items():
            assert torch.equal(grad, grads[name]), name
        num_blocks, nbytes = len(subject.engine.blocks), input_nbytes(subject.engine, batch_of(0, 0))
        sent = subject.engine.comm.counters.sent_nbytes
        assert len(gathers) == 4 * num_blocks, "one for each block in each of four backwards"
        assert sent["activation"] == len(gathers) * nbytes // 2
        # in the first forward it is not known which block is the last
        assert sent.get("down", 0) == sent.get("up", 0) == ((4 * num_blocks - 3) * nbytes // 2 if away else 0)


def _count_gathers(subject: Parallel) -> list[str]:
    found: list[str] = []
    comm = subject.engine.divided_over
    all_gather = comm.all_gather

    def counted(full, shard, *, what):
        found.append(what)
        return all_gather(full, shard, what=what)

    comm.all_gather = counted
    return found


def _held(folder: str, tp_size: int, **settings) -> tuple[int, int, int]:
    """Bytes that a forward leaves for its backward; the number of blocks, and bytes of what each is given."""
    subject = Parallel(folder, 3, tp_size, use_reentrant=False, **settings)
    batch = batch_of(subject.engine.comm.rank, 0)
    held = held_between(subject.model, batch, num_steps=3)
    return held, len(subject.engine.blocks), input_nbytes(subject.engine, batch)


def _falls_with_the_degree(folder: str, tp_size: int) -> None:
    whole, num_blocks, nbytes = _held(folder, tp_size)
    assert nbytes % 4 == 0
    parted, _, _ = _held(folder, tp_size, partition_activations=True)
    error = whole - parted - num_blocks * (nbytes - nbytes // tp_size)
    assert abs(error) <= NOISE_NBYTES < nbytes // tp_size, f"{whole} and {parted}"
    both, _, _ = _held(folder, tp_size, partition_activations=True, offload_activations=True)
    error = whole - both - (num_blocks * nbytes - nbytes // tp_size)  # a part of the last block's stays
    assert abs(error) <= NOISE_NBYTES, f"{whole} and {both}"


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("tp_size", [2, *more(4)])
def test_checkpoint_memory_falls_with_the_number_of_tensor_parallel_ranks(tmp_path, tp_size):
    model = models.llama()
    model.config.num_key_value_heads = 4
    type(model)(model.config).save_pretrained(tmp_path)
    run_ranks(_falls_with_the_degree, tp_size, str(tmp_path), tp_size)


@pytest.mark.support(
    "Activations: partitioning inputs that differ between tensor-parallel ranks",
    area="ZeRO-R",
    refused=True,
    stages=(1, 2, 3),
)
@ranks(4)
def test_inputs_that_are_not_equal_are_refused(llama):
    subject = Parallel(llama, 3, use_reentrant=False, partition_activations=True)
    noise = subject.model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] + dist.get_rank(),))
    with pytest.raises(UnsupportedError, match="inputs of a checkpointed block differ between tensor-parallel ranks"):
        subject.model(**batch_of(subject.engine.comm.rank, 0))
    noise.remove()
    loss_of(subject.model(**batch_of(subject.engine.comm.rank, 0))).backward()


@pytest.mark.support(
    "Activations: partitioning inputs without tensor parallelism", area="ZeRO-R", refused=True, stages=(1, 2, 3)
)
def test_dividing_without_tensor_parallel_ranks_is_refused():
    model = checkpointed(models.build("llama"))
    with pytest.raises(ConfigError, match="partition_activations: .* use offload_activations, or load the model with"):
        hf_zero.shard(model, partition_activations=True)
    assert engine_of(model) is None, "it is refused before anything is sharded"


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(3)
def test_a_division_of_any_length_is_undone(dtype):
    counters = Counters()
    comm = connect(torch.device("cpu"), timeout_seconds=60.0, bucket_nbytes=2**16)
    division = Division(comm, counters)
    for numel in (1, 3, 7, 4096, 5000):
        whole = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        division.check(whole, place=numel)
        part = division.part_of(whole)
        assert part.numel() == -(-numel // comm.num_ranks)
        assert torch.equal(division.whole_of(part.clone(), numel), whole)
    turned = torch.arange(4096.0)
    with pytest.raises(UnsupportedError):
        division.check(turned.flip(0) if comm.rank == 1 else turned, place=-1)
