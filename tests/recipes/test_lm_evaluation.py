"""Tasks of lm_eval, which a model is given after its training."""

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_zero.recipes.artifacts import REPORT_NAME
from hf_zero.recipes.samples import lm_metrics_of
from tests.recipes.preferences import THINGS, preferences, write_rows
from tests.recipes.ranks import logged, run_on_ranks


pytest.importorskip("trl")

CHOICES = ["red", "old", "new"]
TASKS = {
    "things": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer"},
    "words": {
        **{"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"},
        **{"generation_kwargs": {"until": ["\n"], "max_gen_toks": 5}},
    },
}
METRICS = {"things": "acc", "words": "exact_match"}


@pytest.fixture
def tasks(tmp_path) -> list[str]:
    """Two tasks over the same rows: one compares choices, in the other the model writes."""
    rows = [{"text": f"the {thing} is", "choices": CHOICES, "answer": n % 3} for n, thing in enumerate(THINGS)]
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    write_rows(tmp_path / "rows.jsonl", rows)
    for name, task in TASKS.items():
        metric = [{"metric": METRICS[name], "aggregation": "mean", "higher_is_better": True}]
        common = {"task": name, **data, "test_split": "test", "doc_to_text": "{{text}}", "metric_list": metric}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**common, **task}), encoding="utf-8")
    return [str(tmp_path / f"{name}.yaml") for name in TASKS]


def command(task: str, model, folder, *flags: str) -> list[str]:
    write_rows(folder / "train.jsonl", preferences(16))
    settings = {
        **{"model_name_or_path": model, "train_file": folder / "train.jsonl", "output_dir": "out", "max_length": 48},
        **{"max_steps": 3, "learning_rate": 1e-2, "per_device_eval_batch_size": 2, "samples": 0, "bf16": False},
        **{"save_strategy": "no", "report_to": "none", "zero_stage": 3},
    }
    return [task, *(f"--{name}={value}" for name, value in settings.items()), *flags]


@pytest.mark.parametrize("use_peft", [False, pytest.param(True, marks=pytest.mark.full("more cases"))])
def test_two_ranks_find_what_lm_eval_finds_of_the_folder(tiny_llama, tasks, tmp_path, use_peft):
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed; install the extra `lm-eval`")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    flags = ["--lm_eval_tasks", *tasks, "--lm_eval_limit=5", f"--use_peft={use_peft}"]
    first, second = run_on_ranks(command("dpo", tiny_llama, tmp_path, *flags), tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "lm_eval:\n  things acc: " in first.out and (second.out, second.err) == ("", "")
    folder = tmp_path / "out"
    model = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        softmax_dtype=torch.float32,
    )
    manager = TaskManager(include_defaults=False)
    expected = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, limit=5, bootstrap_iters=1000)
    for name, metric in METRICS.items():
        results = expected["results"][name]
        assert logged(folder, f"eval_{name}_{metric}") == [results[f"{metric},none"]]
        assert logged(folder, f"eval_{name}_{metric}_stderr") == [results[f"{metric}_stderr,none"]]
        assert f"eval_{name}_{metric}" in (folder / "README.md").read_text(encoding="utf-8")
        assert f"{name} {metric}".replace("_", " ") in (folder / REPORT_NAME).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        ("dpo", ["--lm_eval_limit=5"], "lm_eval_limit: has no effect without lm_eval_tasks"),
        ("reward", ["--lm_eval_tasks=things.yaml"], "lm_eval_tasks: are for models that write text"),
        ("dpo", ["--lm_eval_tasks=nowhere.yaml"], "lm_eval_tasks nowhere.yaml: no such file"),
        ("dpo", ["--lm_eval_tasks=arc_easy", "--lm_eval_limit=0"], "lm_eval_limit 0: expected 1 or more"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_line(
    tiny_llama, tmp_path, capsys, monkeypatch, task, flags, message
):
    from hf_zero.recipes import samples
    from hf_zero.recipes.cli import main

    argv = command(task, tiny_llama, tmp_path, *flags)
    monkeypatch.setattr(samples, "find_spec", lambda name: name)
    assert main(argv) == 2 and message in (said := capsys.readouterr().err) and said.count("\n") == 1
    monkeypatch.setattr(samples, "find_spec", lambda name: None)
    assert main(argv) == 2
    assert ("lm_eval is not installed" in capsys.readouterr().err) == ("tasks=" in flags[0] and task != "reward")


def test_of_a_group_the_groups_own_numbers_are_told():
    part, whole = {"alias": "a", "acc,none": 0.5}, {"alias": "g", "acc,none": 0.25, "acc_stderr,none": "N/A"}
    found = {"results": {"g": whole, "a": part, "b": {"exact_match,strict": 1}}, "group_subtasks": {"g": ["a"]}}
    assert lm_metrics_of(found) == {"g_acc": 0.25, "b_exact_match_strict": 1.0}
    found = {"results": {"g": {"alias": "g"}, "a": part}, "group_subtasks": {"g": ["a"]}}
    assert json.dumps(lm_metrics_of(found)) == '{"a_acc": 0.5}'
