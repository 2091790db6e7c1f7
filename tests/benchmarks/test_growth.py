"""What a rank takes to start is of the model: the same work and memory among few ranks and among many."""

import json
from pathlib import Path

import pytest

from benchmarks import growth
from tests.benchmarks.test_compare import run_module
from tests.generated import check_part


@pytest.mark.full("slow")
def test_the_work_of_a_start_grows_with_the_model_and_not_with_the_ranks(tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--sizes", "tiny", "--ranks", "8,512,4096", "--calls", "--json", str(path)]
    done = run_module("benchmarks.growth", *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| model | ranks |" in done.stdout
    few, *more = json.loads(path.read_text())["start"]
    assert (few["size"], few["num_ranks"]) == ("tiny", 8)
    for many in more:
        for name in ("connect", "shard", "adamw", "muon"):
            assert many[name] == pytest.approx(few[name], rel=0.01), (name, few, many)
        # what a rank does for a matrix depends on where shards end in it
        assert many["adafactor"] < 2 * few["adafactor"], (few, many)
        assert many["memory"] < few["memory"] + 8, (few, many)


def test_the_page_has_the_results_that_were_kept(request):
    root = Path(__file__).parents[2]
    kept = json.loads((root / "benchmarks" / "results" / "2026-11-24-growth.json").read_text(encoding="utf-8"))
    table = growth.table(kept["start"])
    check_part(root / "benchmarks" / "README.md", "starts", table, request.config.getoption("--write-docs"))


def test_an_unknown_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        growth.main(["--sizes", "9B"])
    assert "--sizes 9B: give some of tiny, 8B" in capsys.readouterr().err
