"""The Python in docs/checkpoints.md runs, block by block, on tiny models."""

import re
from pathlib import Path

import pytest
import torch

import hf_zero
from hf_zero.engine import engine_of
from tests import models
from tests.distributed import run_ranks
from tests.test_readme import fenced_blocks
from tests.trainer.harness import PLAIN, SETTINGS, Rows, seed_everything, train


PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
BLOCKS = [block.text for block in fenced_blocks(PAGE.read_text(encoding="utf-8")) if block.language == "python"]
# What stands for the page's names, and what is left to the reader there.
ELIDED = [("zero_stage=3, ...", "zero_stage=3, **settings"), ("...  ", "pass  ")]


def _block(first_line: str) -> str:
    found = [text for text in BLOCKS if text.startswith(first_line)]
    assert len(found) == 1, f"docs/checkpoints.md has {len(found)} blocks that begin with {first_line!r}"
    text = found[0]
    for written, run in ELIDED:
        text = text.replace(written, run)
    return text


# Every block, by its first line, with the test that runs it: another block belongs here first.
TESTED = {
    "hf_zero.save_checkpoint(model": "test_saving_and_going_on",
    "snapshots = hf_zero.Snapshots()": "test_saving_and_going_on",
    "trainer.train(resume_from_checkpoint=True)": "test_saving_and_going_on",
    "from transformers import AutoModelForCausalLM": "test_loading_without_a_whole_model",
    "hf_zero.materialize(model)": "test_loading_without_a_whole_model",
    'hf_zero.save_pretrained(model, "out")': "test_loading_without_a_whole_model",
    "trainer = ZeroTrainer(model=model": "test_switching_from_another_program",
    "hf_zero.shard(model, stage=3)\noptimizer": "test_switching_from_another_program",
}


@pytest.mark.quick
def test_every_block_has_a_test():
    assert len(BLOCKS) == len(TESTED)
    for first_line, name in TESTED.items():
        assert _block(first_line)
        assert name in globals()


def _saves_and_goes_on(folder):
    seed_everything()
    args = hf_zero.ZeroTrainingArguments(zero_stage=3, **{**SETTINGS, "output_dir": f"{folder}/run"}, save_steps=2)
    args.save_strategy = "steps"
    trainer = hf_zero.ZeroTrainer(model=models.build("bert"), args=args, train_dataset=Rows("bert"))
    trainer.train()
    names = {
        "hf_zero": hf_zero,
        "trainer": trainer,
        "model": trainer.model,
        "optimizer": trainer.optimizer.optimizer,
        "folder": f"{folder}/out/checkpoint-500",
    }
    for first_line in (line for line, test in TESTED.items() if test == "test_saving_and_going_on"):
        exec(_block(first_line).replace('"out/', f'"{folder}/out/'), names)


@pytest.mark.quick
def test_saving_and_going_on(tmp_path):
    run_ranks(_saves_and_goes_on, 2, str(tmp_path), timeout=240)
    for name in ("checkpoint-500", "checkpoint-600"):
        hf_zero.checkpoint.check_checkpoint(tmp_path / "out" / name)
    assert (tmp_path / "out" / "final" / "model.safetensors").exists()


def _loads(folder):
    if torch.distributed.get_rank() == 0:
        models.build("mixtral").save_pretrained(f"{folder}/base")
    torch.distributed.barrier()

    def run(first_line: str, names: dict) -> dict:
        text = _block(first_line).replace("mistralai/Mixtral-8x7B-v0.1", f"{folder}/base")
        exec(re.sub(r'"out"', f'"{folder}/out"', text), names)
        return names

    start = "from transformers import AutoModelForCausalLM"
    names = run(start, {"hf_zero": hf_zero, "torch": torch})
    assert engine_of(names["model"]).stage == 3
    run('hf_zero.save_pretrained(model, "out")', names)
    assert "block_sparse_moe.experts.3.w1.weight" in _block('hf_zero.save_pretrained(model, "out")')

    from peft import LoraConfig, get_peft_model

    model = hf_zero.load_pretrained(names["AutoModelForCausalLM"], f"{folder}/base")
    names = {"hf_zero": hf_zero, "model": model, "get_peft_model": get_peft_model, "LoraConfig": LoraConfig}
    text = _block("hf_zero.materialize(model)").replace(
        "LoraConfig(r=16", 'LoraConfig(r=16, target_modules=["q_proj"]'
    )
    exec(text, names)
    assert all(p.device.type == "cpu" for p in names["model"].parameters())


def test_loading_without_a_whole_model(tmp_path):
    run_ranks(_loads, 2, str(tmp_path), timeout=240)


def _switches(folder):
    train(PLAIN, f"{folder}/theirs", "llama-tied", save_strategy="steps", save_steps=2)
    torch.distributed.barrier()
    settings = {**SETTINGS, "output_dir": f"{folder}/ours", "save_strategy": "steps", "save_steps": 2}
    names = {
        "hf_zero": hf_zero,
        "torch": torch,
        "ZeroTrainer": hf_zero.ZeroTrainer,
        "ZeroTrainingArguments": hf_zero.ZeroTrainingArguments,
        "settings": settings,
        "model": models.build("llama-tied"),
        "data": Rows("llama-tied"),
    }
    text = _block("trainer = ZeroTrainer(model=model").replace(
        "converted/checkpoint-500", f"{folder}/theirs/checkpoint-2"
    )
    exec(text, names)
    assert names["trainer"].state.global_step == 4

    model = models.build("llama-tied")
    names.update(model=model, groups=models.decay_groups(model))
    text = _block("hf_zero.shard(model, stage=3)\noptimizer")
    exec(text.replace("converted/checkpoint-500", f"{folder}/ours/checkpoint-4"), names)


def test_switching_from_another_program(tmp_path):
    run_ranks(_switches, 2, str(tmp_path), timeout=240)


@pytest.mark.parametrize("tool", ["verify", "merge", "push"])
def test_the_tools_are_those_of_the_command_line(tool):
    from hf_zero.recipes.tasks import TOOLS

    assert tool in TOOLS
    assert f"python -m hf_zero.recipes {tool} " in PAGE.read_text(encoding="utf-8")
