"""Every task, from rows to a folder that answers: on two processes, interrupted once, at stages 2 and 3; and in one
process as TRL's own trainer.

| | `sft` `pretrain` `dpo` `kto` `grpo` `rloo` `distill` | `reward` `classify` |
|---|---|---|
| interrupted and gone on with, it ends bit for bit as a run that is not | here | here |
| `from_pretrained` loads the folder | here | here |
| it answers | `hf-zero chat` | its pipeline |
| logs what TRL's own trainer logs | here, and `data/test_against_trl.py` for the formats of `sft` | `reward`: here |
"""

import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import run_ranks
from tests.recipes.cases import CASES, Case
from tests.recipes.ranks import logged, run_on_ranks
from tests.tiers import in_core


pytest.importorskip("trl")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def tiny_teacher(tiny_llama, tmp_path_factory) -> Path:
    """Another model with the same tokenizer."""
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_teacher")
    shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
    torch.manual_seed(5)
    LlamaForCausalLM(AutoConfig.from_pretrained(tiny_llama)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("stage", in_core([3], [3, 2]))
@pytest.mark.parametrize("name", in_core(["grpo"], CASES))
def test_a_run_that_is_interrupted_ends_as_one_that_is_not_and_its_folder_answers(
    name, stage, tiny_llama, tiny_model, tiny_teacher, tmp_path, capsys
):
    case, model = CASES[name], tiny_model if name == "classify" else tiny_llama
    more = {"teacher_model_name_or_path": tiny_teacher} if case.task == "distill" else {}
    argv = case.flags(model, tmp_path, zero_stage=stage, **more)
    whole = run_on_ranks([*argv, "--output_dir=whole"], tmp_path)
    assert [rank.code for rank in whole] == [0, 0], whole[0].err + whole[1].err
    num_steps = len(logged(tmp_path / "whole", "loss"))

    stopped = run_on_ranks(argv, tmp_path, stop_in=num_steps // 2)
    assert [rank.code for rank in stopped] == [128 + signal.SIGTERM] * 2, stopped[0].err + stopped[1].err
    assert not (tmp_path / "out" / "model.safetensors").exists()
    first, second = run_on_ranks(argv, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert f"resume: going on from out/checkpoint-{num_steps // 2}, step {num_steps // 2} of " in first.out
    assert re.search(case.line, first.out) and second.out == ""
    assert "<h3>loss</h3>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    check_equal(tmp_path / "out", tmp_path / "whole", num_steps)
    check_answer(case, tmp_path / "out", capsys)


def check_equal(folder: Path, whole: Path, num_steps: int) -> None:
    assert len(logged(folder, "loss")) == num_steps
    for key in ("loss", "grad_norm"):
        assert logged(folder, key) == logged(whole, key)
    weights, expected = (load_file(each / "model.safetensors") for each in (folder, whole))
    assert weights.keys() == expected.keys()
    assert [name for name, weight in weights.items() if not torch.equal(weight, expected[name])] == []


def check_answer(case: Case, folder: Path, capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

    from hf_zero.recipes.cli import main
    from tests.recipes.test_generating import NUM_NEW, expected

    kind = AutoModelForSequenceClassification if case.pipeline else AutoModelForCausalLM
    _, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    if case.pipeline:
        assert 0 < pipeline(case.pipeline, str(folder))("the door is red")[0]["score"] < 1
        return
    capsys.readouterr()
    assert main(["chat", str(folder), "--use_cpu=true", f"--max_new_tokens={NUM_NEW}", "--prompt=the door is"]) == 0
    assert capsys.readouterr().out == expected(folder, "the door is") + "\n"


OURS = ("model_name_or_path", "train_file", "test_file", "reward_funcs", "zero_stage")  # not in TRL's configs
# What the recipe sets for TRL.
DEFAULTS = {
    "pretrain": {"packing": True, "packing_strategy": "wrapped"},
}


def _compared(name: str, folder: str, model: str, teacher: str) -> tuple[list[dict], list[dict]]:
    """The recipe, and then TRL's own trainer, in one process: what each logs at its steps."""
    import datasets
    from transformers import AutoTokenizer

    from tests.recipes.data.tasks import run, trained_by_trl

    case, cache = CASES[name], Path(folder, "cache")
    datasets.config.HF_DATASETS_CACHE = cache
    more = {"teacher_model_name_or_path": teacher} if case.task == "distill" else {}
    if "reward_funcs" in case.settings:
        more["reward_funcs"] = f"{folder}/rewards.py:short"
    argv = case.flags(Path(model), Path(folder), zero_stage=2, output_dir=f"{folder}/ours", **more)
    ours = run(case.task, cache, [flag for flag in argv[1:] if not flag.startswith("--test_file")])["log"]

    settings = {key: value for key, _, value in (flag[2:].partition("=") for flag in argv[1:]) if key not in OURS}
    settings = {key: _parsed(value) for key, value in settings.items()} | DEFAULTS.get(name, {})
    parts = {}
    if case.task == "distill":
        parts["teacher_model"] = settings.pop("teacher_model_name_or_path")
    if "reward_funcs" in case.settings:
        names: dict = {}
        exec(Path(folder, "rewards.py").read_text(), names)
        parts["reward_funcs"] = names["short"]
    del settings["output_dir"]
    rows, tokenizer = datasets.Dataset.from_list(case.rows(16)), AutoTokenizer.from_pretrained(model)
    trainer = trained_by_trl(case.trainer, model, rows, tokenizer, folder, settings, **parts)
    return ours, trainer.state.log_history


def _parsed(value: str):
    words = {"True": True, "False": False}
    try:
        return words[value] if value in words else int(value) if value.isdigit() else float(value)
    except ValueError:
        return value


@pytest.mark.parametrize("name", in_core(["dpo"], [name for name in CASES if name not in ("sft", "classify")]))
def test_a_task_logs_in_one_process_what_the_trainer_of_trl_logs(name, tiny_llama, tiny_teacher, tmp_path):
    model = tiny_scorer(tiny_llama, tmp_path / "scorer") if name == "reward" else tiny_llama
    [(ours, theirs)] = run_ranks(_compared, 1, name, str(tmp_path), str(model), str(tiny_teacher), timeout=240)
    ours, theirs = ([line for line in log if "loss" in line] for log in (ours, theirs))
    assert len(ours) == len(theirs) == CASES[name].settings.get("max_steps", 6)
    # not the loss, which is 0 by definition where rewards count as differences to those of others
    assert len({line["grad_norm"] for line in theirs}) > 1
    for own, line in zip(ours, theirs, strict=True):
        values = {key: (own[key], value) for key, value in line.items() if key != "step_time"}
        unlike = {key: pair for key, pair in values.items() if not math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-5)}
        assert unlike == {} and {"loss", "grad_norm"} <= values.keys()


def tiny_scorer(tiny_llama: Path, folder: Path) -> Path:
    """With a head: a new one is drawn at random, and not by both in the same order."""
    from transformers import LlamaForSequenceClassification

    shutil.copytree(tiny_llama, folder)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(tiny_llama, num_labels=1)
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder
