"""Metrics by a Python file of the user's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.recipes.user_code import check_function, load_function, metrics_of
from tests.recipes.preferences import preferences, write_rows
from tests.recipes.ranks import logged, trained


ROOT = Path(__file__).parents[2]
CODE = """
from __future__ import annotations
from dataclasses import dataclass
import numpy as np
from beside import FACTOR

@dataclass
class Place:
    at: int

def both(predictions):
    wrong = predictions.predictions.argmax(-1) != predictions.label_ids
    return {"error_rate": wrong.mean(), "scaled": np.float32(FACTOR)}

def fails(predictions):
    raise KeyError("no such row")

async def awaited(predictions):
    return {}

try:
    from beside import found
except ImportError:
    def found(predictions):
        return {}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 3\n", encoding="utf-8")
    (tmp_path / "judge.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "judge.py"


@pytest.mark.full("slow")
def test_metrics_of_a_file_stand_beside_the_accuracy_and_choose_the_best_model(file, tiny_model, csv_file, tmp_path):
    settings = {"model_name_or_path": tiny_model, "train_file": csv_file, "compute_metrics": f"{file}:both"}
    settings |= {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "error_rate", "greater_is_better": False}
    trained("classify", tmp_path, **settings)
    found = {name: logged(tmp_path / "out", f"eval_{name}") for name in ("accuracy", "error_rate", "scaled")}
    assert len(found["accuracy"]) == 4  # before, at two steps, at the end
    assert found["error_rate"] == pytest.approx([1 - accuracy for accuracy in found["accuracy"]])
    assert set(found["scaled"]) == {3.0}
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<h3>eval_error_rate</h3>" in report


def test_what_a_metric_raises_is_raised_as_it_is(file):
    with pytest.raises(KeyError, match="no such row") as caught:
        metrics_of(f"{file}:fails")(None)
    assert caught.traceback[-1].path == file and caught.traceback[-1].lineno == 15
    assert metrics_of(None)(None) == {}


def test_metrics_are_numbers_on_all_ranks(tmp_path):
    code = "import numpy as np\ndef share(*_):\n    return {1: np.array(0.5)}\n"
    code += "def rows(*_):\n    return {'a': np.ones(2)}\ndef number(*_):\n    return 0.5\n"
    (tmp_path / "judge.py").write_text(code)
    share, rows, number = (metrics_of(f"{tmp_path}/judge.py:{name}") for name in ("share", "rows", "number"))
    assert json.dumps(share(None)) == '{"1": 0.5}'
    with pytest.raises(TypeError):
        rows(None)
    with pytest.raises(TypeError, match="it gave a float, expected a dict of names and numbers"):
        number(None)


def test_files_of_one_name_are_modules_of_their_own_and_import_their_neighbours_when_called(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"neighbour_{name}.py").write_text(f"NAME = {name!r}\n")
        code = f"def named(*_):\n    from neighbour_{name} import NAME\n    return {{NAME: 1}}\n"
        (tmp_path / name / "judge.py").write_text(code)
    first, second = (metrics_of(f"{tmp_path}/{name}/judge.py:named") for name in ("first", "second"))
    assert (first(None), second(None)) == ({"first": 1}, {"second": 1})


def test_a_metric_that_fails_ends_the_run_with_its_traceback_and_exit_code_1(file, tiny_model, csv_file, tmp_path):
    argv = [sys.executable, "-m", "hf_zero.recipes", "classify", "--model_name_or_path", str(tiny_model)]
    argv += ["--train_file", str(csv_file), "--output_dir", "out", f"--compute_metrics={file}:fails", "--max_steps=1"]
    argv += ["--use_cpu", "--num_processes=2", "--report_to=none"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert found.returncode == 1, found.stderr
    assert 'judge.py", line 16, in fails' in found.stderr and "KeyError: 'no such row'" in found.stderr


def test_what_is_awaited_is_a_function_too_and_what_a_condition_defines(file):
    check_function("compute_metrics", f"{file}:found")
    check_function("reward_funcs", f"{file}:awaited")
    assert load_function("reward_funcs", f"{file}:awaited").__name__ == "awaited"


def test_language_models_are_judged_by_sums_over_the_tokens_of_each_row(tiny_llama, tmp_path):
    pytest.importorskip("trl")
    code = "def share(found):\n    right, count = found.predictions[:, 2], found.label_ids\n"
    code += "    assert found.predictions.shape == (6, 3) and (right <= count).all() and (count > 0).all()\n"
    code += "    return {'share': right.sum() / count.sum(), 'mine': found.predictions[:, 0].sum() / count.sum()}\n"
    (tmp_path / "metrics.py").write_text(code)
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(6)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = {"model_name_or_path": tiny_llama, "train_file": data, "test_file": data, "max_length": 48}
    settings |= {"per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1, "samples": 0}
    trained("sft", tmp_path, max_steps=1, compute_metrics="metrics.py:share", **settings)
    folder = tmp_path / "out"
    assert logged(folder, "eval_share") == pytest.approx(logged(folder, "eval_mean_token_accuracy"), abs=1e-6)
    assert logged(folder, "eval_mine") == pytest.approx(logged(folder, "eval_loss"), abs=1e-6)
