"""`benchmarks.try_gpu`: steps that end, that fail, and for which there is no time; what was found stays."""

import json
import time

import pytest

from benchmarks import try_gpu
from benchmarks.try_gpu import STEPS, Step, main


def _python(code: str) -> Step:
    arguments = f"-n 1 -r 1 '{code}'"
    return Step("timeit", arguments, 30.0, arguments)


@pytest.mark.full("slow")
def test_what_was_found_stays_when_time_is_up(tmp_path, monkeypatch, capsys):
    steps = {
        "well": _python('print("all is well")'),
        "wrong": _python('print("ERROR of step two"); 1 / 0'),
        "late": _python('import time; print("so far"); time.sleep(600)'),
        "last": _python("pass"),
    }
    for name, step in steps.items():
        monkeypatch.setitem(STEPS, name, step)
    monkeypatch.setattr(try_gpu, "LEAST_SECONDS", 1)
    begin = time.monotonic()
    assert main(["--output", str(tmp_path), "--seconds", "12", "--device", "cpu", "--steps", "well,wrong,late"]) == 1
    assert time.monotonic() - begin < 60
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["versions"]["torch"]
    ends = {name: step["end"] for name, step in found["steps"].items()}
    assert ends == {"well": "done", "wrong": "failed, exit code 1,", "late": "its time was up"}
    said = [step["said"] for step in found["steps"].values()]
    assert said[0][0] == "all is well" and said[1][0] == "ERROR of step two"
    assert said[2][-1] == "KeyboardInterrupt"
    log = (tmp_path / "log.txt").read_text()
    order = [log.index(text) for text in ("## well", "all is well", "## wrong", "## late", "so far")]
    assert order == sorted(order)
    assert "## late: its time was up after" in capsys.readouterr().out
    assert main(["--output", str(tmp_path), "--seconds", "0", "--steps", "last"]) == 1
    (last,) = json.loads((tmp_path / "found.json").read_text())["steps"].values()
    assert last["end"] == "left out, for want of time"


@pytest.mark.full("slow")
@pytest.mark.timeout(900)
def test_the_program_is_tried_on_a_cpu(tmp_path):
    """All of its steps but `check`, which has tests of its own, and those that are the same on a CPU."""
    assert main(["--output", str(tmp_path), "--device", "cpu", "--seconds", "880", "--steps", "parity,0.5b,bus"]) == 0
    steps = json.loads((tmp_path / "found.json").read_text())["steps"]
    assert any("1 passed" in line for line in steps["parity"]["said"])  # a warning may be written behind it
    assert steps["0.5b"]["numbers"]["results"]["shapes"]["dry"]["modes"]["hf_zero-3"]["tokens_per_second"] > 0
    assert steps["bus"]["numbers"]["results"]["bus"]["up_nbytes_per_second"] > 0


def test_a_step_that_it_does_not_know_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--steps", "check,12b"])
    assert "--steps: '12b' is not one of smoke, check, parity, 0.5b" in capsys.readouterr().err
