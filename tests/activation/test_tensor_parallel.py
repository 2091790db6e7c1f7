"""ZeRO along one axis of ranks, transformers' tensor parallelism along the other."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import hf_zero
from hf_zero.engine import engine_of
from hf_zero.engine.away import AwayParameter, class_of
from hf_zero.errors import ConfigError, LifecycleError, UnsupportedError
from tests.activation.parallel import Parallel, loaded, saved, train_whole
from tests.compare import assert_close, assert_equal, assert_equal_on_all_ranks
from tests.distributed import ranks, run_ranks
from tests.tiers import more


def _trains_as_whole(folder: str, stage: int, settings: dict) -> None:
    subject = Parallel(folder, stage)
    record = subject.train(**settings)
    assert subject.engine.comm.num_ranks == 2
    assert dist.get_process_group_ranks(subject.engine.comm.group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    wanted = train_whole(folder, 2, subject.engine.comm.rank, **settings)
    assert_close(record, wanted, f"stage {stage}", norm=2e-6, weight=2e-5)
    assert_equal_on_all_ranks(record.weights, f"stage {stage}")


@pytest.mark.quick
@pytest.mark.skipif(
    not hasattr(DistributedConfig, "dp_size"), reason="the installed transformers supports tensor parallelism only"
)
@pytest.mark.support("Tensor parallelism: data-parallel x tensor-parallel", area="ZeRO-R")
@pytest.mark.parametrize("stage", [*more(0, 1, 2), 3])
def test_a_tensor_parallel_model_trains_as_the_whole_one(tmp_path, stage):
    """Rounding: its sums over features are taken in two parts, so they are not the whole model's bits."""
    run_ranks(_trains_as_whole, 4, saved("llama", tmp_path), stage, {})


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("settings", [{"num_micro": 2}, {"norm_type": 1.0}, {"norm_type": float("inf")}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_are_parts_of_a_sum_accumulation_and_other_norms(tmp_path, name, stage, settings):
    run_ranks(_trains_as_whole, 4, saved(name, tmp_path), stage, settings)


def test_norms_inside_attention_sum_their_gradients(tmp_path):
    run_ranks(_trains_as_whole, 4, saved("qwen3", tmp_path), 3, {"num_micro": 2})


def _stages_agree(folder: str) -> None:
    """Also in bf16 with fp32 masters, and over tensor-parallel ranks alone."""
    for tp_size in (2, 4):
        records = [Parallel(folder, stage, tp_size, compute_dtype=torch.bfloat16).train() for stage in (0, 1, 2, 3)]
        for stage, record in enumerate(records):
            assert_equal(record, records[0], f"stage {stage}, {tp_size} tensor-parallel ranks")
            assert_equal_on_all_ranks(record.weights, f"stage {stage}")


@pytest.mark.full("slow")
def test_all_stages_give_the_same_bits(tmp_path):
    from tests import models

    model = models.llama()
    model.config.num_key_value_heads = 4  # a head for each of four ranks
    model = type(model)(model.config)
    model.save_pretrained(tmp_path)
    run_ranks(_stages_agree, 4, str(tmp_path))


@ranks(4)
def test_divided_parameters_stay_what_they_are_and_come_back(llama):
    model = loaded(llama, 2)
    before = {name: (id(p), p.shape, p.dtype, type(p), p.placements) for name, p in _divided(model)}
    subject = Parallel.__new__(Parallel)
    subject.model, subject.engine = model, engine_of(hf_zero.shard(model, stage=3, compute_dtype=torch.bfloat16))
    halves = {name: (id(p), p.shape, torch.float32, class_of(p), p.placements) for name, p in _divided(model)}
    assert halves == before
    away = dict(_divided(model))["model.layers.0.self_attn.q_proj.weight"]
    assert away.dtype is torch.bfloat16 and away.placements and isinstance(away, AwayParameter)
    for read in (lambda: away * 2, away.to_local, away.full_tensor, away.detach, lambda: copy.deepcopy(away)):
        with pytest.raises(LifecycleError, match=r"q_proj\.weight: is used"):
            read()
    numel = sum(info.shape.numel() for unit in subject.engine.units for flat in unit.flats for info in flat.infos)
    assert numel < 0.6 * sum(p.numel() for p in model.parameters()), "each rank holds its half and the norms"
    with torch.no_grad(), hf_zero.ShardedModel(subject.engine).computing_in(torch.float32):
        assert torch.isfinite(model(input_ids=torch.arange(3, 9)[None]).logits).all()
    model = hf_zero.ShardedModel(subject.engine).unshard()
    after = {name: (id(p), p.shape, p.dtype, type(p), p.placements) for name, p in _divided(model)}
    assert after == before
    plain = loaded(llama)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)


def _divided(model):
    return [(name, p) for name, p in model.named_parameters() if hasattr(p, "placements")]


@pytest.mark.support("Tensor parallelism: saving the whole model", area="ZeRO-R", stages=(3,))
@ranks(4)
def test_the_whole_model_is_saved_inside_gathered(llama):
    subject = Parallel(llama, 3)
    weights = subject.train(num_steps=1).weights
    with pytest.raises(UnsupportedError, match="with hf_zero.gathered.model.: model.save_pretrained"):
        hf_zero.save_pretrained(subject.engine, f"{llama}-refused")
    with hf_zero.gathered(subject.model):
        subject.model.save_pretrained(f"{llama}-saved")
    dist.barrier()
    for name, param in loaded(f"{llama}-saved").named_parameters():
        assert torch.equal(param, weights[name]), name


@pytest.mark.support("Tensor parallelism: whole-parameter optimizers", area="ZeRO-R", refused=True, stages=(1, 2, 3))
@ranks(4)
def test_what_does_not_go_with_divided_parameters_is_refused(llama):
    model = loaded(llama, 2)
    with pytest.raises(ConfigError, match=r"group: ranks \[\d, \d\] hold different parts of the model"):
        hf_zero.shard(model, group=dist.group.WORLD)
    with pytest.raises(UnsupportedError, match="chunked_loss: .* has no head that is a single plain linear layer"):
        hf_zero.shard(model, chunked_loss="on")
    engine = hf_zero.shard(model, stage=2)
    with pytest.raises(UnsupportedError, match="Adafactor: updates full parameters, but tensor-parallel ranks"):
        hf_zero.ShardedOptimizer(engine, torch.optim.Adafactor)
    with pytest.raises(ConfigError, match="tp_size: 4 ranks cannot form groups of 3"):
        hf_zero.TensorParallel(3)


@ranks(2)
def test_a_model_that_fsdp_holds_is_refused():
    from torch.distributed.fsdp import fully_shard

    from tests import models

    model = models.build("llama")
    fully_shard(model.model.layers[0])
    with pytest.raises(UnsupportedError, match="model.layers.0: is sharded by FSDP already"):
        hf_zero.shard(model)
