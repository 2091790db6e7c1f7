"""What a rank takes to start is of the model: the same work and memory among few ranks and among many."""

import json
from pathlib import Path

import pytest

from benchmarks import growth
from tests.benchmarks.test_compare import run_module
from tests.generated import check_part


def _grown(folder: Path, ranks: str, *flags: str) -> dict:
    path = folder / "out.json"
    arguments = ["--sizes", "tiny", "--ranks", ranks, *flags, "--json", str(path)]
    done = run_module("benchmarks.growth", *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("| model | ranks |")
    return json.loads(path.read_text())


@pytest.mark.full("slow")
def test_the_work_of_a_start_grows_with_the_model_and_not_with_the_ranks(tmp_path):
    few, *more = (growth.Start(**each) for each in _grown(tmp_path, "8,512,4096", "--calls")["start"])
    assert (few.size, few.num_ranks) == ("tiny", 8)
    for many in more:
        for name in ("connect", "shard", "adamw", "muon"):
            assert getattr(many, name) == pytest.approx(getattr(few, name), rel=0.01), (name, few, many)
        # what a rank does for a matrix depends on where shards end in it
        assert many.adafactor < 2 * few.adafactor, (few, many)
        assert many.memory < few.memory + 8, (few, many)


@pytest.mark.full("slow")
def test_a_rank_makes_the_initial_values_of_its_own_ranges(tmp_path):
    few, many = (growth.FromScratch(**each) for each in _grown(tmp_path, "2,64", "--from_scratch")["from_scratch"])
    # half of 16.5 M values in fp32, and a 64th; a rank makes the embedding whole, 31 MiB, to take its part
    assert few.memory > 31 > many.memory and many.peak > 31, (few, many)


def test_the_page_has_the_results_that_were_kept(request):
    root = Path(__file__).parents[2]
    kept = json.loads((root / "benchmarks" / "results" / "2026-11-24-growth.json").read_text(encoding="utf-8"))
    table = growth.table([growth.Start(**each) for each in kept["start"]])
    check_part(root / "benchmarks" / "README.md", "starts", table, request.config.getoption("--write-docs"))


def test_an_unknown_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        growth.main(["--sizes", "9B"])
    assert "--sizes 9B: give some of tiny, 8B" in capsys.readouterr().err
