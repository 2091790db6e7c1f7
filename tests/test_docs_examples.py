"""Every example of README.md and of docs/ runs as it is written, on tiny models. A new block needs a test here."""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import EvalPrediction

import hf_zero
import hf_zero.trl
from hf_zero.engine import engine_of
from hf_zero.recipes import docstrings
from tests import models
from tests.distributed import ranks, run_program, run_ranks
from tests.docs import DOCS, ROOT, blocks, fenced_blocks, text_of
from tests.public_models import config_of
from tests.recipes import conftest
from tests.recipes.ranks import Ended, run_on_ranks, run_on_this_rank
from tests.tiers import more
from tests.trainer.harness import PLAIN, SETTINGS, Rows, reset_accelerate, seed_everything, train


README = text_of("README.md")
PLAN = (
    "hf-zero plan meta-llama/Llama-3.1-8B --num_processes 4 --bf16 true --gradient_checkpointing true "
    "--max_length 4096 --memory 80"
)
SFT = (
    "hf-zero sft --model_name_or_path meta-llama/Llama-3.1-8B --train_file chats.jsonl --output_dir outputs/mine "
    "--num_processes 4 --zero_stage 1 --bf16 true --max_length 4096"
)
MAKE = {  # what a target comes to
    "make quickstart": "python -m hf_zero.recipes classify --config quickstart.yaml --num_processes 2 --zero_stage 3",
    "make test": "python -m pytest --tier quick --numprocesses 2 --dist loadscope",
}
ACTIVATE = "source .venv/bin/activate"
INSTALL = "pip install '.[quickstart,peft,trl]'"
TRAIN = "torchrun --nproc_per_node 4 train.py"
HUB_ID = "meta-llama/Llama-3.1-8B"
# How many blocks of Python each page has; each is run below, and those of tutorials in test_docs_tutorials.py.
PYTHON = {"checkpoints.md": 8, "coming-from.md": 2, "index.md": 2, "memory.md": 1, "recipes.md": 3, "training.md": 6}

tiny_model, tiny_llama = conftest.tiny_model, conftest.tiny_llama


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf_home"))  # where data sets are cached


@pytest.mark.quick
def test_every_block_and_command_is_run_by_a_test():
    counts = {page.name: len(blocks(page.name, "python")) for page in DOCS.glob("*.md") if page.name != "tutorial.md"}
    assert {name: count for name, count in counts.items() if count} == PYTHON
    languages = [block.language for block in fenced_blocks(README)]
    assert languages == ["bash", "bash", "text", "bash", "diff", "bash"]
    fenced = [line for block in blocks("README.md", "bash") for line in block.splitlines()]
    in_prose = re.findall(r"`((?:python|torchrun|make|pip|accelerate|deepspeed) [^`\n]+)`", README)
    commands = fenced + [line for line in dict.fromkeys(in_prose) if line not in fenced]
    assert commands == [INSTALL, PLAN, SFT, "make quickstart", ACTIVATE, TRAIN, "make test"]


def run_script(script: str, folder: Path, num_ranks: int = 1) -> str:
    """Runs a program as a launcher does. Returns what the first rank prints."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    results = run_program(["script.py"], folder, num_ranks)
    for result in results:
        assert result.returncode == 0, result.stderr
    return results[0].stdout


# README.md and the front page


@pytest.mark.quick
@pytest.mark.parametrize("command", MAKE)
def test_a_make_target_is_the_command_that_it_is_said_to_be(command):
    """`make test` runs this test, and the same classify command is run below."""
    arguments = ["-n", "-o", ".venv/.installed", "-o", ".venv/.quickstart", command.removeprefix("make ")]
    # without what a make that may have started this test has set
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    (words,) = [shlex.split(line) for line in done.stdout.splitlines()]
    while re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    assert words == [".venv/bin/python", *shlex.split(MAKE[command])[1:]]


# The whole library, whose sources take seconds to parse, is read in tests/recipes/test_docstrings.py.
FEW_PACKAGES = "asyncio concurrent ctypes email http importlib json logging multiprocessing unittest urllib xml"


def run_on_few_packages(argv: list[str], folder: Path) -> Ended:
    few = SimpleNamespace(stdlib_module_names=FEW_PACKAGES.split())
    with mock.patch.object(docstrings, "sys", few):
        return run_on_this_rank(argv, str(folder))


def test_the_quickstart_trains(tiny_model, tmp_path):
    """The ready-made recipe on a tiny model for two steps."""
    few = ["--model_name_or_path", str(tiny_model), "--max_train_rows", "64"]
    few += ["--max_test_rows", "16", "--max_steps", "2", "--output_dir", "out"]
    argv = [*shlex.split(MAKE["make quickstart"])[3:], *few]
    first, _ = run_ranks(run_on_few_packages, 2, argv, tmp_path, timeout=240)
    assert first.code == 0, first.err
    assert "saved to out\n" in first.out
    assert not (tmp_path / "outputs").exists()


def test_the_trainer_example_trains_on_two_ranks_and_saves_what_from_pretrained_loads(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example, hub_id = blocks("index.md", "python")[0], '"Qwen/Qwen3-0.6B"'
    assert example.count(hub_id) == 2
    lines = [line for line in README.splitlines() if len(line) > 40][:16]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert blocks("index.md", "bash")[1] == "torchrun --nproc_per_node 2 train.py\n"
    assert "'train_loss'" in run_script(example.replace(hub_id, json.dumps(str(tiny_llama))), tmp_path, 2)

    final = tmp_path / "out" / "final"
    trained, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(report.values()), report
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_llama).named_parameters())
    weights = dict(trained.named_parameters())
    assert all(weight.isfinite().all() for weight in weights.values())
    assert any(not torch.equal(weight, start[name]) for name, weight in weights.items())
    tokenizer = AutoTokenizer.from_pretrained(final)
    tokens = trained.generate(**tokenizer("The stage", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("The stage")


def test_the_plan_is_the_one_that_is_printed(check_part, tmp_path, monkeypatch, capsys):
    from hf_zero.recipes.cli import main

    config = config_of(HUB_ID)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(tmp_path / HUB_ID)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(PLAN)[1:]) == 0
    printed = capsys.readouterr().out
    check_part(ROOT / "README.md", "plan", f"```text\n{printed.strip()}\n```")
    assert re.search(r"recommended: --zero_stage (\d)", printed)[1] == re.search(r"--zero_stage (\d)", SFT)[1]


def test_the_training_command_runs(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    (row,) = re.findall(r"`(\{\"messages\".*?\})`", README)
    (tmp_path / "chats.jsonl").write_text(f"{row}\n" * 16, encoding="utf-8")
    few = ["--max_steps", "2", "--max_length", "64", "--report_to", "none", "--num_processes", "2"]
    for rank in run_on_ranks([*shlex.split(SFT.replace(HUB_ID, str(tiny_llama)))[1:], *few], tmp_path):
        assert rank.code == 0, rank.err
    folder = tmp_path / "outputs" / "mine"
    AutoModelForCausalLM.from_pretrained(folder)
    assert {"README.md", "report.html", "resolved.yaml", "training_log.jsonl"} <= {p.name for p in folder.iterdir()}


@pytest.mark.quick
def test_the_example_without_trainer_runs_as_it_is(tmp_path):
    # four decimals are printed; a norm around sqrt(64 * 64 / 3 / 64) for the default initialisation
    printed = run_script(blocks("index.md", "python")[1], tmp_path)
    (norm,) = re.fullmatch(r"tensor\((\d+\.\d+).*\)\n", printed).groups()
    assert 4.0 < float(norm) < 5.3


# Scripts of other libraries, with the lines that are to be changed


MODEL = """
import torch
from transformers import BertConfig, BertForSequenceClassification

model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
)
data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
"""
SCRIPT = f"""{MODEL}
from transformers import Trainer, TrainingArguments

args = TrainingArguments(output_dir="out", max_steps=2, save_strategy="no", report_to="none")
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model()
print(type(trainer).__name__, "at stage", getattr(args, "zero_stage", None))
"""
DEEPSPEED_SCRIPT = SCRIPT.replace('"out", max', '"out", deepspeed="ds_config.json", max')
ACCELERATE_SCRIPT = f"""{MODEL}
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("out")
print(type(accelerator).__name__, optimizer.step_was_skipped)
accelerator.end_training()
"""


def patched(script: str, diff: str) -> str:
    """The script with every change of the diff: each `-` line is followed by the `+` line that comes for it, and `...`
    in them stands for whatever else is there."""
    lines = diff.splitlines()
    assert [line[0] for line in lines] == ["-", "+"] * (len(lines) // 2), diff
    for old, new in zip(lines[::2], lines[1::2]):
        assert old.count("...") == new.count("...") <= 1
        pattern = "(.*)".join(re.escape(words) for words in old[1:].split("..."))
        kept = new[1:].replace("\\", r"\\").replace("...", r"\g<1>")
        script, count = re.subn(f"^{pattern}$", kept, script, flags=re.MULTILINE)
        assert count == 1, f"{old} is in the script {count} times"
    return script


@pytest.mark.parametrize(
    "page, index, script",
    [("README.md", 0, SCRIPT), *more(("coming-from.md", 0, SCRIPT), ("coming-from.md", 2, DEEPSPEED_SCRIPT))],
)
def test_the_changed_lines_turn_a_trainer_script_into_one_that_shards(page, index, script, tmp_path):
    script = f"from hf_zero import ZeroTrainer, ZeroTrainingArguments\n{patched(script, blocks(page, 'diff')[index])}"
    assert "deepspeed" not in script
    assert run_script(script, tmp_path).splitlines()[-1] == "ZeroTrainer at stage 3"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_changed_line_turns_a_script_for_accelerate_into_one_that_shards(tmp_path):
    ((old, new),) = re.findall(r"^- accelerate: replace `(.+?)` with `(.+?)`", README, re.MULTILINE)
    script = patched(ACCELERATE_SCRIPT, f"-accelerator = {old}\n+accelerator = {new}\n")
    assert run_script(f"from hf_zero import ZeroAccelerator\n{script}", tmp_path, 2) == "ZeroAccelerator False\n"
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "zero").is_dir()


@pytest.mark.full("slow")
def test_the_example_of_fsdp_runs(tmp_path):
    run_script(blocks("coming-from.md", "python")[1], tmp_path)


@pytest.mark.full("slow")
def test_the_trainer_of_ones_own_trains_sharded(tmp_path):
    """The script with its classes replaced by those of the page."""
    script = SCRIPT.replace("TrainingArguments(output", "MyZeroArguments(zero_stage=3, output")
    script = script.replace("trainer = Trainer(", "trainer = MyZeroTrainer(")
    printed = run_script(f"{blocks('coming-from.md', 'python')[0]}\n{script}", tmp_path)
    assert printed.splitlines()[-1] == "MyZeroTrainer at stage 3"


def test_the_file_that_migrate_takes_is_json(tmp_path, monkeypatch, capsys):
    """The page's command, on a file of that name."""
    from hf_zero.recipes.cli import main

    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (line,) = blocks("coming-from.md", "bash")[0].splitlines()
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip() == "--max_grad_norm 0 --zero_stage 2"


# docs/checkpoints.md


def run_blocks(page: str, starts: tuple[str, ...], names: dict, *replaced: tuple[str, str]) -> None:
    """Runs the blocks of a page that start so, one after another, after some replacements."""
    for start in starts:
        (text,) = [block for block in blocks(page, "python") if block.startswith(start)]
        for written, run in (("zero_stage=3, ...", "zero_stage=3, **settings"), ("...  ", "pass  "), *replaced):
            text = text.replace(written, run)
        exec(text, names)


@pytest.mark.quick
@ranks(2, timeout=240)
def test_saving_and_going_on(tmp_path):
    seed_everything()
    args = hf_zero.ZeroTrainingArguments(zero_stage=3, **{**SETTINGS, "output_dir": f"{tmp_path}/run"}, save_steps=2)
    args.save_strategy = "steps"
    trainer = hf_zero.ZeroTrainer(model=models.build("bert"), args=args, train_dataset=Rows("bert"))
    trainer.train()
    names = {"hf_zero": hf_zero, "trainer": trainer, "folder": f"{tmp_path}/out/checkpoint-500"}
    names |= {"model": trainer.model, "optimizer": trainer.optimizer.optimizer}
    starts = "hf_zero.save_checkpoint(model", "snapshots = hf_zero.Snapshots()", "trainer.train(resume_from_checkpoint"
    run_blocks("checkpoints.md", starts, names, ('"out/', f'"{tmp_path}/out/'))
    for name in ("checkpoint-500", "checkpoint-600"):
        hf_zero.checkpoint.check_checkpoint(tmp_path / "out" / name)
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


@ranks(2, timeout=240)
def test_loading_without_a_whole_model(tmp_path):
    from peft import LoraConfig, get_peft_model

    if torch.distributed.get_rank() == 0:
        models.build("mixtral").save_pretrained(f"{tmp_path}/base")
    torch.distributed.barrier()
    names = {"hf_zero": hf_zero, "torch": torch, "get_peft_model": get_peft_model, "LoraConfig": LoraConfig}
    starts = "from transformers import AutoModelForCausalLM", 'hf_zero.save_pretrained(model, "out")'
    replaced = ("mistralai/Mixtral-8x7B-v0.1", f"{tmp_path}/base"), ('"out"', f'"{tmp_path}/out"')
    run_blocks("checkpoints.md", starts, names, *replaced)
    assert engine_of(names["model"]).stage == 3
    names["model"] = hf_zero.load_pretrained(names["AutoModelForCausalLM"], f"{tmp_path}/base")
    replaced = ("LoraConfig(r=16", 'LoraConfig(r=16, target_modules=["q_proj"]')
    run_blocks("checkpoints.md", ("hf_zero.materialize(model)",), names, replaced)
    assert all(p.device.type == "cpu" for p in names["model"].parameters())


@ranks(2, timeout=240)
def test_switching_from_another_program(tmp_path):
    train(PLAIN, f"{tmp_path}/theirs", "llama-tied", save_strategy="steps", save_steps=2)
    torch.distributed.barrier()
    settings = {**SETTINGS, "output_dir": f"{tmp_path}/ours", "save_strategy": "steps", "save_steps": 2}
    names = {name: getattr(hf_zero, name) for name in ("ZeroTrainer", "ZeroTrainingArguments")}
    names |= {"hf_zero": hf_zero, "torch": torch, "settings": settings}
    names |= {"model": models.build("llama-tied"), "data": Rows("llama-tied")}
    replaced = "converted/checkpoint-500", f"{tmp_path}/theirs/checkpoint-2"
    run_blocks("checkpoints.md", ("trainer = ZeroTrainer(model=model",), names, replaced)
    assert names["trainer"].state.global_step == 4
    names["model"] = models.build("llama-tied")
    names["groups"] = models.decay_groups(names["model"])
    replaced = "converted/checkpoint-500", f"{tmp_path}/ours/checkpoint-4"
    run_blocks("checkpoints.md", ("hf_zero.shard(model, stage=3)\noptimizer",), names, replaced)


# docs/training.md, docs/memory.md, docs/recipes.md


def accelerate_names(folder: Path) -> dict:
    reset_accelerate()
    seed_everything()
    names = {"Accelerator": Accelerator, "ZeroAccelerator": hf_zero.ZeroAccelerator, "DataLoader": DataLoader}
    names |= {"copy": copy, "torch": torch, "data": Rows("llama", 16), "model": models.build("llama")}
    return names | {"folder": f"{folder}/checkpoint"}


def train_with_accelerate(folder: Path, stage: int) -> None:
    loop, gathered = blocks("training.md", "python")[1:3]
    plain = loop.replace("ZeroAccelerator(zero_stage=3", "Accelerator(cpu=True")
    wanted = accelerate_names(folder)
    exec(plain.replace("accelerator.save_state", ""), wanted)
    assert type(wanted["model"]).__name__ == "DistributedDataParallel"
    found = accelerate_names(folder)
    exec(loop.replace("zero_stage=3", f"zero_stage={stage}"), found)
    torch.testing.assert_close(found["loss"], wanted["loss"], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found["norm"], wanted["norm"], rtol=1e-5, atol=0.0)
    found["sharded"] = hf_zero.ShardedModel(found["model"])
    exec(gathered, found)
    for (name, p), q in zip(found["twin"].named_parameters(), wanted["model"].parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-6 + 1e-5 * q.abs().max(), name


@pytest.mark.support("Accelerate without Trainer", area="Trainers")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_loop_with_accelerate_trains_as_it_does_under_ddp(tmp_path, stage):
    run_ranks(train_with_accelerate, 2, tmp_path, stage, timeout=240)
    hf_zero.checkpoint.check_checkpoint(tmp_path / "checkpoint")


@pytest.mark.quick
def test_one_process_shows_what_sharded_parameters_show():
    exec(blocks("training.md", "python")[5], {"hf_zero": hf_zero, "model": models.build("llama")})


@ranks(2)
def test_the_last_backward_reduces_while_it_runs():
    model = models.build("llama")
    sharded = hf_zero.shard(model, stage=1)
    optimizer = hf_zero.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(2):
        loss = model(**models.batch("llama", seed=step)).loss
        exec(blocks("training.md", "python")[0], {"sharded": sharded, "loss": loss})
        reduced = [gradient.is_reduced for gradient in engine_of(model).gradients]
        assert all(reduced) is (step > 0), "the first backward shows whether there are others within"
        optimizer.step()


@ranks(2, timeout=240)
def test_the_examples_with_trl_and_muon_train(tmp_path):
    from tests.trl import harness

    if torch.distributed.get_rank() == 0:
        harness.save_models(tmp_path)
    torch.distributed.barrier()
    reset_accelerate()
    names = {"data": harness.data("text"), "tokenizer": harness.tokenizer()}
    names |= {"folder": f"{tmp_path}/policy", "hf_zero": hf_zero}
    trl, muon = blocks("training.md", "python")[3:5]
    exec(trl.replace('"out"', f'"{tmp_path}/out"'), names)
    assert names["trainer"].state.global_step == 2 and engine_of(names["trainer"].model).stage == 3
    model = models.build("llama")
    names.update(model=model, sharded=hf_zero.shard(model, stage=3))
    exec(muon, names)
    before = {shard.name: shard.tensor.clone() for shard in names["sharded"].named_shards()}
    model(**models.batch("llama", seed=0)).loss.backward()
    names["optimizer"].step()
    assert all((shard.tensor != before[shard.name]).any() for shard in names["sharded"].named_shards())


@pytest.mark.parametrize("num_ranks", [1, 2])
@ranks("num_ranks")
def test_the_loop_that_offloads(num_ranks):
    (block,), names = blocks("memory.md", "python"), {}
    exec(block, names)
    assert engine_of(names["sharded"]).bus.host_nbytes > 0
    started = [p.detach().clone() for p in names["model"].parameters()]
    assert all(p.dtype is torch.bfloat16 and p.isfinite().all() for p in started)
    exec(block.partition("\n\n")[2].partition("optimizer = ")[2].partition("\n\n")[2], names)  # one step more
    assert any(not torch.equal(p, before) for p, before in zip(names["model"].parameters(), started))


def test_the_function_that_judges_answers(tmp_path):
    pytest.importorskip("trl")
    from hf_zero.recipes.trl_tasks import RewardedArguments, rewards_of

    (tmp_path / "rewards.py").write_text(blocks("recipes.md", "python")[0], encoding="utf-8")
    (judge,) = rewards_of(RewardedArguments(reward_funcs=[f"{tmp_path}/rewards.py:short"]))
    assert judge(prompts=["a", "b"], completions=["four", ""], colour=["red", "blue"]) == [-4.0, 0.0]


def test_the_functions_that_measure_predictions():
    names: dict = {}
    for block in blocks("recipes.md", "python")[1:]:
        exec(block, names)
    logits, sums = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[0.5, 0.1, 3.0], [0.5, 0.1, 2.0]])
    assert names["errors"](EvalPrediction(logits, np.array([1, 1]))) == {"errors": 0.5}
    assert names["whole_answers"](EvalPrediction(sums, np.array([3, 3]))) == {"whole_answers": 0.5}
