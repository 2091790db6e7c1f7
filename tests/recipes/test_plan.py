"""`plan`: from a config alone to bytes and advice."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from transformers import Trainer, TrainingArguments
from transformers.utils import is_bitsandbytes_available

from hf_zero.activation import offload
from hf_zero.recipes import plan_input
from hf_zero.recipes.cli import main
from tests.trainer.harness import reset_accelerate


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SETTINGS = ["--num_processes", "8", "--zero_stage", "3", "--bf16", "--max_length", "64"]


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def _plan(capsys, *argv: str, status: int = 0) -> str:
    assert main(["plan", *map(str, argv)]) == status
    return capsys.readouterr().out


def _mib(text: str, name: str) -> float:
    return float(re.search(rf"^  {name}.*?([\d.]+) MiB", text, re.MULTILINE)[1])


@pytest.mark.quick
def test_a_config_file_or_its_folder_is_enough(config_file, capsys):
    text = _plan(capsys, config_file, *SETTINGS)
    assert "8 rank(s)" in text
    named = ("parameters", "optimizer state", "between steps", "activations", "logits", "at the peak", "sent per step")
    for name in named:
        assert _mib(text, name) > 0
    assert _plan(capsys, config_file.parent, *SETTINGS).partition(":")[2] == text.partition(":")[2]


def test_settings_change_what_they_are_for(config_file, capsys):
    text = _plan(capsys, config_file, *SETTINGS)
    assert _mib(_plan(capsys, config_file, *SETTINGS, "--gradient_checkpointing"), "activations") < _mib(
        text, "activations"
    )
    assert _mib(_plan(capsys, config_file, *SETTINGS, "--max_length", "128"), "activations") > 1.5 * _mib(
        text, "activations"
    )
    offloaded = _plan(capsys, config_file, *SETTINGS, "--zero_offload", "params", "--zero_offload_dir", "/nvme")
    assert _mib(offloaded, "in files") > 0 and _mib(offloaded, "between steps") < _mib(text, "between steps")
    momentum = _plan(capsys, config_file, *SETTINGS, "--optim", "lion_32bit")
    assert _mib(momentum, "optimizer state") == pytest.approx(_mib(text, "optimizer state") / 2, abs=0.01)
    if is_bitsandbytes_available():  # three values for each element, two of them in one tensor
        mixed = _plan(capsys, config_file, *SETTINGS, "--optim", "ademamix")
        assert _mib(mixed, "optimizer state") == pytest.approx(1.5 * _mib(text, "optimizer state"), abs=0.02)
    adapted = _plan(capsys, config_file, *SETTINGS, "--use_peft", "--lora_r", "4")
    assert _mib(adapted, "optimizer state") < _mib(text, "optimizer state") / 2
    two = _plan(
        capsys, config_file, *SETTINGS, "--use_peft", "--lora_r=4", "--lora_target_modules", "q_proj", "v_proj"
    )
    assert 0 < _mib(two, "optimizer state") < _mib(adapted, "optimizer state")


@pytest.mark.parametrize("more", [[], ["--gradient_checkpointing"]])
def test_activations_on_the_host_are_planned(config_file, capsys, monkeypatch, more):
    asked = [config_file, *SETTINGS, *more]
    plain = _plan(capsys, *asked)
    assert _plan(capsys, *asked, "--zero_offload_activations") == plain  # they are small
    monkeypatch.setattr(offload, "MIN_NBYTES", 1)
    assert _mib(_plan(capsys, *asked, "--zero_offload_activations"), "activations") < _mib(plain, "activations")


def test_memory_brings_a_table_and_advice(config_file, capsys):
    text = _plan(capsys, config_file, *SETTINGS, "--memory", "64")
    assert len(re.findall(r"^  [0-3]      ", text, re.MULTILINE)) == 14
    assert "recommended: --zero_stage 0 (nothing needs to be sharded)" in text
    text = _plan(capsys, config_file, *SETTINGS, "--memory", "0.001", status=1)
    assert text.count("nothing fits") == 1 and "nothing fits: with " in text and "recommended" not in text
    albert = {"architectures": ["AlbertForMaskedLM"], "model_type": "albert", "num_hidden_layers": 2}
    config_file.write_text(json.dumps({**CONFIG, **albert}))
    text = _plan(capsys, config_file, "--max_length=64", "--memory=0.001", status=1)
    assert "skipped: AlbertForMaskedLM" in text and "--gradient_checkpointing" not in text


@pytest.mark.full("slow")
def test_the_longest_sequence_that_fits_is_planned(config_file, capsys):
    asked = [config_file, *SETTINGS[:-2], "--per_device_train_batch_size=1", "--gpu=h100", "--zero_bucket_mb=32"]
    peak = _mib(_plan(capsys, *asked, "--max_length=512"), "at the peak")
    memory = ["--memory", str((peak + 0.01) / 0.9 / 1024)]
    text = _plan(capsys, *asked, "--max_length=auto", *memory)
    assert re.search(
        r"^  max_length auto: 512 tokens take .* may take, and 576 tokens do not fit$", text, re.MULTILINE
    )
    assert " 1 x 512 tokens;" in text and _mib(text, "at the peak") == peak and "it fits: " in text
    assert "it does not fit: " in _plan(capsys, *asked, "--max_length=576", *memory)
    assert json.loads(_plan(capsys, *asked, "--max_length=auto", "--json"))["max_length"] == 2048  # all positions


def test_memory_is_printed_as_json_without_a_device(config_file, capsys):
    asked = [config_file, *SETTINGS, "--json"]
    found = json.loads(_plan(capsys, *asked))
    peak = _mib(_plan(capsys, *asked[:-1]), "at the peak")
    assert (found["num_ranks"], found["max_length"], found["prediction"]["stage"]) == (8, 64, 3)
    assert found["prediction"]["peak_nbytes"] == pytest.approx(peak * 2**20, abs=2**17)
    nothing = json.loads(_plan(capsys, *asked, "--memory=0.001", status=1))
    assert not nothing["remedy"]["fits"]


def test_the_flags_that_make_it_fit_are_named_and_computed(config_file, capsys):
    wide = [config_file, *SETTINGS, "--max_length=1024", "--per_device_train_batch_size=1", "--zero_chunked_loss=off"]
    wide += ["--gpu=h100", "--zero_bucket_mb=32"]  # auto goes by the memory
    asked = _plan(capsys, *wide)
    memory = ["--memory", str(_mib(asked, "at the peak") / 1024)]  # of which tensors may take 90 %
    text = _plan(capsys, *wide, *memory)
    flags, needed = re.search(r"^it fits with (.*): ([\d.]+) MiB$", text, re.MULTILINE).groups()
    assert f"it needs {_mib(asked, 'at the peak'):.1f} MiB, and " in text and text.count("does not fit") == 1
    told = json.loads(_plan(capsys, *wide, *memory, "--json"))["remedy"]
    assert told == {"flags": flags, "fits": True, "peak_nbytes": pytest.approx(float(needed) * 2**20, abs=2**17)}
    assert "remedy" not in json.loads(_plan(capsys, *wide, "--json"))
    nothing = _plan(capsys, *wide, "--memory=0.001", "--json", status=1)
    assert not json.loads(nothing)["remedy"]["fits"]
    with_them = _plan(capsys, *wide, *flags.split(), *memory)
    assert f"{_mib(with_them, 'at the peak'):.1f}" == needed and "it fits: " in with_them


def test_a_device_brings_the_time_of_a_step(config_file, capsys):
    hosts = [config_file, *SETTINGS, "--hosts", "2", "--gpu", "h100"]
    text = _plan(capsys, *hosts)
    assert "8 rank(s)" in text and "2 x 4 NVIDIA H100" in text and "matrix products at 49%" in text
    for name in ("kernels", "all-gathers", "reduce-scatters", "a step"):
        assert float(re.search(rf"^  {name} +([\d.]+) ms", text, re.MULTILINE)[1]) > 0
    assert "tokens per second per device" in text and "MFU" in text and "not modeled: " in text
    assert "it fits: tensors may take 90% of 80.0 GiB" in text
    in_few_bits = _plan(capsys, *hosts, "--zero_reduce_dtype", "int8", "--zero_gather_dtype", "int8")
    assert _mib(in_few_bits, "sent per step") < 0.5 * _mib(text, "sent per step")
    assert "reduce-scatters" in in_few_bits and "a step  " in in_few_bits
    shared = _plan(capsys, *hosts, "--zero_sequence_parallel", "2")
    assert "over 8 rank(s), sequences shared by 2, each:" in shared
    assert re.search("exchanges of heads .* ms within the host", shared)
    assert _mib(shared, "activations") < 0.6 * _mib(text, "activations")


def test_a_processor_is_a_device_too(config_file, capsys):
    asked = [config_file, *SETTINGS, "--num_processes=2"]
    text = _plan(capsys, *asked, "--gpu", "cpu")
    assert "1 x 2 AMD EPYC 9654, one socket; matrix products at" in text and "of 14.7 TFLOP/s" in text
    for name in ("kernels", "reduce-scatters", "a step"):
        assert float(re.search(rf"^  {name} +([\d.]+) ms", text, re.MULTILINE)[1]) > 0
    on_cpu = _plan(capsys, *asked, "--use_cpu")
    assert on_cpu.splitlines() == text.splitlines()[: len(on_cpu.splitlines())], "ranks share the memory of a host"
    assert _plan(capsys, *asked, "--gpu", "cpu", "--use_cpu") == text


def test_hosts_change_memory_and_links(config_file, capsys):
    hosts = [config_file, *SETTINGS[2:], "--hosts", "2"]
    text = _plan(capsys, *hosts, "--gpu", "h100", "--zero_shard_size", "auto")
    assert "over 16 rank(s) in shard groups of 8" in text and "2 x 8 NVIDIA H100" in text
    assert re.search("all-gathers .* ms within the host", text)
    assert re.search("all-reduces across groups .* ms between hosts", text)
    assert "16 rank(s) in shard groups of 8" in _plan(capsys, *hosts, "--zero_shard_size", "auto")
    assert "sent per step" in _plan(capsys, *hosts, "--use_cpu", "--num_processes", "8")


def test_advice_keeps_shard_groups_but_at_stage_0(config_file, capsys):
    text = _plan(capsys, config_file, *SETTINGS, "--zero_shard_size", "4", "--memory", "80")
    assert "--zero_shard_size 4" in text or "--zero_stage 0" in text


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--gpu", "v100"], "--gpu v100: expected h100, h200, a100, b200, cpu, or a YAML file"),
        (["--task", "sft"], "--task: names the task of a file that --config names; leave it out"),
        (["--table"], "--table: compares the time of a step; add --gpu with the device"),
        (
            ["--gpu", "h100", "--num_processes", "4", "--zero_shard_size", "3"],
            "4 ranks cannot form groups of 3; give a",
        ),
        (["--gpu", "h100", "--use_cpu"], "--gpu: decides where the ranks train; remove --use_cpu"),
        (["--gpu", "h100", "--hosts", "0"], "hosts 0: expected 1 or more"),
        (["--gpu", "h100", "--hosts", "2", "--num_processes", "3"], "--num_processes 3: is not divisible by 2 hosts"),
        (["--gpu", "h100", "--num_processes", "16"], "--num_processes 16: a host has 8 devices; give the number of"),
        (
            ["--max_length", "auto"],
            "max_length auto: the memory of a device is unknown; add --memory with its",
        ),
        (["--max_length", "auto", "--memory=0.001"], "max_length auto: 64 tokens take "),
        (["--max_length", "long"], "--max_length long: expected 1 or more, or auto"),
        (["--memory", "0"], "memory 0.0: expected the GiB of one device"),
        (["--memory", "nan"], "memory nan: expected the GiB of one device"),
        (["--use_peft", "--lora_target_modules", "nowhere"], "lora_target_modules ['nowhere']: "),
        (["--lora_r", "8"], "lora_r: describes an adapter, and none is trained"),
        (["--num_processes", "0"], "num_processes 0: expected 1 or more"),
        (["--zero_stage", "4"], "zero_stage: 4 is not one of 0, 1, 2, 3; the nearest is '3'"),
        (["--optim", "adamw"], "optim: 'adamw' is not one of"),
        (["--optim", "adafactor"], "Adafactor: its state 'exp_avg_sq_row' is not shaped like a parameter"),
        (["--zero_offload", "params", "--zero_stage", "2"], "needs stage 3"),
        (["--memmory", "3"], "did you mean --memory?"),
    ],
)
def test_what_cannot_be_planned_is_one_line(config_file, capsys, argv, message):
    assert main(["plan", str(config_file), *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_config_without_a_class_and_a_folder_without_a_config_are_refused(tmp_path, capsys):
    assert main(["plan", str(tmp_path)]) == 2
    assert "no config.json in it" in capsys.readouterr().err
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**CONFIG, "architectures": ["NoSuchModel"]}))
    assert main(["plan", str(path)]) == 2
    assert "names no class of transformers" in capsys.readouterr().err


def test_images_that_are_not_counted_are_named(config_file, capsys):
    sizes = {"image_size": 32, "patch_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    vision = {"model_type": "clip_vision_model", "num_attention_heads": 2, **sizes}
    llava = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    config_file.write_text(json.dumps({**llava, "text_config": CONFIG, "vision_config": vision}))
    text = _plan(capsys, config_file, *SETTINGS)
    assert "  not counted: images; --dry_run of a training command" in text and _mib(text, "at the peak") > 0


def test_a_checkpoint_of_an_adapter_holds_no_base(config_file, capsys):
    adapted = ["--use_peft", "--lora_r", "8", "--lora_target_modules", "q_proj"]
    text = _plan(capsys, config_file, *SETTINGS, *adapted)
    num_trained = 3 * 8 * (128 + 128)  # of three layers, both factors
    assert f"{num_trained / 1e6:.1f} M trained" in text
    # fp32 weights and Adam's two moments; shards are rounded up to 16 elements
    assert _mib(text, "checkpoint on disk, all ranks") == pytest.approx(num_trained * 12 / 2**20, rel=0.05)


def test_ranks_that_share_memory_send_nothing(config_file, capsys):
    assert _mib(_plan(capsys, config_file, *SETTINGS), "sent per step") > 0
    shared = _plan(capsys, config_file, *SETTINGS, "--use_cpu")
    assert "sent per step" not in shared and _mib(shared, "read from shared memory per step") > 0
    assert _mib(_plan(capsys, config_file, *SETTINGS, "--use_cpu", "--zero_shared_memory=False"), "sent per step") > 0


def test_a_base_in_4_bits_takes_a_quarter_of_its_layers_and_its_scales(config_file, capsys):
    pytest.importorskip("bitsandbytes", reason="what quantizes the base")
    adapted = [config_file, *SETTINGS, "--use_peft", "--zero_stage=1", "--dtype=bfloat16"]
    plain = _plan(capsys, *adapted)
    text = _plan(capsys, *adapted, "--load_in_4bit")
    num_layers = 3 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 344)  # weights of the three layers
    held = sum(float(found) for found in re.findall(r"^  frozen parameters.*?([\d.]+) MiB", text, re.MULTILINE))
    assert held == pytest.approx(_mib(plain, "frozen parameters") - num_layers * 1.5 / 2**20, abs=0.02)
    assert _mib(text, "scales of quantized parameters") == pytest.approx(num_layers / 64 * 4 / 2**20, abs=0.02)
    assert text.splitlines()[0] == plain.splitlines()[0], "as many parameters, whatever they take"
    assert _mib(text, "at the peak") < _mib(plain, "at the peak")
    nested = _plan(capsys, *adapted, "--load_in_4bit", "--use_bnb_nested_quant")
    assert _mib(nested, "scales of quantized parameters") < _mib(text, "scales of quantized parameters") / 2


def test_of_a_base_in_8_bits_states_alone_are_planned(config_file, capsys):
    pytest.importorskip("bitsandbytes", reason="what quantizes the base")
    adapted = [config_file, *SETTINGS, "--use_peft", "--zero_stage=1", "--dtype=bfloat16"]
    text, plain = _plan(capsys, *adapted, "--load_in_8bit"), _plan(capsys, *adapted)
    assert "  not known: activations and traffic: products with 8-bit weights are not modeled" in text
    assert "at the peak" not in text
    num_layers = 3 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 344)  # weights of the three layers
    held = sum(float(found) for found in re.findall(r"^  frozen parameters.*?([\d.]+) MiB", text, re.MULTILINE))
    assert held == pytest.approx(_mib(plain, "frozen parameters") - num_layers / 2**20, abs=0.02)
    advice = _plan(capsys, *adapted, "--load_in_8bit", "--memory=24")
    assert "recommended: --zero_stage 0 (nothing needs to be sharded; activations are not included)" in advice
    assert "nothing fits: the least needs " in _plan(capsys, *adapted, "--load_in_8bit", "--memory=0.0001", status=1)
    assert main(["plan", *map(str, adapted), "--load_in_8bit", "--gpu=h100"]) == 2
    assert "--gpu h100: activations and traffic: products with 8-bit" in capsys.readouterr().err


# A run as a YAML file has it

RUN = {
    **{"task": "sft", "max_length": 48, "per_device_train_batch_size": 2, "zero_stage": 3, "output_dir": "out"},
    **{"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "use_cpu": True, "bf16": True, "report_to": "none"},
}
# The defaults of keys that are for an adapter alone.
NO_ADAPTER = {"lora_r": 16, "lora_dropout": 0.05}


def _run_file(tmp_path, **settings):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**RUN, **settings}), encoding="utf-8")
    return path


def _planned_lines(text: str) -> list[str]:
    return re.findall(r"^ +([a-z].*? MiB)", text, re.MULTILINE)


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "dtype": "bfloat16"},
        pytest.param({"packing": True, "gradient_checkpointing": False}, marks=pytest.mark.full("more cases")),
        {"task": "pretrain", "config_overrides": "num_hidden_layers=3", "use_peft": False, **NO_ADAPTER},
    ],
    ids=["4-bits", "packed", "new"],
)
def test_a_run_file_is_planned_as_its_dry_run_with_the_rows_is(tiny_llama, tmp_path, capsys, settings):
    for name in ("trl", "peft", "bitsandbytes"):
        pytest.importorskip(name, reason="what the run needs")
    rows = [{"text": "one two three four five " * 20}] * 8
    files, is_new = {"train_file": str(tmp_path / "rows.jsonl")}, settings.get("task") == "pretrain"
    keys = ("config_name", "tokenizer_name") if is_new else ("model_name_or_path",)
    path = _run_file(tmp_path, **settings, **files, **dict.fromkeys(keys, str(tiny_llama)))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    planned = _planned_lines(_plan(capsys, "--config", path, "--num_processes=2"))
    assert len(planned) > 8 and any("at the peak" in line for line in planned)
    reset_accelerate()
    assert main([settings.get("task", "sft"), "--config", str(path), "--num_processes=2", "--dry_run"]) == 0
    assert _planned_lines(capsys.readouterr().out) == planned


def test_a_dry_run_takes_rows_and_labels_from_the_data(tiny_llama, tiny_model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("trl")
    texts, labels = tmp_path / "texts.jsonl", tmp_path / "labels.jsonl"
    texts.write_text('{"text": "one two three"}\n' * 8)
    labels.write_text("".join(f'{{"text": "row {number}", "label": "{number % 40}"}}\n' for number in range(200)))
    argv = [f"--output_dir={tmp_path / 'out'}", "--use_cpu", "--dry_run", "--per_device_train_batch_size=4"]
    shapes, num_labels, predict = [], [], plan_input.PlanInput.predict
    for way in ([], ["--padding_free"]):
        reset_accelerate()
        rows = [f"--model_name_or_path={tiny_llama}", f"--train_file={texts}", "--max_length=none"]
        assert main(["sft", *rows, *way, *argv]) == 0
        found = re.search(r"a micro-batch: (\d+) rows x (\d+) tokens", capsys.readouterr().out)
        shapes.append((int(found[1]), int(found[2])))
    (num_rows, width), packed = shapes
    assert num_rows == 4 and packed == (1, 4 * width)
    reset_accelerate()
    monkeypatch.setattr(
        plan_input.PlanInput, "predict", lambda self: num_labels.append(self.config.num_labels) or predict(self)
    )
    assert main(["classify", f"--model_name_or_path={tiny_model}", f"--train_file={labels}", *argv]) == 0
    assert num_labels == [40]


def test_keys_of_the_run_and_of_plan_go_together(config_file, tmp_path, capsys):
    pytest.importorskip("trl")
    path = _run_file(tmp_path, model_name_or_path=str(config_file), use_cpu=False)
    text = _plan(capsys, "--config", path, "--zero_stage=2", "--num_processes", "4", "--max_length=16", "--memory=24")
    assert "2 x 16 tokens; stage 2 over 4 rank(s)" in text and "recommended: --zero_stage 0" in text
    of_file = _plan(capsys, "--config", path)
    assert "2 x 48 tokens; stage 3 over 1 rank(s)" in of_file
    dpo = _run_file(tmp_path, model_name_or_path=str(config_file), use_cpu=False, task="dpo", use_peft=False)
    argv = ["--config", dpo, "--lora_r=16", "--lora_dropout=0.05"]
    dpo = _plan(capsys, *argv)
    assert "4 x 48 tokens" in dpo and _mib(dpo, "reference model") > 0  # both answers of each row
    assert "of one micro-batch" not in dpo
    accumulating = _plan(capsys, *argv, "--gradient_accumulation_steps=2")
    assert "  traffic and time are those of a step with one micro-batch; " in accumulating


@pytest.mark.parametrize(
    ("settings", "argv", "message"),
    [
        ({"task": None}, [], "names no task; add --task with one of classify, "),
        ({"task": "sfd"}, [], "task 'sfd': did you mean sft?"),
        ({"task": "distill"}, [], "plan: distill is not planned, for what its teacher takes is not known"),
        ({"task": "grpo"}, [], "how long prompts are is in the rows of grpo; give --num_tokens"),
        ({"max_lenght": 3}, [], "unknown key 'max_lenght'; did you mean max_length?"),
        ({}, ["--num_tokens=0"], "num_tokens 0: expected 1 or more"),
        ({"dtype": "int8"}, [], "dtype: invalid choice: 'int8' (choose from"),
        ({}, ["--memory=0"], "memory 0.0: expected the GiB of one device"),
        ({}, ["--memory=inf"], "memory inf: expected the GiB of one device"),
        ({}, ["--lora_r=0"], "lora_r 0: expected 1 or more"),
        ({"model_name_or_path": None}, [], "model_name_or_path: not set"),
        ({"task": "pretrain", "config_name": "a"}, [], "config_name and model_name_or_path"),
        ({"task": "pretrain", "tokenizer_name": "a"}, [], "tokenizer_name: is that of a new model"),
    ],
)
def test_a_run_that_cannot_be_planned_is_one_line(config_file, tmp_path, capsys, settings, argv, message):
    pytest.importorskip("trl")
    settings = {"model_name_or_path": str(config_file), **settings}
    if settings.get("task") in ("grpo", "distill"):
        settings |= {"max_length": None}
    path = _run_file(tmp_path, **settings)
    if settings["model_name_or_path"] is None or settings.get("max_length", 1) is None:
        path.write_text("".join(line for line in path.read_text().splitlines(True) if "null" not in line))
    assert main(["plan", "--config", str(path), *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full("slow")
def test_the_longest_rows_of_a_run_file_are_found(config_file, tmp_path, capsys):
    pytest.importorskip("trl")
    files = {"model_name_or_path": str(config_file), "use_peft": False, **NO_ADAPTER}
    path = _run_file(tmp_path, **files)
    text = _plan(capsys, "--config", path, "--num_processes=2", "--memory=0.05", "--max_length=auto")
    tokens = int(
        re.search(r"^  max_length auto: (\d+) tokens take .* that tensors may take, and ", text, re.MULTILINE)[1]
    )
    assert f" 2 x {tokens} tokens;" in text and 64 <= tokens < 2048
    given = _plan(capsys, "--config", path, "--num_processes=2", "--memory=0.05", f"--max_length={tokens}")
    assert [line for line in _planned_lines(text) if "max_length" not in line] == _planned_lines(given)
    packed = _plan(capsys, "--config", path, "--num_processes=2", "--memory=0.05", "--packing", "--max_length", "auto")
    assert " 1 x " in packed and "max_length auto: " in packed
    assert main(["plan", "--config", str(path), "--max_length=auto"]) == 2
    assert "max_length auto: the memory of a device is unknown; add --memory" in capsys.readouterr().err


def test_dropout_that_the_trainer_leaves_out_is_left_out(tmp_path, capsys):
    pytest.importorskip("trl")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 512}
    model = tmp_path / "gpt2.json"
    model.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes}))
    run = {"model_name_or_path": str(model), "task": "dpo", "use_peft": False, **NO_ADAPTER}
    path = _run_file(tmp_path, **run, gradient_checkpointing=False)
    with_it, without = (
        _mib(_plan(capsys, "--config", path, f"--disable_dropout={switch}"), "activations") for switch in (False, True)
    )
    assert without < 0.95 * with_it


def test_a_run_file_has_a_cluster_too(config_file, tmp_path, capsys):
    pytest.importorskip("trl")
    run = {"model_name_or_path": str(config_file), "use_cpu": False, "task": "dpo", "use_peft": False}
    path = _run_file(tmp_path, **run, lora_dropout=0.05, lora_r=16)
    cluster = ["--config", path, "--gpu", "h100", "--hosts", "2", "--num_processes", "4"]
    text = _plan(capsys, *cluster)
    assert "stage 3 over 4 rank(s)" in text and "2 x 2 NVIDIA" in text
    assert "it fits: tensors may take 90% of 80.0 GiB" in text
    found = json.loads(_plan(capsys, *cluster, "--json"))
    assert found["num_ranks"] == 4 and found["prediction"]["per_device_train_batch_size"] == 2
    assert main(["plan", "--config", str(path), "--table"]) == 2
    assert "--table: compares the time of a step; add --gpu with the device" in capsys.readouterr().err


@pytest.mark.full("slow")
def test_a_run_file_is_compared_in_all_ways(config_file, tmp_path, capsys):
    pytest.importorskip("trl")
    run = {"model_name_or_path": str(config_file), "use_cpu": False}
    argv = ["--config", _run_file(tmp_path, **run), "--gpu", "h100", "--hosts", "2", "--table"]
    found = json.loads(_plan(capsys, *argv, "--json"))
    assert all(way["gradient_checkpointing"] for way in found["ways"]), "as TRL has it unless told otherwise"
    assert len(found["ways"]) == 7 * (7 + 6) and found["left_out"] == []
    assert {**found["recommended"], "fits": True} in found["ways"]
    assert found["verdict"].startswith("recommended: --zero_stage ")
    assert main(["plan", *map(str, argv), "--packing"]) == 2
    assert "--table: packed rows (packing, padding_free)" in capsys.readouterr().err


@pytest.mark.parametrize("optim", plan_input.ADAMW)
def test_adamw_is_the_class_that_trainer_has_for_it(optim, tmp_path):
    kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(str(tmp_path), optim=optim, use_cpu=True))
    planned = plan_input.optimizer_of(optim)
    assert planned.func is kind and planned.keywords.items() <= kwargs.items()
    assert bool(planned.keywords.get("fused")) is bool(kwargs.get("fused"))
    assert plan_input.optimizer_of("sgd", "momentum=0.9").keywords["momentum"] == 0.9


@pytest.mark.quick
def test_a_plan_imports_nothing_that_a_run_alone_needs(config_file):
    """These take most of the seconds that a run needs to start. What constructors of models ask for is there."""
    code = """
import sys
from hf_zero.recipes.cli import console, main
assert console() == 0
names = "bitsandbytes datasets pandas peft transformers.trainer transformers.training_args trl"
heavy = set(names.split()) & set(sys.modules)
assert not heavy, heavy
assert main(["plan", "maskformer.json"]) == 0
"""
    maskformer = {"architectures": ["MaskFormerForInstanceSegmentation"], "model_type": "maskformer"}
    (config_file.parent / "maskformer.json").write_text(json.dumps(maskformer))
    plan = ["plan", str(config_file), *SETTINGS, "--gpu", "h100", "--gradient_checkpointing"]
    found = subprocess.run(
        [sys.executable, "-c", code, *plan],
        cwd=config_file.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not found.returncode, found.stderr
    assert "at the peak" in found.stdout
