"""A training script for `Trainer` becomes one for `ZeroTrainer` by two changed lines."""

from pathlib import Path

import pytest

from tests.distributed import free_port, run_program


SCRIPT = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
)
data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(16)]
args = TrainingArguments(
    output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    logging_steps=1,
)
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model()
losses = [str(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
# one write: ranks share one output, which may be unbuffered
sys.stdout.write(f"\\nworld size {trainer.args.world_size}\\nlosses {' '.join(losses)}\\n")
"""

CHANGES = {
    "from transformers import Trainer, TrainingArguments": (
        "from hf_zero import ZeroTrainer as Trainer, ZeroTrainingArguments as TrainingArguments"
    ),
    'report_to=[], save_strategy="no"': 'report_to=[], save_strategy="no", zero_stage=3',
}


@pytest.fixture(autouse=True)
def _for_launchers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def script(tmp_path) -> Path:
    text = SCRIPT
    for old, new in CHANGES.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "train.py"
    path.write_text(text)
    return path


def _losses(said: str) -> list[str]:
    """The lines of the ranks that say them."""
    return [line for line in said.splitlines() if line.startswith("losses")]


def test_two_changed_lines_on_two_ranks(tmp_path, script):
    for rank in run_program([script.name, str(tmp_path / "out")], tmp_path, num_ranks=2):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.count("world size 2") == 1
    from transformers import BertForSequenceClassification

    BertForSequenceClassification.from_pretrained(tmp_path / "out")


@pytest.mark.full("slow")
def test_accelerate_launch_starts_the_same_run(tmp_path, script):
    launcher = ["-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--multi_gpu"]
    launcher += [f"--main_process_port={free_port()}", "--mixed_precision=no", "--dynamo_backend=no"]
    (launched,) = run_program([*launcher, str(script), str(tmp_path / "of_accelerate")], tmp_path)
    assert launched.returncode == 0, launched.stderr
    output = launched.stdout
    assert output.count("world size 2") == 2
    of_torch = run_program([script.name, str(tmp_path / "of_torch")], tmp_path, num_ranks=2)
    assert _losses(output) == [line for rank in of_torch for line in _losses(rank.stdout)] and _losses(output)
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("of_accelerate", "of_torch")]
    assert saved[0] == saved[1]


def test_a_world_size_that_nobody_launched_ends_with_one_clear_line(tmp_path, script):
    script.write_text(f"import os\nos.environ['WORLD_SIZE'] = '2'\n{script.read_text()}")
    (result,) = run_program([script.name, str(tmp_path / "out")], tmp_path)
    assert result.returncode != 0
    assert "ConfigError: WORLD_SIZE is 2 but RANK" in result.stderr.strip().splitlines()[-1], result.stderr
    assert not (tmp_path / "out").exists()


REFUSED = {
    "arguments": "import hf_zero\nhf_zero.ZeroTrainingArguments(output_dir='out', zero_stage=7, use_cpu=True)",
    "a plain script": "import hf_zero, torch\nhf_zero.shard(torch.nn.Linear(2, 2), stage=7)",
    "a recipe": "import sys\nfrom hf_zero.recipes.cli import main\nsys.exit(main(['classify', '--zero_stage', '7']))",
}


@pytest.mark.full("slow")
@pytest.mark.parametrize("case", list(REFUSED.values()), ids=list(REFUSED))
def test_what_torchrun_says_last_has_the_sentence_of_an_error(tmp_path, case):
    path = tmp_path / "train.py"
    path.write_text(case)
    (launched,) = run_program(["-m", "torch.distributed.run", "--nproc_per_node", "2", str(path)], tmp_path)
    assert launched.returncode == 1
    summary = launched.stderr.rpartition("Root Cause")[2]
    assert "traceback : ConfigError: " in summary and "stage" in summary and " 7" in summary, launched.stderr
    assert len(summary.splitlines()) < 12, summary
