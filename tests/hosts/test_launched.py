"""torchrun on two hosts, as docs/multi-node.md says. A run trains and saves on both; it ends when one of them dies."""

import time
from pathlib import Path

import pytest

from tests.hosts.network import Network, missing


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"{missing()}"),
    pytest.mark.full("slow"),
]

SCRIPT = """
import sys
import torch
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback
from hf_zero import ZeroTrainer, ZeroTrainingArguments

class Began(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        Path(args.output_dir, "began").touch()

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(16)]
folder, max_steps = sys.argv[1], int(sys.argv[2])
args = ZeroTrainingArguments(
    output_dir=folder, max_steps=max_steps, per_device_train_batch_size=2, report_to=[], save_steps=2, zero_stage=3
)
trainer = ZeroTrainer(model=model, args=args, train_dataset=data, callbacks=[Began()])
trainer.train()
trainer.save_model()
print(f"rank {args.process_index} of {args.world_size}, on machine process {args.local_process_index}")
"""


@pytest.fixture
def program(tmp_path) -> list[str]:
    """The script and the folder in which it saves, which all hosts see."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return [str(tmp_path / "train.py"), str(tmp_path / "out")]


def test_a_run_saves_its_model(program):
    with Network(2) as network:
        runs = network.torchrun([*program, "3"], num_ranks=2)
        said = [run.communicate(timeout=240)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], said
        for index, text in enumerate(said):
            for place in range(2):
                assert f"rank {2 * index + place} of 4, on machine process {place}" in text
        assert all(
            Path(program[1], name).is_file() for name in ("model.safetensors", "checkpoint-2/model.safetensors")
        )


def test_a_host_that_dies_ends_the_run_on_the_other_and_is_named(program):
    with Network(2) as network:
        runs = network.torchrun([*program, "100000"], num_ranks=2)
        deadline = time.monotonic() + 200
        while not Path(program[1], "began").exists():
            assert time.monotonic() < deadline and runs[0].poll() is None, runs[0].communicate()[0]
            time.sleep(0.2)
        begin = time.monotonic()
        network.hosts[1].kill_all()
        said, _ = runs[0].communicate(timeout=100)
        assert runs[0].returncode != 0
        assert "(host1, pid " in said and "ended; look at" in said, said
        assert time.monotonic() - begin < 40, "torchrun gives its ranks 30 seconds to leave"
