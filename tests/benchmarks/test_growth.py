"""The table of what a rank takes to start is made as the documentation says."""

import json

import pytest

from benchmarks import growth
from tests.benchmarks.test_compare import run_module


@pytest.mark.full("slow")
def test_a_rank_starts_among_few_and_among_many(tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--sizes", "tiny", "--ranks", "2,512", "--rounds", "1", "--json", str(path)]
    done = run_module("benchmarks.growth", *arguments, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [growth.Start(**each) for each in json.loads(path.read_text())]
    assert [(each.size, each.num_ranks) for each in found] == [("tiny", 2), ("tiny", 512)]
    assert all(each.shard > 0 and each.muon > 0 for each in found)
    assert done.stdout.splitlines()[0].startswith("| model | ranks |")


def test_an_unknown_size_is_refused(capsys):
    with pytest.raises(SystemExit):
        growth.main(["--sizes", "9B"])
    assert "--sizes 9B: give some of tiny, 8B" in capsys.readouterr().err
