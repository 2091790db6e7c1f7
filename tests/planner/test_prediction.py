"""Predictions against real runs on two ranks, by the bytes that torch's allocator hands out and the bytes sent.

[Note: the bounds] What rests is the engine's own arithmetic: only a few numbers, such as step counts, are not counted.
The peak is that of the same operations in the same order; what kernels take for a moment inside of one is not seen.
The aim is 1 % and 10 %; the tests ask for 0.5 % and 2 %.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.config import REDUCE_DTYPES, MemoryTier
from hf_zero.engine import engine_of, has_sources
from hf_zero.errors import UnsupportedError
from hf_zero.planner import EVALUATED, REFERENCE, TRAINED, Prediction, longest_sequence
from hf_zero.planner.meter import Meter, device_attention
from tests.distributed import run_ranks
from tests.planner import subjects
from tests.planner.subjects import predict
from tests.tensor_meter import TensorMeter
from tests.test_groups import on_two_hosts
from tests.tiers import more


COMMON = {"bucket_nbytes": 2**16, "shared_memory": False}
REST, PEAK = 0.005, 0.02
AdamW = partial(torch.optim.AdamW, fused=True)
# Models beside those of `subjects`, all of them Llamas; "wide" has 8 times the vocabulary, and rows as long.
MODELS: dict[str, Callable[[], Any]] = {name: partial(subjects.build, name) for name in subjects.BUILDERS}
MODELS |= {
    "adapter": partial(subjects.with_adapter, "llama"),
    "wide": partial(subjects.build, "llama", vocab_size=8 * subjects.VOCAB),
}


def _batch(name: str, length: int | None = None) -> dict[str, torch.Tensor]:
    length = length or subjects.LENGTH * (8 if name == "wide" else 1)
    return subjects.batch(name if name in subjects.BUILDERS else "llama", length)


def _collect() -> None:
    while gc.collect():
        pass


def _train_on_two_hosts(*args) -> dict[str, int]:
    with on_two_hosts(True):
        return _train(*args)


def _train(
    name: str, checkpointing: bool, settings: dict[str, Any], length: int | None = None, make: Any = None
) -> dict[str, int]:
    """A third step, measured: bytes at rest, at the peak, sent, and of the host and of state there."""
    _collect()
    settings, make = {**COMMON, **settings}, make or MODELS[name]
    forwards, num_batches = settings.pop("forwards", (TRAINED,)), 1 + settings.pop("accumulates", False)
    with TensorMeter() as meter:
        meter.mark("begin")
        model = make()
        if checkpointing:
            model.activation_checkpointing_enable() if hasattr(
                model, "activation_checkpointing_enable"
            ) else model.gradient_checkpointing_enable()
        engine = engine_of(hf_zero.shard(model, **settings))
        has_twin = REFERENCE in forwards and not hasattr(model, "disable_adapter")
        reference = make().requires_grad_(False).eval() if has_twin else model
        engines = [engine, *([engine_of(hf_zero.shard(reference, **settings))] if has_twin else [])]
        optimizer = hf_zero.ShardedOptimizer(engine, AdamW(p for p in model.parameters() if p.requires_grad))
        for step in range(3):
            _collect()
            meter.mark(f"step-{step}")
            before = sum(each.comm.counters.total_sent_nbytes for each in engines)
            for _ in range(num_batches):
                for kind in forwards:
                    if kind == TRAINED:
                        loss = model(**_batch(name, length)).loss
                        continue
                    is_whole = has_twin or kind == EVALUATED
                    with torch.no_grad(), nullcontext() if is_whole else model.disable_adapter():
                        (reference if kind == REFERENCE else model)(**_batch(name, length))
                loss.backward()
                del loss
            optimizer.clip_grad_norm_(1.0)
            _collect()
            meter.mark(f"rest-{step}")
            host = hf_zero.ShardedModel(model).memory().host_nbytes
            mapped = engine.bus.host_nbytes  # not among what the allocator hands out
            staging = engine.root.flats[0].masters.transfer.nbytes
            optimizer.step()
            optimizer.zero_grad()
        sent = sum(each.comm.counters.total_sent_nbytes for each in engines) - before
        _collect()
        meter.mark("end")
    return {
        "rest": meter.span("begin", "rest-2").end_nbytes,
        "kept": meter.span("begin", "end").end_nbytes,
        "peak": meter.span("step-2", "end").peak_nbytes,
        "sent": sent,
        "host": host,
        "mapped": mapped,
        "staging": staging,
    }


def _predicted(
    name: str,
    checkpointing: bool,
    settings: dict[str, Any],
    num_ranks: int = 2,
    model: Any = None,
    length: int | None = None,
) -> Prediction:
    if model is None:
        with torch.device("meta"):
            model = MODELS[name]()
    return predict(
        model,
        num_ranks=num_ranks,
        batch=_batch(name, length),
        make_optimizer=AdamW,
        gradient_checkpointing=checkpointing,
        on_cpu=True,
        **{**COMMON, **settings},
    )


def _compare(
    predicted: Prediction, name: str, checkpointing: bool, settings: dict, make: Any = None, peak: float = PEAK
) -> None:
    for found in run_ranks(_train, predicted.num_ranks, name, checkpointing, settings, None, make):
        assert predicted.resting_nbytes == pytest.approx(found["rest"], rel=REST)
        assert predicted.step.kept_nbytes == pytest.approx(found["kept"], rel=REST)
        assert predicted.peak_nbytes == pytest.approx(found["peak"], rel=peak)
        if not settings.get("accumulates"):  # traffic is that of a step of one micro-batch
            assert predicted.step.sent_nbytes + predicted.step.copied_nbytes == found["sent"]


BF16 = {"compute_dtype": torch.bfloat16}
SHARED, GROUPS = {"sequence_parallel": 2}, {"shard_size": 2}
BITS = {"gather_dtype": torch.int8, "reduce_dtype": torch.int8}
# Where gradients are added up in fp32, small ones of the first micro-batch are held back until the second's come.
LATER = {"accumulates": True, "within": 0.005}
# The reference rests beside the model, and its forward runs while the model's activations are there, or before. An
# adapter's is the model without it, by the same engine. It is evaluated: with dropout, GPT-2's would be the peak.
REFERRED = {"forwards": (TRAINED, REFERENCE)}
# The model, whether activations are checkpointed, the number of ranks, and settings.
CORE: list[tuple[str, bool, int, dict]] = [
    ("llama", True, 2, {"stage": 3, **BF16}),
    ("bert", True, 2, {"stage": 2, **BF16}),
    ("gpt2", False, 2, {"stage": 0}),
    ("gpt2", True, 2, {"stage": 0, **BF16}),
    ("llama", True, 2, {"stage": 3, **BF16, **SHARED, "chunked_loss": "on"}),
    ("llama", False, 2, {"stage": 3, **BITS}),
    ("adapter", True, 2, {"stage": 3, **BF16, **REFERRED}),
    ("llama", False, 2, {"stage": 3, **BF16, **LATER}),
]
MORE = [
    *((name, False, 2, {"stage": stage}) for name in subjects.BUILDERS for stage in range(4)),
    *((name, True, 2, {"stage": stage, **BF16}) for name in subjects.BUILDERS for stage in range(4)),
    ("llama", False, 4, {"stage": 3, **BF16, **GROUPS}),
    ("llama", False, 4, {"stage": 2, **GROUPS}),
    ("llama", False, 2, {"stage": 3, **SHARED}),
    ("qwen3", False, 2, {"stage": 2, **BF16, **SHARED}),
    ("mixtral", True, 2, {"stage": 1, **SHARED}),
    ("llama", False, 2, {"stage": 3, "tiled_mlp": 4}),
    ("llama", True, 2, {"stage": 3, "tiled_mlp": 4}),
    ("llama", True, 2, {"stage": 3, **BF16, **BITS}),
    # the logits of all tokens would take 32 MiB in fp32; the chunked loss makes the peak
    ("wide", True, 2, {"stage": 3, **BF16, **REFERRED, "chunked_loss": "on", "tiled_mlp": 4}),
    ("llama", False, 2, {"stage": 2, **REFERRED}),
    ("llama", False, 2, {"stage": 3, "forwards": (EVALUATED, TRAINED, REFERENCE, REFERENCE)}),  # KTO
    ("llama", False, 2, {"stage": 3, **BF16, "forwards": (REFERENCE, TRAINED)}),  # GRPO
    ("gpt2", False, 2, {"stage": 3, **REFERRED, "within": 0.002}),
    ("adapter", False, 2, {"stage": 2, **REFERRED}),
    ("llama", True, 2, {"stage": 1, **BF16, **LATER}),
    ("llama", False, 2, {"stage": 1, **LATER}),
    ("llama", True, 2, {"stage": 0, **LATER}),
]


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    "name, checkpointing, num_ranks, settings", [*CORE, *more(*(row for row in MORE if row not in CORE))]
)
def test_rest_peak_and_traffic_are_those_of_a_real_step(name, checkpointing, num_ranks, settings):
    if name == "adapter":
        pytest.importorskip("peft")
    settings = dict(settings)
    peak = settings.pop("within", PEAK)
    _compare(_predicted(name, checkpointing, settings, num_ranks), name, checkpointing, settings, peak=peak)


def test_a_model_of_several_stacks_is_predicted_where_ranks_agree_on_the_next_one():
    predicted = _predicted("t5", False, {"stage": 3, "shared_memory": False}, num_ranks=8)
    assert predicted.step is not None and predicted.step.sent_nbytes > 0


def test_a_learned_bias_of_the_scores_has_its_gradient_from_the_fused_kernel_of_a_gpu():
    """All that attention leaves for its backward, beside what it is given, is its output and one number per query."""
    with Meter() as meter, device_attention(on_cpu=False):
        query, key, value = (torch.empty(2, 4, 32, 16, device="meta", requires_grad=True) for _ in range(3))
        bias = torch.empty(1, 4, 32, 32, device="meta", requires_grad=True)
        before = meter.held[MemoryTier.DEVICE]
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        assert meter.held[MemoryTier.DEVICE] - before == 4 * 2 * 4 * 32 * (16 + 1)
        attended.sum().backward()
    assert [each.grad.shape for each in (query, bias)] == [query.shape, bias.shape]
    with torch.device("meta"):
        model = subjects.build("t5")
    on_gpu, on_cpu = (
        predict(model, num_ranks=2, batch=subjects.batch("t5"), stage=3, on_cpu=each) for each in (False, True)
    )
    assert on_gpu.step.activation_nbytes < on_cpu.step.activation_nbytes


@pytest.mark.quick
def test_an_accelerators_gradients_take_no_memory_of_the_first_forward():
    """They are given back with the step; those of an earlier micro-batch stay until then."""
    settings = {"num_ranks": 8, "batch": subjects.batch("llama"), "stage": 2, "compute_dtype": torch.bfloat16}
    first, later = (predict(subjects.build("llama"), accumulates=each, **settings) for each in (False, True))
    sums = sum(each.nbytes for each in first.classes if each.name == "reduced gradients")
    assert later.step.moments["block 0"] - first.step.moments["block 0"] == pytest.approx(sums, rel=0.01)
    assert first.resting_nbytes - first.step.kept_nbytes == pytest.approx(sums, rel=0.01)


@pytest.mark.quick
def test_the_memory_through_which_packed_values_go_is_there_from_the_first_moment_on():
    """A run has it from its first gathers on."""
    settings = {"num_ranks": 8, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16}

    def predicted(**others: Any) -> tuple[Prediction, int]:
        found = predict(subjects.build("llama"), **settings, **others)
        return found, sum(each.nbytes for each in found.classes if each.name == "communication buffers")

    (exact, less), (packed, more) = (predicted(gather_dtype=each, stage=3) for each in (None, torch.int8))
    assert packed.step.activation_nbytes == exact.step.activation_nbytes
    assert packed.resting_nbytes - exact.resting_nbytes >= more - less > 0  # ranges are padded to blocks of scales


@pytest.mark.full("slow")
@pytest.mark.parametrize("checkpointing, chunked_loss", [(False, "off"), (True, "on")])
def test_the_longest_sequence_that_is_predicted_fits_in_a_real_step(checkpointing, chunked_loss):
    settings = {"stage": 3, "compute_dtype": torch.bfloat16, "chunked_loss": chunked_loss}
    with torch.device("meta"):
        model = subjects.build("llama")

    def predicted(length: int) -> Prediction:
        return _predicted("llama", checkpointing, settings, model=model, length=length)

    found = longest_sequence(predicted, 24 * 2**20, model.config.max_position_embeddings)
    assert found.prediction.peak_nbytes <= found.limit < found.more.peak_nbytes
    for each in run_ranks(_train, 2, "llama", checkpointing, settings, found.num_tokens):
        assert each["peak"] == pytest.approx(found.prediction.peak_nbytes, rel=PEAK)
        assert each["peak"] <= found.limit * (1 + PEAK)


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("bits", [None, "int8"])
def test_traffic_of_sums_in_another_dtype_on_two_hosts(bits):
    """What a rank reads of its neighbour in bf16, and what it sends to its counterpart on the other host: sums in fp32
    or in few bits."""
    settings = {"stage": 3, "compute_dtype": torch.bfloat16, "shared_memory": True, "shard_size": 2}
    exact = predicted = _predicted("llama", False, settings | {"ranks_per_host": 2}, num_ranks=4)
    if bits is not None:
        settings |= {"gather_dtype": torch.int8, "reduce_dtype": REDUCE_DTYPES[bits]}
        predicted = _predicted("llama", False, settings | {"ranks_per_host": 2}, num_ranks=4)
        assert predicted.step.sent_nbytes < exact.step.sent_nbytes
    for found in run_ranks(_train_on_two_hosts, 4, "llama", False, settings):
        assert predicted.step.sent_nbytes == found["sent"]


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize(
    "kind, stage, checkpointing, dtype, compute",
    [
        ("4-bits-nested", 3, True, torch.bfloat16, torch.bfloat16),
        ("4-bits-nested", 2, False, torch.bfloat16, torch.bfloat16),
        ("4-bits", 3, False, torch.float32, torch.bfloat16),
        ("4-bits", 1, True, torch.float32, None),
    ],
)
def test_an_adapter_on_a_quantized_base_takes_what_a_real_step_takes(
    kind, stage, checkpointing, dtype, compute, tmp_path
):
    """Its frozen bytes are divided at stage 3, its scales never, and a product puts one weight together."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes", reason="what quantizes the base")
    subjects.build("llama").save_pretrained(tmp_path)
    settings = {"stage": stage, "compute_dtype": compute}
    predicted = _predicted("llama", checkpointing, settings, model=subjects.quantized_without_data(kind, dtype))
    assert predicted.num_parameters - predicted.num_trained == subjects.build("llama").num_parameters()
    assert any(each.name == "scales of quantized parameters" for each in predicted.classes)
    read = partial(subjects.read_quantized, str(tmp_path), kind, dtype)
    _compare(predicted, "llama", checkpointing, settings, read)


@pytest.mark.parametrize("stage, offload", [(2, "optimizer"), (3, "params")])
def test_offloaded_bytes_are_those_of_a_real_step(stage, offload):
    """On CPUs both memories are one: the allocator hands out what the device would hold and the state, and what else
    rests on the host is mapped."""
    settings = {"stage": stage, "offload": offload, "compute_dtype": torch.bfloat16}
    predicted = _predicted("llama", False, settings)
    for found in run_ranks(_train, 2, "llama", False, settings):
        state = found["host"] - found["mapped"]
        assert predicted.host_nbytes == pytest.approx(found["host"] - found["staging"], rel=REST)
        assert predicted.resting_nbytes + state == pytest.approx(found["rest"], rel=REST)
        assert predicted.step.sent_nbytes + predicted.step.copied_nbytes == found["sent"]


def test_a_model_is_left_as_it_is():
    model = subjects.build("llama")
    before = {name: (param, param.data_ptr()) for name, param in model.named_parameters()}
    predict(model, num_ranks=64, stage=3, batch=subjects.batch("llama"), gradient_checkpointing=True)
    assert all(
        param is before[name][0] and param.data_ptr() == before[name][1] for name, param in model.named_parameters()
    )
    model(**subjects.batch("llama")).loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_weights_may_still_be_in_files(tmp_path):
    from transformers import LlamaForCausalLM

    subjects.build("llama").save_pretrained(tmp_path)
    model = hf_zero.load_pretrained(LlamaForCausalLM, tmp_path).train()
    assert has_sources(model)
    unread = predict(model, num_ranks=4, stage=3)
    assert has_sources(model)
    assert unread.classes == predict(subjects.build("llama"), num_ranks=4, stage=3).classes
    assert unread.peak_nbytes is None and "no batch" in unread.note


@pytest.mark.quick
def test_bytes_at_rest_fall_with_stage_and_ranks():
    model = subjects.build("llama")
    by_stage = [predict(model, num_ranks=8, stage=stage).resting_nbytes for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True) and len(set(by_stage)) == 4
    by_ranks = [predict(model, num_ranks=num_ranks, stage=3).resting_nbytes for num_ranks in (2, 8, 64)]
    assert by_ranks == sorted(by_ranks, reverse=True)
    grouped = [predict(model, num_ranks=64, stage=3, shard_size=size).resting_nbytes for size in (8, "auto")]
    eight = predict(model, num_ranks=8, stage=3).resting_nbytes
    assert grouped[0] == grouped[1] == pytest.approx(eight, rel=0.05)


def test_hosts_have_as_many_ranks_as_is_said():
    model, settings = subjects.build("llama"), {"num_ranks": 12, "batch": subjects.batch("llama")}
    four = predict(model, shard_size="auto", ranks_per_host=4, **settings)
    assert four.shard_size == 4 and predict(model, shard_size="auto", ranks_per_host=1, **settings).shard_size == 12
    apart, together, by_messages = (
        predict(model, on_cpu=True, **settings, **others)
        for others in ({"ranks_per_host": 4}, {}, {"shared_memory": False})
    )
    assert together.step.shares_memory and not apart.step.shares_memory
    assert apart.step.sent_nbytes == by_messages.step.sent_nbytes != together.step.sent_nbytes


def test_a_model_that_does_not_run_without_data_is_predicted_at_rest():
    class Choosy(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.numpy().sum()

    prediction = predict(Choosy(64, 64), num_ranks=2, stage=3, batch={"x": torch.zeros(2, 64)})
    assert prediction.resting_nbytes > 0 and prediction.peak_nbytes is None
    assert "does not run without data" in prediction.note and prediction.note in prediction.render()
    with pytest.raises(UnsupportedError, match="offload_activations: Linear has no repeated blocks"):
        predict(torch.nn.Linear(4, 4), num_ranks=2, offload_activations=True)  # as a run is refused
