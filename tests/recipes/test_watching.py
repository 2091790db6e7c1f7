"""The parts that watch a run: operations, tokens, lines, logs."""

import resource
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.trainer_utils import IntervalStrategy

from hf_zero.config import MemoryTier
from hf_zero.planner import TensorClass, by_field
from hf_zero.recipes import artifacts, metrics
from hf_zero.recipes.measured import Measured, Moment, Step, Watch
from hf_zero.recipes.metrics import PEAK_TFLOPS, TrainingLog, counts_of, line_of, peak_flops, read_log, training_flops
from hf_zero.recipes.page import CLASSES, draw, memory_rows, results_of
from hf_zero.recipes.planned_run import quantize
from hf_zero.recipes.run import _units_table


TINY = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA A1000", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_is_that_of_the_very_device(name, teraflops):
    assert peak_flops(name) == (teraflops and teraflops * 1e12)


def test_no_device_of_the_table_hides_another():
    assert all(peak_flops(name) == teraflops * 1e12 for name, teraflops in PEAK_TFLOPS.items())


def matmul_numel(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)


def test_a_dense_model_takes_six_operations_for_each_parameter_and_those_of_attention():
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    attention = 12 * 2 * 16 * 32  # layers, width, tokens in a row
    assert training_flops(model, num_tokens=64, num_rows=2) == 64 * (6 * matmul_numel(model) + attention)


def test_a_tied_embedding_is_the_head_and_counts():
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))
    numel = sum(p.numel() for p in model.parameters())
    assert training_flops(model, num_tokens=1, num_rows=0) == 6 * numel


def test_frozen_parameters_have_no_weight_gradient():
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    expected = 4 * matmul_numel(model) + 2 * model.lm_head.weight.numel()
    assert training_flops(model, num_tokens=1, num_rows=0) == expected


def test_of_experts_those_count_that_a_token_goes_through():
    model = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=1))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts > 0
    expected = 6 * (matmul_numel(model) - experts * 3 / 4)
    assert training_flops(model, num_tokens=1, num_rows=0) == pytest.approx(expected)


def test_of_a_base_in_4_bits_all_weights_count_whatever_they_are_stored_in():
    pytest.importorskip("bitsandbytes", reason="what quantizes the base")
    with torch.device("meta"):
        plain, packed = (LlamaForCausalLM(LlamaConfig(**TINY)).requires_grad_(False) for _ in range(2))
    quantize(packed, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"))
    assert training_flops(packed, num_tokens=64, num_rows=2) == training_flops(plain, num_tokens=64, num_rows=2)
    assert _units_table(packed) == _units_table(plain)


def test_padding_is_no_token_and_packed_rows_are_rows():
    ids = torch.ones(2, 6, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert tuple(map(int, counts_of({"input_ids": ids, "attention_mask": mask}))) == (10, 2)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]])
    block_mask = torch.ones(2, 1, 6, 6)
    packed = {"input_ids": ids, "attention_mask": block_mask, "position_ids": positions}
    assert tuple(map(int, counts_of(packed))) == (12, 4)
    assert counts_of({"pixel_values": torch.zeros(3, 3, 8, 8), "labels": torch.zeros(3)}) == (0, 3)


@pytest.mark.parametrize("num_sharing", [1, 2])
def test_tokens_that_ranks_share_count_once(num_sharing, monkeypatch):
    cpu, model = torch.device("cpu"), LlamaForCausalLM(LlamaConfig(**TINY))
    comm = SimpleNamespace(device=cpu, counters=SimpleNamespace(unit_nbytes={}))
    comm.all_gather_vector = lambda own: own.repeat(2, 1)  # of two ranks
    monkeypatch.setattr(metrics, "require_engine", lambda _: SimpleNamespace(comm=comm))
    args = SimpleNamespace(device=cpu, bf16=False, fp16=False, zero_sequence_parallel=num_sharing)
    telemetry, state = metrics.Telemetry(SimpleNamespace(model=model)), SimpleNamespace(log_history=[{}])
    telemetry.on_train_begin(args, state, None, model=model)
    model(input_ids=torch.ones(3, 8, dtype=torch.long))
    telemetry.on_step_end(args, state, None)
    logs = {"loss": 1.0}
    telemetry.on_log(args, state, None, logs=logs)
    tokens = logs["zero/tokens_per_second"] * logs["zero/seconds"]
    assert tokens == pytest.approx(2 * 3 * 8 / num_sharing, rel=1e-4)
    assert logs["zero/tokens_per_second_per_rank"] == pytest.approx(logs["zero/tokens_per_second"] / 2, rel=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_a_process_is_in_bytes_whatever_the_system_counts_in(platform, unit, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2**50 // unit))
    assert metrics.memory_in_use(torch.device("cpu"))[1] == 2**50


def test_a_line_says_what_a_person_wants_to_see_of_a_step():
    logs = {
        "loss": 0.51234,
        "grad_norm": 1.5,
        "learning_rate": 2e-5,
        "epoch": 0.5,
        "zero/seconds": 3.0,
        "zero/tokens_per_second": 12345.0,
        "zero/tokens_per_second_per_rank": 6172.5,
        "zero/mfu": 0.4123,
        "zero/memory_mib": 800.2,
        "zero/peak_memory_mib": 900.7,
    }
    assert line_of(logs, 5, 20) == (
        "step 5/20  loss 0.5123  grad norm 1.5  lr 2e-05  epoch 0.5  12.3k tokens/s (6.17k per rank)  MFU 41.2%  "
        "memory 800 MiB (peak 901)"
    )
    assert (
        line_of({"eval_loss": 0.25, "eval_runtime": 3.0, "epoch": 1.0}, 9, 20) == "step 9/20  eval loss 0.25  epoch 1"
    )


def test_a_log_goes_on_with_the_checkpoints_and_a_cut_line_is_left_out(tmp_path):
    state = SimpleNamespace(global_step=2, is_world_process_zero=True, log_history=[{"loss": 1.0, "step": 1}])
    log = TrainingLog(SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path))))
    path = tmp_path / "training_log.jsonl"
    path.write_text('{"loss": 1.0, "step": 1}\n{"loss": 0.9, "step": 2}\n{"loss": 0.8, "st', encoding="utf-8")
    log.on_train_begin(None, state, None)
    log.on_log(None, state, None, logs={"loss": float("nan")})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"lo')
    assert read_log(path) == [{"loss": 1.0, "step": 1}, {"loss": None, "step": 2}]


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts.importlib.util, "find_spec", lambda name: None)
    said = []
    assert artifacts._draw(tmp_path, [{"loss": 1.0, "step": 1}], None, said.append) == []
    assert said == ["report.html: without charts, as matplotlib is not installed; pip install 'hf-zero[recipes]'"]


def test_what_was_measured_before_is_shown_again_unless_it_is_damaged(tmp_path):
    path = tmp_path / "measured.json"
    moment = Moment("forward", "begin", {"parameter_nbytes": 8})
    measured = Measured([{"parameter_nbytes": 8}], Step(3, [[moment]], [{"root": 4}], True), {"parameter_nbytes": 9})
    nothing, stopped = Measured([{}], None), Measured([{"parameter_nbytes": 4}], None)
    assert nothing.kept(path, is_trained=False) == nothing
    assert measured.kept(path, is_trained=True) == measured
    assert nothing.kept(path, is_trained=False) == measured
    assert stopped.kept(path, is_trained=True) == stopped  # before the step that is watched: a run of its own
    assert nothing.kept(path, is_trained=False) == stopped
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert nothing.kept(path, is_trained=False) == nothing


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (7, 9), (9, 9)])
def test_steps_are_counted_from_where_the_run_goes_on(begin, end):
    state, trace = SimpleNamespace(global_step=begin, max_steps=30), Watch(None)
    trace.on_train_begin(None, state, None)
    for state.global_step in range(begin, end):
        trace.on_step_begin(None, state, None)
        trace.on_step_end(None, state, None)
    assert trace.num_steps == end - begin


LOG = [
    {"eval_loss": 3.0, "eval_accuracy": 0.1, "step": 0},
    *({"loss": 2.0 - 0.1 * step, "learning_rate": 1e-3, "step": step} for step in (1, 2, 3)),
    {"eval_loss": 1.0, "eval_accuracy": 0.6, "step": 2},
    {"eval_loss": 1.5, "eval_accuracy": 0.5, "step": 3},
]


def _axes_of(name: str, log=LOG):
    return next(chart for chart in draw(log, None) if chart.name == name).figure.axes[0]


def test_training_is_a_line_and_evaluations_are_markers():
    lines = {line.get_label(): line for line in _axes_of("loss").lines}
    assert lines["training"].get_linestyle() == "-" and lines["training"].get_marker() == "None"
    assert lines["evaluation"].get_linestyle() == "None" and lines["evaluation"].get_marker() == "o"
    assert list(lines["evaluation"].get_xdata()) == [0, 2, 3]
    assert _axes_of("eval_accuracy").lines[-1].get_marker() == "o"
    assert _axes_of("loss", LOG[1:2]).lines[0].get_marker() == "o"  # a line of one point would not be seen


@pytest.mark.parametrize("last", [1, 3, 12, 5000])
def test_steps_are_whole_numbers_from_none_to_the_last(last):
    axes = _axes_of("loss", [{"loss": 1.0, "step": last}])
    low, high = axes.get_xlim()
    assert low <= 0 < last <= high < 1.1 * last
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert len(ticks) >= 2 and all(tick == int(tick) for tick in ticks)


def test_charts_that_stand_beside_one_another_are_as_high():
    moment = Moment("forward", "begin", dict.fromkeys((name for _, name in CLASSES), 8))
    moment.nbytes.update({f"ddp_{name}_nbytes": 8 for name in ("parameter", "gradient", "optimizer")})
    for num_ranks, num_units in ((1, 30), (4, 2)):
        sent = [{f"unit.{index}": 4 for index in range(num_units)}] * num_ranks
        drawn = draw(LOG, Step(3, [[moment]] * num_ranks, sent, shares_memory=num_units == 2))
        sizes = {chart.is_of_step: set() for chart in drawn}
        for chart in drawn:
            sizes[chart.is_of_step].add(tuple(chart.figure.get_size_inches()))
        assert all(len(found) == 1 for found in sizes.values())
        what = "Read from shared memory" if num_units == 2 else "Sent"
        assert drawn[-1].title == f"{what} per rank in step 3, by unit"


@pytest.mark.quick
def test_the_result_is_the_last_evaluation_and_the_best_step():
    assert results_of(LOG) == [
        ("accuracy", "0.5"),
        ("evaluation loss", "1.5"),
        ("best step", "2 (evaluation loss 1)"),
    ]
    assert results_of(LOG, "eval_accuracy", True)[-1] == ("best step", "2 (accuracy 0.6)")
    assert results_of(LOG[1:4]) == [("training loss", "1.7")]
    assert results_of([]) == []


@pytest.mark.parametrize(("strategy", "is_logged"), [("steps", True), ("epoch", True), ("no", False)])
def test_the_last_step_is_logged(strategy, is_logged, tmp_path):
    args = SimpleNamespace(output_dir=tmp_path, logging_strategy=IntervalStrategy(strategy))
    log, control = TrainingLog(SimpleNamespace(args=args)), SimpleNamespace(should_log=False)
    log.on_step_end(args, SimpleNamespace(global_step=6, max_steps=7), control)
    assert not control.should_log
    log.on_step_end(args, SimpleNamespace(global_step=7, max_steps=7), control)
    assert control.should_log is is_logged


def test_what_was_planned_stands_beside_what_was_measured():
    report = {"parameter_nbytes": 2**20, "optimizer_nbytes": 2**21, "ddp_parameter_nbytes": 2**22}
    classes = [
        TensorClass("parameters", torch.float32, 2**20, 2),
        TensorClass("optimizer state", torch.float32, 2**20, 2),
        TensorClass("masters", torch.float32, 2**20, 2),
        TensorClass("buffers to gather in", None, 2**19, 1),
        TensorClass("optimizer state", torch.float32, 2**23, 2, MemoryTier.HOST),
    ]
    rows = memory_rows([report], by_field(classes))
    assert rows == [
        ["parameters", "1.00", "1.00", "4.00"],
        ["optimizer state", "2.00", "2.00", "–"],
        ["reused buffers", "0.00", "0.50", "–"],
        ["on the host", "0.00", "8.00", "–"],
        ["all on the device", "3.00", "3.50", "4.00"],
    ]
    assert memory_rows([report], {})[0] == ["parameters", "1.00", "–", "4.00"]


def test_what_was_never_logged_has_no_chart():
    assert draw([{"train_runtime": 1.0, "step": 3}], None) == []
    assert [chart.name for chart in draw([{"loss": None, "step": 1}, {"loss": 2.0, "step": 2}], None)] == ["loss"]
