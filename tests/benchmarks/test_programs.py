"""The programs end to end, at a size that says nothing about speed."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import checkpoint, compare, hosts, long, offload, try_gpu
from benchmarks.gpu import parse_arguments, peak_tflops
from benchmarks.try_gpu import STEPS, Step
from tests.hosts.network import missing


ROOT = Path(__file__).resolve().parents[2]


def run_module(*arguments: str, timeout: float) -> subprocess.CompletedProcess:
    """Runs `python -m ...` in a process group of its own, which is ended when the time is over."""
    command = [sys.executable, "-m", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_here(main: Callable[[list[str]], int], *arguments: str) -> subprocess.CompletedProcess:
    """Runs a program in this process, whose fork server has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.dict(os.environ):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


# The program, its modes and other arguments.
PROGRAMS = {
    "compare": (compare.main, "ddp,fsdp2,hf_zero-1,hf_zero-3", ""),
    "offload": (
        offload.main,
        "hf_zero-2,hf_zero-2@offload=optimizer,fsdp2-offload",
        "--worlds 2 --threads 1 --dtype bf16",
    ),
    "hosts": (hosts.main, "ddp,fsdp2-hybrid,hf_zero-3,hf_zero-3@shard_size=auto", "--rates 1gbit"),
    "long": (
        long.main,
        "fsdp2,hf_zero-3,hf_zero-3@chunked_loss=on@offload_activations=True@sequence_parallel=2+checkpointing",
        "",
    ),
    "long --times": (long.main, "fsdp2", "--times"),
    "checkpoint": (checkpoint.main, "hf_zero,ddp,fsdp2-full,dcp,dcp-async", ""),
}


@pytest.mark.full("slow")
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_measures_every_mode_and_they_train_alike(tmp_path, name):
    if name == "hosts" and missing() is not None:
        pytest.skip(f"{missing()}")
    main, modes, arguments = PROGRAMS[name]
    path = tmp_path / "out.json"
    done = run_here(main, "--smoke", "--modes", modes, *arguments.split(), "--json", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    (result,) = report["results"].values()
    measured = result.get("summary") or result["counted"] or result["timed"]["32"]
    measured = measured.get("modes", measured)
    assert list(measured) == modes.split(",") and report["machine"]["versions"]["torch"]
    for mode, summary in measured.items():
        assert f"| {mode} " in done.stdout
        # of bf16 and fp32; what is loaded goes on with the losses of the run that saved
        differences = [summary.get("loss_difference", 0.0), *summary.get("checks", {}).values()]
        assert max(differences) <= 1e-3, f"{mode}: {differences}"


@pytest.mark.timeout(240)
@pytest.mark.full("slow")
def test_gpu_program_runs_without_a_gpu(tmp_path):
    path = tmp_path / "gpu.json"
    done = run_module("benchmarks.gpu", "--dry", "--num_processes", "2", "--json", str(path), timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["machine"]["versions"]["torch"] and report["machine"]["gpu"] == "none, run on the CPU"
    for shape in report["results"]["shapes"].values():
        plain, fsdp2, hf_zero = (shape["modes"][name] for name in ("plain", "fsdp2", "hf_zero-3"))
        # each rank of plain torch is alone; the first losses are of the same weights and the same tokens
        assert len(hf_zero["ranks"]) == 2 and hf_zero["tokens_per_second"] > 0
        for peer in (plain, fsdp2):
            assert abs(peer["ranks"][1]["losses"][0] - hf_zero["ranks"][1]["losses"][0]) < 0.05
    assert "## dry-pure: 0.00 B, pure-bf16" in done.stdout
    assert done.stdout.count("| plain (no communication) ") == 2 and "no MFU" in done.stdout


@pytest.mark.parametrize("name, tflops", [("L40", 181), ("A10G", 70), ("H100 PCIe", 756), ("H100 NVL", 835)])
def test_mfu_is_of_the_very_device(name, tflops):
    assert peak_tflops(f"NVIDIA {name}, 45 GiB, CUDA 12.8") == tflops


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
    assert (
        try_gpu.main(["--output", str(tmp_path), "--seconds", "12", "--device", "cpu", "--steps", "well,wrong,late"])
        == 1
    )
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
    assert try_gpu.main(["--output", str(tmp_path), "--seconds", "0", "--steps", "last"]) == 1
    (last,) = json.loads((tmp_path / "found.json").read_text())["steps"].values()
    assert last["end"] == "left out, for want of time"


@pytest.mark.full("slow")
@pytest.mark.timeout(900)
def test_the_program_is_tried_on_a_cpu(tmp_path):
    """All of its steps but `check`, which has tests of its own, and those that are the same on a CPU."""
    assert (
        try_gpu.main(["--output", str(tmp_path), "--device", "cpu", "--seconds", "880", "--steps", "parity,0.5b"]) == 0
    )
    steps = json.loads((tmp_path / "found.json").read_text())["steps"]
    assert any("1 passed" in line for line in steps["parity"]["said"])  # a warning may be written behind it
    assert steps["0.5b"]["numbers"]["results"]["shapes"]["dry"]["modes"]["hf_zero-3"]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    "main, arguments, reason",
    [
        (compare.main, "--modes ddp,fsdp3", "unknown mode 'fsdp3'; the modes are plain"),
        (checkpoint.main, "--modes ddp,fsdp3", "unknown mode 'fsdp3'; the modes are hf_zero"),
        (parse_arguments, "--dry --shapes dry,larger", "--shapes: 'larger' is not one of 0.5b, 1.5b"),
        (long.main, "--sizes huge", "--sizes huge: the sizes are smoke"),
        (long.main, "--dtype both", "--dtype both: one at a time"),
        (try_gpu.main, "--output out --steps check,12b", "--steps: '12b' is not one of smoke, check, parity, 0.5b"),
    ],
)
def test_what_cannot_be_measured_is_refused(main, arguments, reason):
    done = run_here(main, *arguments.split())
    assert done.returncode == 2 and reason in done.stderr
