"""`check`: a machine that is right passes, and one that is not is said to be wrong, with what is."""

import os
import time
import warnings
from pathlib import Path

import pytest
import torch

from hf_zero.comm import Comm, Pending, shared
from hf_zero.recipes import check
from hf_zero.recipes.check import FAILED, OK, PAGE_NAME, SKIPPED, Probes
from hf_zero.recipes.cli import main
from tests import loopback
from tests.distributed import start_ranks


VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")  # which `check` sets
STAGES = ["stage 0", "stage 1", "stage 2", "stage 3"]
NAMES = [*STAGES, "save, load, resume", "offload optimizer", "offload params", "copies in memory"]


@pytest.fixture
def in_this_process(monkeypatch):
    """One process alone is this one, so that a test can break what it tries."""
    monkeypatch.setattr(check, "ON_CPU_NBYTES", 2**20)
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
    assert list(found) == [*NAMES[:-1], "all-gather", "reduce-scatter", NAMES[-1]]
    assert all(status == OK for status, _ in found.values())
    assert "bit-equal to stage 0, agrees with plain torch" in found["stage 3"][1]
    assert "GB/s" in found["copies in memory"][1] and "through shared memory" in found["all-gather"][1]
    assert "nothing wrong was found" in output
    page = (tmp_path / PAGE_NAME).read_text(encoding="utf-8")
    assert all(line in page for line in output.splitlines() if line.startswith(OK))


def _leaves_a_rank_out(self, full, out):
    return self._copies("reduce", full, lambda fulls: out.copy_(fulls[0].chunk(self.num_ranks)[self.rank]))


def _leaves_a_half_out(self, full, out, **_):
    out.copy_(full / 2)
    return Pending()


def test_one_process_trains_as_one_of_several_and_a_wrong_sum_is_found(in_this_process, capsys, monkeypatch):
    assert main(["check", "--use_cpu", "--num_processes", "1"]) == 0
    assert {name: status for name, (status, _) in results(capsys.readouterr().out).items()} == dict.fromkeys(NAMES, OK)
    monkeypatch.setattr(Comm, "reduce_scatter", _leaves_a_half_out)
    assert main(["check", "--use_cpu", "--num_processes", "1"]) == 1
    captured = capsys.readouterr()
    found = results(captured.out)
    for stage in STAGES:
        assert found[stage][0] == FAILED and "differs from plain torch by" in found[stage][1]
    assert found["copies in memory"][0] == OK, "the others run all the same"
    assert "do not trust this machine with a run" in captured.out
    assert captured.err.startswith("hf-zero: check: stage 0, stage 1, stage 2, stage 3")


@pytest.mark.parametrize(
    "measure, broken, wrong",
    [
        (Probes.gather_rate, "_collect", lambda self, full, shard: Pending(_Event().wait)),
        (Probes.reduce_rate, "_sum", _leaves_a_rank_out),
    ],
)
def test_large_messages_that_arrive_wrong_are_found(monkeypatch, measure, broken, wrong):
    monkeypatch.setattr(check, "ON_CPU_NBYTES", 2**20)
    cpu = torch.device("cpu")

    def measured(comm: Comm) -> str:
        probes = Probes.__new__(Probes)
        probes.comm, probes.device, probes.is_alone = comm, cpu, False
        return measure(probes)

    assert all("GB/s received" in rate for rate in loopback.run_loopback(2, measured, cpu))
    monkeypatch.setattr(loopback.LoopbackComm, broken, wrong)
    with pytest.raises(check.Wrong, match="the received values are wrong"):
        loopback.run_loopback(2, measured, cpu)


def hanging_rank(folder: str) -> None:
    """A process whose probes do not come to an end."""
    check._check = lambda *_: time.sleep(60)
    check.DEADLINE_SECONDS = 0.1
    os.dup2(os.open(Path(folder, os.environ["RANK"]), os.O_WRONLY | os.O_CREAT), 2)
    check.run(check.Arguments(use_cpu=True))


def test_processes_that_hang_end_themselves_and_show_where(tmp_path):
    for rank, process in enumerate(start_ranks(hanging_rank, 2, str(tmp_path))):
        process.join(30)
        process.kill()
        assert process.exitcode == 1
        assert "in hanging_rank" in (tmp_path / str(rank)).read_text()


class _Event:
    def wait(self) -> None:
        pass


def average_without_the_last(summands, out, scratch, accumulate):
    out.copy_(summands[0])


def broken_sum(*args):
    """What the processes of a broken installation do."""
    shared.average = average_without_the_last
    return RIGHT(*args)


def broken_rank(*args):
    """One of the processes ends in its first probe."""
    if os.environ["RANK"] == "1":
        Probes.stage = lambda self, stage: os._exit(9)
    return RIGHT(*args)


RIGHT = check.check


@pytest.mark.full("slow")
@pytest.mark.parametrize("function, said", [(broken_sum, "stage 0"), (broken_rank, "rank 1 ")])
def test_processes_that_are_broken_are_found(capfd, monkeypatch, function, said):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check, "check", function)
    assert main(["check", "--use_cpu", "--num_processes", "2"]) == 1
    captured = capfd.readouterr()
    assert said in captured.err, captured.err
    if function is broken_sum:
        assert results(captured.out)["stage 0"][1].startswith("rank 0: ")


@pytest.mark.quick
@pytest.mark.parametrize(
    "argv, said",
    [
        (["--num_processes", "0"], "--num_processes 0: expected 1 or more"),
        (["--output_dir", "/dev/null/there"], "output_dir '/dev/null/there': /dev/null is not writable ("),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(capsys, argv, said):
    assert main(["check", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"hf-zero: {said}") and captured.err.count("\n") == 1
    assert not captured.out
