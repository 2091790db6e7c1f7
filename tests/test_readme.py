"""Every command and example of the README, and the examples of the front page of docs/, run as they are written."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest
import torch

import hf_zero.trl
from tests.distributed import run_program
from tests.generated import check_part
from tests.public_models import config_of
from tests.recipes import conftest
from tests.recipes.ranks import run_on_ranks


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FRONT = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")

CLASSIFY = "python -m hf_zero.recipes classify --config quickstart.yaml --num_processes 2 --zero_stage 3"
TORCHRUN = "torchrun --nproc_per_node 2 -m hf_zero.recipes classify --config quickstart.yaml --zero_stage 2"
TRAIN = "torchrun --nproc_per_node 4 train.py"
PLAN = (
    "hf-zero plan meta-llama/Llama-3.1-8B --num_processes 4 --bf16 true --gradient_checkpointing true "
    "--max_length 4096 --memory 80"
)
SFT = (
    "hf-zero sft --model_name_or_path meta-llama/Llama-3.1-8B --train_file chats.jsonl --output_dir outputs/mine "
    "--num_processes 4 --zero_stage 2 --bf16 true --max_length 4096"
)
MODULES = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "hf-zero": ["-m", "hf_zero.recipes"],
}  # a program as arguments of this Python
MAKE = {  # what a target comes to
    "make quickstart": CLASSIFY,
    "make test": "python -m pytest --tier quick --numprocesses 2 --dist loadscope",
}
ACTIVATE = "source .venv/bin/activate"
INSTALL = "pip install '.[quickstart,peft,trl]'"
HUB_ID = "meta-llama/Llama-3.1-8B"

# Every fenced block in order, with the test that runs it. Add a new block here with its test.
BLOCKS = [
    ("bash", "test_what_is_installed_is_there"),
    ("bash", "test_the_plan_is_the_one_that_is_printed"),
    ("text", "test_the_plan_is_the_one_that_is_printed"),
    ("bash", "test_the_training_command_runs"),
    ("diff", "test_the_changed_lines_turn_a_trainer_script_into_one_that_shards"),
    ("bash", "test_a_make_target_is_the_command_that_it_is_said_to_be"),
]
# Every line of the bash blocks, in order, and the commands in the text that are not among them.
COMMANDS = [INSTALL, PLAN, SFT, "make quickstart", ACTIVATE, TRAIN, "make test"]

tiny_model = conftest.tiny_model


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def fenced_blocks(markdown: str) -> list[Block]:
    """All of them, whatever the fence is made of."""
    found, fence, language, lines = [], None, "", []
    for line in markdown.splitlines():
        if fence is None:
            if opening := re.match(r"\s*(```+|~~~+)\s*(.*)", line):
                fence, language, lines = opening[1], opening[2].strip(), []
        elif line.strip() == fence:
            found.append(Block(language, "".join(f"{text}\n" for text in lines)))
            fence = None
        else:
            lines.append(line)
    assert fence is None, f"a block of {language} is not closed"
    return found


def block(language: str, index: int = 0, text: str = README) -> str:
    return [found.text for found in fenced_blocks(text) if found.language == language][index]


def commands(markdown: str) -> list[str]:
    """The lines of all bash blocks, and the commands of the prose that are not among them."""
    fenced = [
        line for found in fenced_blocks(markdown) if found.language == "bash" for line in found.text.splitlines()
    ]
    in_prose = re.findall(r"`((?:python|torchrun|make|pip|accelerate|deepspeed) [^`\n]+)`", markdown)
    return fenced + [line for line in dict.fromkeys(in_prose) if line not in fenced]


def arguments_of(command: str) -> list[str]:
    """A command of the README for `run_program`."""
    program, *arguments = shlex.split(command)
    return [*MODULES[program], *arguments]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hf_home"))  # where data sets are cached


@pytest.mark.quick
def test_every_block_is_run_by_a_test():
    assert [found.language for found in fenced_blocks(README)] == [language for language, _ in BLOCKS]
    assert [name for _, name in BLOCKS if not callable(globals().get(name))] == []


def test_every_command_is_run_by_a_test():
    assert commands(README) == COMMANDS


@pytest.mark.parametrize("fence", ["```bash", "~~~ bash", "````bash"])
def test_a_new_block_is_noticed_whatever_its_fence(fence):
    added = f"{README}\n{fence}\npip install hf-zero\n{fence.removesuffix('bash').strip()}\n"
    assert set(commands(added)) == {*COMMANDS, "pip install hf-zero"}
    assert len(fenced_blocks(added)) == len(BLOCKS) + 1


def test_torchrun_is_the_module_that_stands_for_it():
    (script,) = entry_points(group="console_scripts", name="torchrun")
    assert ["-m", script.module] == MODULES["torchrun"]


@pytest.mark.quick
@pytest.mark.parametrize("command", MAKE)
def test_a_make_target_is_the_command_that_it_is_said_to_be(command):
    """Not run: `make test` is what runs this test, and the same classify command is run below."""
    program, target = shlex.split(command)
    # -o: as if the virtual environment were there already. Nothing of a make that may have started this test.
    lines = subprocess.run(
        [program, "-n", "-o", ".venv/.installed", "-o", ".venv/.quickstart", target],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.splitlines()
    (words,) = [shlex.split(line) for line in lines]
    while re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    assert words == [".venv/bin/python", *shlex.split(MAKE[command])[1:]]


def test_what_is_installed_is_there():
    """Not run: `make wheel` installs the package."""
    (wanted,) = re.findall(r"\[(.+)\]", INSTALL)
    assert set(wanted.split(",")) <= set(metadata("hf-zero").get_all("Provides-Extra"))
    made = re.findall(r"-m venv (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert ACTIVATE == f"source {made[0]}/bin/activate"


@pytest.mark.parametrize("command", [CLASSIFY, TORCHRUN], ids=["num_processes", "torchrun"])
@pytest.mark.full("more cases", after=1)
def test_a_classify_command_trains(command, tiny_model, tmp_path):
    """The ready-made recipe on a tiny model for two steps; whole runs are in tests/recipes/test_run.py."""
    few = ["--model_name_or_path", str(tiny_model), "--max_train_rows", "64"]
    few += ["--max_test_rows", "16", "--max_steps", "2", "--output_dir", "out"]
    if command == CLASSIFY:
        first, _ = run_on_ranks([*arguments_of(command)[2:], *few], tmp_path)
        code, said, err = first.code, first.out, first.err
    else:
        (result,) = run_program([*arguments_of(command), *few], tmp_path)
        code, said, err = result.returncode, result.stdout, result.stderr
    assert code == 0, err
    assert "saved to out\n" in said
    assert not (tmp_path / "outputs").exists()


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory) -> Path:
    """A folder that stands for the hub's: the same classes, dtype and tied embeddings, a few thousand weights."""
    from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_qwen3")
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(README.splitlines(), 300, show_progress=False)
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_the_trainer_example_trains_on_two_ranks_and_saves_what_from_pretrained_loads(tiny_qwen3, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example, hub_id = block("python", 0, FRONT), '"Qwen/Qwen3-0.6B"'
    assert example.count(hub_id) == 2
    (tmp_path / "train.py").write_text(example.replace(hub_id, json.dumps(str(tiny_qwen3))), encoding="utf-8")
    lines = [line for line in README.splitlines() if len(line) > 40][:16]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert block("bash", 1, FRONT) == "torchrun --nproc_per_node 2 train.py\n"
    first, second = run_program(["train.py"], tmp_path, 2)  # as torchrun starts it
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    # Trainer's last words: 16 rows, in batches of two on two ranks.
    assert "'train_loss'" in first.stdout
    assert "4/4" in first.stderr

    final = tmp_path / "out" / "final"
    trained, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(report.values()), report
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_qwen3).named_parameters())
    weights = dict(trained.named_parameters())
    assert weights.keys() == start.keys()
    assert all(weight.isfinite().all() for weight in weights.values())
    assert any(not torch.equal(weight, start[name]) for name, weight in weights.items())
    tokenizer = AutoTokenizer.from_pretrained(final)
    tokens = trained.generate(**tokenizer("The stage", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("The stage")


def test_the_plan_is_the_one_that_is_printed(request, tmp_path, monkeypatch):
    from hf_zero.recipes.cli import main

    config = config_of(HUB_ID)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(tmp_path / HUB_ID)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(shlex.split(PLAN)[1:]) == 0
    text = f"```text\n{out.getvalue().strip()}\n```"
    check_part(ROOT / "README.md", "plan", text, request.config.getoption("--write-docs"))
    assert re.search(r"recommended: --zero_stage (\d)", text)[1] == re.search(r"--zero_stage (\d)", SFT)[1]


def test_the_training_command_runs(tiny_qwen3, tmp_path):
    from transformers import AutoModelForCausalLM

    (row,) = re.findall(r"`(\{\"messages\".*?\})`", README)
    (tmp_path / "chats.jsonl").write_text(f"{row}\n" * 16, encoding="utf-8")
    few = ["--max_steps", "2", "--max_length", "64", "--report_to", "none", "--num_processes", "2"]
    _, _, *argv = arguments_of(SFT.replace(HUB_ID, str(tiny_qwen3)))
    for rank in run_on_ranks([*argv, *few], tmp_path):
        assert rank.code == 0, rank.err
    folder = tmp_path / "outputs" / "mine"
    AutoModelForCausalLM.from_pretrained(folder)
    assert {"README.md", "report.html", "resolved.yaml", "training_log.jsonl"} <= {p.name for p in folder.iterdir()}


@pytest.mark.quick
def test_the_example_without_trainer_runs_as_it_is(tmp_path):
    (tmp_path / "example.py").write_text(block("python", 1, FRONT), encoding="utf-8")
    (result,) = run_program(["example.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    # Four decimals are printed; a norm around sqrt(64 * 64 / 3 / 64) for the default initialisation.
    (norm,) = re.fullmatch(r"tensor\((\d+\.\d+).*\)\n", result.stdout).groups()
    assert 4.0 < float(norm) < 5.3


SCRIPT = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
)
data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
args = TrainingArguments(output_dir="out", max_steps=2, save_strategy="no", report_to="none")
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model()
print(type(trainer).__name__, "at stage", getattr(args, "zero_stage", None))
"""


def changed_lines(diff: str) -> list[tuple[str, str]]:
    """Each line that goes with the one that comes for it, right behind it."""
    lines = diff.splitlines()
    assert [line[0] for line in lines] == ["-", "+"] * (len(lines) // 2), diff
    return [(old[1:], new[1:]) for old, new in zip(lines[::2], lines[1::2])]


def patched(script: str, diff: str) -> str:
    """The script with every change of the diff, in which `...` stands for whatever else is there."""
    for old, new in changed_lines(diff):
        assert old.count("...") == new.count("...") == 1
        pattern = "(.*)".join(re.escape(part) for part in old.split("..."))
        kept = new.replace("\\", r"\\").replace("...", r"\g<1>")
        script, count = re.subn(f"^{pattern}$", kept, script, flags=re.MULTILINE)
        assert count == 1, f"{old} is in the script {count} times"
    return script


def test_the_changed_lines_turn_a_trainer_script_into_one_that_shards(tmp_path):
    diff = block("diff")
    names = {old: new for pair in changed_lines(diff) for old, new in [re.findall(r"= (\w+)\(", " ".join(pair))]}
    assert names == {"TrainingArguments": "ZeroTrainingArguments", "Trainer": "ZeroTrainer"}
    assert [name for name in names.values() if not hasattr(hf_zero, name)] == []
    script = f"from hf_zero import {', '.join(names.values())}\n{patched(SCRIPT, diff)}"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    (result,) = run_program(["script.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "ZeroTrainer at stage 3"
    assert (tmp_path / "out" / "model.safetensors").is_file()


ACCELERATE_SCRIPT = """
import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
)
data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
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


def test_the_changed_line_turns_a_script_for_accelerate_into_one_that_shards(tmp_path):
    ((old, new),) = re.findall(r"^- accelerate: replace `(.+?)` with `(.+?)`", README, re.MULTILINE)
    diff = f"-accelerator = {old}\n+accelerator = {new}\n"
    script = f"from hf_zero import ZeroAccelerator\n{patched(ACCELERATE_SCRIPT, diff)}"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    for rank in run_program(["script.py"], tmp_path, num_ranks=2):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.splitlines() == ["ZeroAccelerator False"]
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "zero").is_dir()


@pytest.mark.quick
def test_every_name_of_ours_in_the_text_exists():
    # that of Lightning is tested where Lightning is installed
    elsewhere = {"recipes", "trl", "lightning", "ZeroStrategy"}
    names = set(re.findall(r"\bZero[A-Z]\w+|(?<=\bhf_zero\.)[a-zA-Z]\w*", README)) - elsewhere
    assert {"ZeroTrainer", "ZeroTrainerMixin", "ZeroArgumentsMixin", "ZeroSFTTrainer", "shard"} <= names
    assert [name for name in sorted(names) if not hasattr(hf_zero, name) and name not in hf_zero.trl.__all__] == []
