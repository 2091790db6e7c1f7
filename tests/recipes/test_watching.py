"""The parts that watch a run: operations, tokens, lines, logs."""

import resource
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.trainer_utils import IntervalStrategy

from hf_zero.recipes import report
from hf_zero.recipes.plan_input import quantize
from hf_zero.recipes.report import PEAK_TFLOPS, Telemetry, counts_of, peak_flops, training_flops, usage_command
from hf_zero.recipes.run import _parameters_line
from tests.recipes.ranks import read_log


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
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
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


def test_operations_are_six_for_each_parameter_that_a_token_goes_through_and_those_of_attention():
    dense, tied = (LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=tied)) for tied in (False, True))
    attention = 12 * 2 * 16 * 32  # layers, width, tokens in a row
    assert training_flops(dense, num_tokens=64, num_rows=2) == 64 * (6 * matmul_numel(dense) + attention)
    assert training_flops(tied, num_tokens=1, num_rows=0) == 6 * sum(p.numel() for p in tied.parameters())
    experts = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=1))
    unused = sum(p.numel() for name, p in experts.named_parameters() if ".experts." in name) * 3 / 4
    assert training_flops(experts, num_tokens=1, num_rows=0) == pytest.approx(6 * (matmul_numel(experts) - unused))
    dense.requires_grad_(False).lm_head.requires_grad_(True)  # frozen parameters have no weight gradient
    expected = 4 * matmul_numel(dense) + 2 * dense.lm_head.weight.numel()
    assert training_flops(dense, num_tokens=1, num_rows=0) == expected


def test_of_a_base_in_4_bits_all_weights_count_whatever_they_are_stored_in():
    pytest.importorskip("bitsandbytes", reason="what quantizes the base")
    with torch.device("meta"):
        plain, packed = (LlamaForCausalLM(LlamaConfig(**TINY)).requires_grad_(False) for _ in range(2))
    quantize(packed, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"))
    assert training_flops(packed, num_tokens=64, num_rows=2) == training_flops(plain, num_tokens=64, num_rows=2)
    assert _parameters_line(packed) == _parameters_line(plain)


def test_padding_is_no_token_and_packed_rows_are_rows():
    ids = torch.ones(2, 6, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert tuple(map(int, counts_of({"input_ids": ids, "attention_mask": mask}))) == (10, 2)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]])
    block_mask = torch.ones(2, 1, 6, 6)
    packed = {"input_ids": ids, "attention_mask": block_mask, "position_ids": positions}
    assert tuple(map(int, counts_of(packed))) == (12, 4)
    assert counts_of({"pixel_values": torch.zeros(3, 3, 8, 8), "labels": torch.zeros(3)}) == (0, 3)


def trainer_in(folder) -> SimpleNamespace:
    args = SimpleNamespace(output_dir=str(folder), logging_strategy=IntervalStrategy.STEPS)
    return SimpleNamespace(args=args, model=None)


@pytest.mark.parametrize("num_sharing", [1, 2])
def test_tokens_that_ranks_share_count_once(num_sharing, tmp_path, monkeypatch):
    cpu, model = torch.device("cpu"), LlamaForCausalLM(LlamaConfig(**TINY))
    comm = SimpleNamespace(device=cpu)
    gathered = []
    comm.all_gather_vector = lambda own: gathered.append(own) or own.repeat(2, 1)  # of two ranks
    monkeypatch.setattr(report, "require_engine", lambda _: SimpleNamespace(comm=comm))
    args = trainer_in(tmp_path).args
    vars(args).update(device=cpu, bf16=False, fp16=False, zero_sequence_parallel=num_sharing)
    watch = Telemetry(trainer_in(tmp_path))
    state = SimpleNamespace(log_history=[{}], global_step=0, max_steps=2, is_world_process_zero=True)
    watch.on_train_begin(args, state, None, model=model)
    model(input_ids=torch.ones(3, 8, dtype=torch.long))
    watch.on_step_end(args, state, None)
    logs = {"loss": 1.0}
    watch.on_log(args, state, None, logs=logs)
    tokens = logs["zero/tokens_per_second"] * gathered[0][2].item()
    assert tokens == pytest.approx(2 * 3 * 8 / num_sharing, rel=1e-4)
    assert state.log_history[-1]["zero/peak_memory_mib"] == logs["zero/peak_memory_mib"] > 0


@pytest.mark.quick
@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_a_process_is_in_bytes_whatever_the_system_counts_in(platform, unit, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2**50 // unit))
    assert report.peak_nbytes(torch.device("cpu")) == 2**50


def test_a_log_continues_that_of_the_checkpoint(tmp_path):
    history = [{"loss": 1.0, "step": 1}]
    state = SimpleNamespace(global_step=2, is_world_process_zero=True, log_history=history)
    path = tmp_path / "training_log.jsonl"
    path.write_text('{"loss": 1.0, "step": 1}\n{"loss": 0.9, "step": 2}\n{"loss": 0.8, "st', encoding="utf-8")
    watch = Telemetry(trainer_in(tmp_path))
    args = SimpleNamespace(device=torch.device("cpu"))
    watch.on_train_begin(args, state, None, model=nn.Linear(1, 1))
    watch.on_log(args, state, None, logs={"eval_loss": 0.5})
    assert read_log(path) == [{"loss": 1.0, "step": 1}, {"eval_loss": 0.5, "step": 2}]


LOG = [
    {"eval_loss": 3.0, "eval_accuracy": 0.1, "step": 0},
    *({"loss": 2.0 - 0.1 * step, "learning_rate": 1e-3, "step": step} for step in (1, 2, 3)),
    {"eval_loss": 1.0, "eval_accuracy": 0.6, "step": 2},
    {"eval_loss": 1.5, "eval_accuracy": 0.5, "rewards/margins": 0.1, "step": 3},
]


@pytest.mark.parametrize(("strategy", "is_logged"), [("steps", True), ("epoch", True), ("no", False)])
def test_the_last_step_is_logged(strategy, is_logged, tmp_path):
    args = SimpleNamespace(output_dir=tmp_path, logging_strategy=IntervalStrategy(strategy))
    watch, control = Telemetry(SimpleNamespace(args=args)), SimpleNamespace(should_log=False)
    watch.on_step_end(args, SimpleNamespace(global_step=6, max_steps=7), control)
    assert not control.should_log
    watch.on_step_end(args, SimpleNamespace(global_step=7, max_steps=7), control)
    assert control.should_log is is_logged


def test_every_number_that_was_logged_has_a_curve():
    assert report.curves_of([{"train_runtime": 1.0, "train_loss": 1.0, "epoch": 0.5, "step": 3}]) == {}
    assert report.curves_of([{"loss": None, "step": 1}, {"loss": 2.0, "step": 2}]) == {"loss": {2: 2.0}}
    assert {name: [*curve] for name, curve in report.curves_of(LOG).items()} == {
        **{"eval_loss": [0, 2, 3], "eval_accuracy": [0, 2, 3]},
        **{"loss": [1, 2, 3], "learning_rate": [1, 2, 3], "rewards/margins": [3]},
    }
    chart = report._chart(report.curves_of(LOG)["eval_loss"])
    assert 'points="0.0,0.0 320.0,200.0 480.0,150.0"' in chart
    assert all(f">{text}</text>" in chart for text in ("3", "1", "step 3"))


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path):
    watch = Telemetry(trainer_in(tmp_path))
    watch._write("w", [{"step": 1, "loss": float("nan"), "grad_norm": float("inf")}])
    text = (tmp_path / report.LOG_NAME).read_text(encoding="utf-8")
    assert text == '{"step": 1, "loss": null, "grad_norm": null}\n'


def test_the_command_survives_the_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, text = 'it\'s a "folder" \\', 'say "it\'s $HOME" é 🙂'
    words = shlex.split(usage_command(folder, text))
    assert words[0] == sys.executable and words[1] == "-c"
    code = words[2].replace("from transformers import pipeline;", "pipeline = lambda *a: lambda *b: repr(a + b);")
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == repr(("text-classification", folder, text))
