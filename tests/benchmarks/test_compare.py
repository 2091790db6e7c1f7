"""The programs end to end, at a size that says nothing about speed."""

import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import compare, hosts
from benchmarks.gpu import parse_arguments, peak_tflops
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


def has_hf_zero() -> bool:
    spec = importlib.util.find_spec("hf_zero")
    return spec is not None and spec.origin is not None


@pytest.mark.full("slow")
@pytest.mark.timeout(180)
def test_compare_measures_every_mode_and_they_train_alike(tmp_path):
    modes = ["ddp", "fsdp2"] + (["hf_zero-1", "hf_zero-3"] if has_hf_zero() else [])
    path = tmp_path / "out.json"
    arguments = ["--smoke", "--modes", ",".join(modes), "--json", str(path)]
    done = run_here(compare.main, *arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    summary = report["results"]["fp32"]["summary"]
    assert list(summary) == modes
    for name in modes:
        assert f"| {name} " in done.stdout
        assert summary[name]["loss_difference"] <= 1e-5
        assert 0 < summary[name]["rest_nbytes"] <= summary[name]["peak_nbytes"]
        assert summary[name]["wire_nbytes"] > 0
        assert summary[name]["ratios"].keys() == {"ddp", "fsdp2"} - {name}
    # FSDP2 holds half of what DDP holds beside its gradient buckets: 16/2 against 16 bytes a parameter.
    assert summary["fsdp2"]["rest_nbytes"] < 0.5 * summary["ddp"]["rest_nbytes"]
    assert report["machine"]["versions"]["torch"]


def test_compare_refuses_a_mode_that_it_does_not_know():
    done = run_here(compare.main, "--modes", "ddp,fsdp3")
    assert done.returncode == 2
    assert "unknown mode 'fsdp3'; the modes are plain" in done.stderr


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
    largest = report["results"]["largest"]
    assert largest["offload"]["layers"] > largest["device"]["layers"] > 0
    assert largest["offload"]["best"]["result"]["host_nbytes"] > 0
    assert report["results"]["bus"]["up_nbytes_per_second"] > 0
    assert "## dry-pure: 0.00 B, pure-bf16" in done.stdout
    assert done.stdout.count("| plain (no communication) ") == 2 and "no MFU" in done.stdout


@pytest.mark.parametrize("name, tflops", [("L40", 181), ("A10G", 70), ("H100 PCIe", 756), ("H100 NVL", 835)])
def test_mfu_is_of_the_very_device(name, tflops):
    assert peak_tflops(f"NVIDIA {name}, 45 GiB, CUDA 12.8") == tflops


def test_gpu_program_refuses_a_part_that_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--dry", "--parts", "shapes,larger"])
    assert "--parts: 'larger' is not one of shapes, bus, largest" in capsys.readouterr().err


@pytest.mark.full("slow")
@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_hosts_are_compared_and_what_leaves_them_is_counted(tmp_path):
    path = tmp_path / "out.json"
    modes = "ddp,fsdp2-hybrid,hf_zero-3,hf_zero-3@shard_size=auto"
    done = run_here(hosts.main, "--smoke", "--rates", "1gbit", "--modes", modes, "--json", str(path))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"].values()
    sent = {mode: raw["bytes"][0]["left_host_nbytes"] for mode, raw in result["raw"].items()}
    # one all-reduce of gradients instead of two gathers and a reduction
    assert sent["hf_zero-3@shard_size=auto"] < 0.75 * sent["hf_zero-3"]
    assert all(summary["loss_difference"] < 1e-4 for summary in result["summary"].values())
    assert "MiB sent by a host" in done.stdout and "## 1gbit, fp32: smoke" in done.stdout
