"""`check`: a machine that is right passes, and one that is not is said to be wrong, with what is."""

import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_zero.comm import Comm, Pending, shared
from hf_zero.comm.distributed import LAUNCH_ORDER
from hf_zero.recipes import check, probed_ranks, probes
from hf_zero.recipes.check import PAGE_NAME
from hf_zero.recipes.cli import main
from hf_zero.recipes.probed_ranks import FAILED, OK, SKIPPED, Ranks
from tests import loopback
from tests.distributed import start_ranks


VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", LAUNCH_ORDER)  # which `check` sets
NAMES = ["stage 0", "stage 1", "stage 2", "stage 3", "stages in bf16", "save, load, resume", "offload optimizer"]
NAMES += ["offload params", "one rank", "shard groups", "shared sequences", "chunked loss", "tiled MLPs"]
NAMES += ["activations on the host", "values in 8 bits", "all-gather", "reduce-scatter", "shared memory"]
NAMES += ["host to device", "device to host", "copies in memory"]


@pytest.fixture
def in_this_process(monkeypatch):
    """One process alone is this one, so that a test can break what it tries."""
    monkeypatch.setattr(check, "launch", lambda num_processes, function, *args: function(*args))
    monkeypatch.setattr(probed_ranks, "ON_CPU_NBYTES", 2**20)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    with warnings.catch_warnings():
        yield
    torch.use_deterministic_algorithms(False)


def results(output: str) -> dict[str, tuple[str, str]]:
    """Of each probe what became of it, and what was found."""
    lines = [line for line in output.splitlines() if line[:8].strip() in (OK, FAILED, SKIPPED)]
    return {line[8:].partition(": ")[0]: (line[:8].strip(), line.partition(": ")[2]) for line in lines}


@pytest.mark.full("slow")
def test_two_processes_pass(capfd, tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert main(["check", "--use_cpu", "--output_dir", str(tmp_path)]) == 0
    output = capfd.readouterr().out
    found = results(output)
    assert list(found) == NAMES
    assert {name for name, (status, _) in found.items() if status != OK} == {
        "one rank",
        "host to device",
        "device to host",
    }
    assert "bit-equal to stage 0, agrees with plain torch" in found["stage 3"][1]
    assert found["shard groups"][1].endswith("(--zero_shard_size 1)")
    assert "GB/s" in found["shared memory"][1] and "through shared memory" in found["all-gather"][1]
    assert "nothing wrong was found" in output and "bug report" not in output
    page = (tmp_path / PAGE_NAME).read_text(encoding="utf-8")
    assert "probes of a machine" in page and "<td>stage 3</td><td>ok</td>" in page
    assert f"hf-zero check --use_cpu --output_dir {tmp_path}" in page


@pytest.mark.full("more cases")
def test_one_process_trains_as_one_of_several(in_this_process, capsys):
    assert main(["check", "--use_cpu", "--num_processes", "1"]) == 0
    found = results(capsys.readouterr().out)
    assert list(found) == NAMES
    assert found["one rank"][0] == found["stage 3"][0] == OK
    assert {found[name][0] for name in ("shard groups", "shared sequences", "values in 8 bits")} == {SKIPPED}
    assert found["all-gather"] == (SKIPPED, "one process has nobody to exchange with")


def _leaves_a_rank_out(self, full, out):
    return self._copies("reduce", full, lambda fulls: out.copy_(fulls[0].chunk(self.num_ranks)[self.rank]))


def _leaves_a_half_out(self, full, out, **_):
    out.copy_(full / 2)
    return Pending()


def test_a_wrong_sum_is_found(in_this_process, capsys, monkeypatch):
    monkeypatch.setattr(Comm, "reduce_scatter", _leaves_a_half_out)
    assert main(["check", "--use_cpu", "--num_processes", "1"]) == 1
    captured = capsys.readouterr()
    found = results(captured.out)
    for stage in range(4):
        status, text = found[f"stage {stage}"]
        assert status == FAILED and "differs from plain torch by" in text
    assert found["copies in memory"][0] == OK, "the others are tried all the same"
    assert "do not trust this machine with a run" in captured.out
    (line,) = [line for line in captured.out.splitlines() if line.startswith("for a bug report: ")]
    assert "stage 3: " in line and f"torch {torch.__version__}" in line
    assert captured.err.startswith("hf-zero: check: ") and "stage 0, stage 1" in captured.err


@pytest.mark.parametrize(
    "measure, broken, wrong",
    [
        (probed_ranks.gather_rate, "_collect", lambda self, full, shard: Pending(_Event().wait)),
        (probed_ranks.reduce_rate, "_sum", _leaves_a_rank_out),
    ],
)
def test_large_messages_that_arrive_wrong_are_found(monkeypatch, measure, broken, wrong):
    monkeypatch.setattr(probed_ranks, "ON_CPU_NBYTES", 2**20)
    cpu = torch.device("cpu")
    assert all(rate > 0 for rate in loopback.run_loopback(2, measure, cpu))
    monkeypatch.setattr(loopback.LoopbackComm, broken, wrong)
    with pytest.raises(probed_ranks.Wrong, match=r"values are wrong, the first at \d+: found -?\d.*, expected \d"):
        loopback.run_loopback(2, measure, cpu)


def test_stages_in_bf16_may_differ_by_one_rounding_where_bits_do_not_repeat(monkeypatch):
    def rounds_otherwise(model, job, *args):
        trained = right(model, job, *args)
        return replace(trained, losses=trained.losses * (1 + job.stage * 2.0**-9))

    right = probes.train_job
    monkeypatch.setattr(probes, "train_job", rounds_otherwise)
    monkeypatch.setattr(Ranks, "repeats_bits", False)
    tried = probes.Probes(Ranks("cpu"), None)
    assert "another order of sums" in tried.bf16()
    with pytest.raises(probed_ranks.Wrong, match="losses differs from stage 0"):
        tried.stage(1)


@pytest.mark.quick
def test_a_process_that_sees_one_device_checks_that_one(monkeypatch):
    """As with SLURM's --gpus-per-task=1: the local rank is 3, and the only device is number 0."""
    alone = SimpleNamespace(num_ranks=1)
    backend = SimpleNamespace(device_count=lambda: 1, current_device=lambda: 0)
    monkeypatch.setattr(probed_ranks, "connect", lambda device, **settings: alone)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Ranks("cuda").device == torch.device("cuda", 0)
    assert Ranks("cpu").device == torch.device("cpu")


@pytest.mark.quick
def test_a_check_that_hangs_is_ended_and_its_probe_named(capsys, monkeypatch):
    def hang(num_processes, function, device_type, journal):
        Path(journal).write_text('{"begins": "stage 2"}\n{"name": "stage 2", "sta', encoding="utf-8")  # cut off
        time.sleep(60)

    monkeypatch.setattr(check, "launch", hang)
    monkeypatch.setattr(check, "DEADLINE_SECONDS", 0.1)
    assert main(["check", "--use_cpu"]) == 1
    assert results(capsys.readouterr().out)["stage 2"] == (
        FAILED,
        "not done 0 s after the start of all probes, and ended",
    )


def hanging_rank(folder: str) -> None:
    """A process that a launcher has started, whose probes do not come to an end."""
    check.run_probes = lambda *_: time.sleep(60)
    check.DEADLINE_SECONDS = 0.1
    sys.stderr = Path(folder, os.environ["RANK"]).open("w")
    check.run(check.Arguments(use_cpu=True))


def test_processes_of_a_launcher_that_hang_end_themselves(tmp_path):
    ranks = start_ranks(hanging_rank, 2, str(tmp_path))
    for rank, process in enumerate(ranks):
        process.join(30)
        process.kill()
        assert process.exitcode == 1
        assert "check: not done 0 s after the start of all probes, and ended" in (tmp_path / str(rank)).read_text()


class _Event:
    def wait(self) -> None:
        pass


def average_without_the_last(summands, out, scratch, accumulate):
    out.copy_(summands[0])


def broken_sum(*args):
    """What the processes of a broken installation do."""
    shared.average = average_without_the_last
    return probes.run_probes(*args)


def broken_rank(*args):
    """One of the processes ends in its first probe."""
    if os.environ["RANK"] == "1":
        probes.Probes.stage = lambda self, stage: os._exit(9)
    return probes.run_probes(*args)


@pytest.mark.full("slow")
@pytest.mark.parametrize("function, text", [(broken_sum, "rank 0: "), (broken_rank, "rank 1")])
def test_processes_that_are_broken_are_found(capfd, monkeypatch, function, text):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check, "run_probes", function)
    assert main(["check", "--use_cpu", "--num_processes", "2"]) == 1
    output = capfd.readouterr().out
    failed = {name: found for name, (status, found) in results(output).items() if status == FAILED}
    first = next(iter(failed))
    assert first in ("stage 0", "processes") and text in failed[first]  # it may end before the first probe begins
    assert f"for a bug report: {first}: " in output


@pytest.mark.parametrize("argv, wanted", [(["--sanitize"], "1"), ([], None)])
def test_the_sanitizer_is_on_in_the_processes_that_are_started_and_not_here(tmp_path, monkeypatch, argv, wanted):
    """A device that is said to be there: where torch has no CUDA, a process ends as the sanitizer is switched on."""
    seen = []

    def start(num_processes: int, function, device_type: str, journal: str) -> None:
        command = [sys.executable, "-c", f"import os; print(os.environ.get('{check.SANITIZER}'))"]
        seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        probes._note(journal, {"name": device_type, "status": OK, "text": "nothing was tried"})

    monkeypatch.delenv(check.SANITIZER, raising=False)
    monkeypatch.setattr(check, "_device_type", lambda use_cpu: "cuda")
    monkeypatch.setattr(check, "_num_devices", lambda device_type: 1)
    monkeypatch.setattr(check, "launch", start)
    assert main(["check", *argv]) == 0
    assert seen == [str(wanted)] and check.SANITIZER not in os.environ


@pytest.mark.quick
@pytest.mark.parametrize(
    "argv, said",
    [
        (["--sanitize", "--use_cpu"], "--sanitize: looks for races between streams of CUDA, and the device is cpu"),
        (["--num_processes", "0"], "--num_processes 0: expected 1 or more"),
        (["--output_dir", "/dev/null/there"], "output_dir '/dev/null/there': /dev/null is not a folder; "),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(capsys, argv, said):
    assert main(["check", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"hf-zero: {said}") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.full("slow")
def test_it_needs_no_data_sets():
    """On a machine where torch and transformers are all that there is, and nothing can be installed."""
    script = "import sys; sys.modules['datasets'] = None; import hf_zero.recipes.check, hf_zero.recipes.probes"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
