"""Parameters that patterns name stay as they are, in every task, and a pattern that is wrong is told."""

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.errors import ConfigError
from hf_zero.recipes.cli import main
from hf_zero.recipes.lora import TrainedArguments, freeze_parameters
from tests.recipes.preferences import preferences, write_rows
from tests.recipes.ranks import trained
from tests.trainer.harness import reset_accelerate


def model() -> torch.nn.Module:
    """Three layers of 12 parameters each; the last is tied to the first."""
    made = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("first", "second", "last")})
    made["last"].weight = made["first"].weight
    return made


@pytest.mark.quick
@pytest.mark.parametrize(
    ("freeze", "unfreeze", "kept"),
    [
        (["first"], None, ["second.weight", "second.bias", "last.bias"]),
        (["*.bias"], None, ["first.weight", "second.weight"]),
        (["last.weight"], None, ["first.bias", "second.weight", "second.bias", "last.bias"]),  # tied to first.weight
        (["*"], ["s*"], ["second.weight", "second.bias"]),
        (["first", "[rs]econd"], ["*.bias"], ["first.bias", "second.bias", "last.bias"]),
    ],
)
def test_what_is_named_is_not_trained(freeze, unfreeze, kept):
    made = model()
    [line] = freeze_parameters(made, TrainedArguments(freeze, unfreeze))
    found = {name: param for name, param in made.named_parameters() if param.requires_grad}
    assert list(found) == kept
    assert line == f"trained: {sum(param.numel() for param in found.values())} of 27 parameters"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("freeze", "unfreeze", "message"),
    [
        (["zzz"], None, "^freeze 'zzz': matches none of 6 parameters; first.weight, first.bias, .* and so on$"),
        (["first"], ["second"], "^unfreeze 'second': matches none of 2 parameters"),
        (["*"], None, r"^freeze \['\*'\]: nothing is left to train"),
    ],
)
def test_patterns_that_match_nothing_or_leave_nothing_are_refused(freeze, unfreeze, message):
    with pytest.raises(ConfigError, match=message):
        freeze_parameters(model(), TrainedArguments(freeze, unfreeze))


def test_a_classifier_learns_by_its_head_alone(tiny_model, csv_file, tmp_path):
    settings = {"model_name_or_path": tiny_model, "train_file": csv_file, "max_steps": 2, "learning_rate": 0.01}
    trained("classify", tmp_path, freeze="*", unfreeze="classifier", **settings)
    before, after = load_file(tiny_model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    shared = {name: f"bert.{name}" for name in before if f"bert.{name}" in after}
    assert len(shared) > 20 and all(torch.equal(before[name], after[there]) for name, there in shared.items())
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"trained: 34 of {sum(tensor.numel() for tensor in after.values()):,} parameters" in text


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full("more cases")), 3])
def test_frozen_layers_of_a_language_model_stay_and_a_run_goes_on_bit_for_bit(tiny_llama, tmp_path, stage):
    pytest.importorskip("trl")
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(16)]
    settings = {"model_name_or_path": tiny_llama, "train_file": write_rows(tmp_path / "rows.jsonl", rows)}
    settings |= {"max_length": 48, "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 0.01}
    settings |= {"freeze": ["model.embed_tokens", "model.layers.0"], "save_strategy": "steps", "save_steps": 2}
    for added in ({}, {"resume": "out/checkpoint-2", "output_dir": "again"}):
        trained("sft", tmp_path, zero_stage=stage, **settings, **added)
    before, after, again = (
        load_file(folder / "model.safetensors") for folder in (tiny_llama, tmp_path / "out", tmp_path / "again")
    )
    assert all(torch.equal(after[name], again[name]) for name in after) and before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("model.embed_tokens.", "model.layers.0."))}


def test_plan_and_dry_run_count_what_is_trained(tiny_model, csv_file, tmp_path, capsys):
    assert main(["plan", str(tiny_model), "--freeze=embeddings", "--max_length=16"]) == 0
    told = capsys.readouterr().out
    assert "0.0 M trained" in told
    reset_accelerate()
    argv = [f"--model_name_or_path={tiny_model}", f"--train_file={csv_file}", f"--output_dir={tmp_path / 'out'}"]
    assert main(["classify", *argv, "--freeze=*", "--unfreeze=classifier", "--dry_run", "--use_cpu"]) == 0
    assert "34 of them trained" in capsys.readouterr().out
    reset_accelerate()
    assert main(["classify", *argv, "--freeze=bert.nothing", "--dry_run", "--use_cpu"]) == 2
    assert "freeze 'bert.nothing': matches none of" in capsys.readouterr().err
