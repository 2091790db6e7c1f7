"""One signal saves and stops, two end a process; and ranks end with their launcher."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest
from transformers import TrainerCallback

from hf_zero import ZeroAccelerator, ZeroTrainingArguments, parent
from hf_zero.accelerator import accelerator
from hf_zero.parent import end_with_launcher
from hf_zero.recipes import cli
from hf_zero.trainer import arguments, signals
from hf_zero.trainer import trainer as trainer_module
from hf_zero.trainer.signals import Stopped
from tests.compare import assert_equal
from tests.distributed import RemoteError, run_ranks, start_program
from tests.output import logged
from tests.trainer.harness import reset_accelerate, train


class Send(TrainerCallback):
    """Sends signals to one rank in the fourth step."""

    def __init__(self, number: int, sender: int, times: int):
        self.number, self.sender, self.times = number, sender, times

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == self.sender:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def _is_stopped(folder: str, number: int, sender: int, times: int) -> tuple:
    settings = {"max_steps": 6, "zero_async_save": bool(sender)}
    whole = train(3, f"{folder}/whole", **settings)
    together = mock.patch.object(signals, "TOGETHER_SECONDS", 10.0)
    with together, logged("hf_zero.trainer.signals") as said, pytest.raises(Stopped) as stopped:
        train(3, f"{folder}/stopped", parts={"callbacks": [Send(number, sender, times)]}, **settings)
    assert_equal(train(3, f"{folder}/stopped", resume=True, **settings), whole, "resumed and unbroken")
    return stopped.value.code, said


@pytest.mark.parametrize("number, sender, times", [(signal.SIGTERM, 1, 2), (signal.SIGUSR1, 0, 1)])
@pytest.mark.full("more cases", after=1)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_bit_for_bit(tmp_path, number, sender, times):
    """A signal that comes again at once, as through a launcher, is one."""
    found = run_ranks(_is_stopped, 2, str(tmp_path), number, sender, times)
    assert [code for code, _ in found] == [128 + number] * 2
    assert found[0][1][0].startswith(f"{number.name}: saved {tmp_path}/stopped/checkpoint-4 at step 4; continue with")
    assert not found[1][1] and [path.name for path in (tmp_path / "stopped").iterdir()] == ["checkpoint-4"]


def _is_ended(folder: str) -> None:
    with mock.patch.object(signals, "TOGETHER_SECONDS", -1.0):
        train(3, folder, max_steps=6, parts={"callbacks": [Send(signal.SIGTERM, 0, 2)]})


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    with pytest.raises(RemoteError, match="the process ended"):
        run_ranks(_is_ended, 1, str(tmp_path))
    assert not list(tmp_path.glob("checkpoint-*"))


def _receive_before_the_first_step(folder: str) -> int:
    train(3, folder, max_steps=1, save_strategy="steps", save_steps=1)

    def look_through(_):
        os.kill(os.getpid(), signal.SIGTERM)
        return f"{folder}/checkpoint-1"

    with mock.patch.object(trainer_module, "chosen", look_through):
        try:
            train(3, folder, max_steps=4, resume=True)
        except Stopped as stopped:
            return stopped.code
    return 0


def test_a_signal_that_comes_while_checkpoints_are_looked_through_stops_after_the_first_step(tmp_path):
    assert run_ranks(_receive_before_the_first_step, 1, str(tmp_path)) == [128 + signal.SIGTERM]
    assert (tmp_path / "checkpoint-2").is_dir()


SCRIPT = """
import os, sys, time
from pathlib import Path
from hf_zero.parent import end_with_launcher

end_with_launcher()
Path(sys.argv[1], f"ready{os.environ['RANK']}").touch()
time.sleep(60)
"""


def test_whatever_a_rank_begins_with_binds_it_to_its_launcher(tmp_path, monkeypatch):
    bound = []
    for module in (arguments, accelerator, cli):
        monkeypatch.setattr(module, "end_with_launcher", partial(bound.append, module))
    reset_accelerate()
    ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    ZeroAccelerator(cpu=True)
    reset_accelerate()
    cli.main(["--help"])
    assert bound == [arguments, accelerator, cli]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
@pytest.mark.full("more cases", after=1)
def test_no_rank_outlives_a_torchrun_that_is_killed(tmp_path, number, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    (process,) = start_program([*launcher, "train.py", str(tmp_path)], tmp_path, tmp_path)
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 90
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert process.exitcode is None and time.monotonic() < deadline
            time.sleep(0.01)
        ranks = psutil.Process(process.pid).children()
        os.kill(process.pid, number)
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert len(ranks) == 2 and not alive
    finally:
        process.kill()
        process.join()
        for rank in ranks:
            if rank.is_running():
                rank.kill()


def _ends_forked_from_a_rank() -> int:
    """How a process ends that a rank has forked and that makes arguments of its own."""
    pid = os.fork()
    if pid == 0:
        os.environ["TORCHELASTIC_RUN_ID"] = "inherited"
        end_with_launcher()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_a_rank_has_started_itself_is_left_alone():
    assert run_ranks(_ends_forked_from_a_rank, 1) == [7]


CHILD = """
import runpy, sys, time
runpy.run_path(sys.argv[1])["end_with_launcher"]()
print("ready", flush=True)
sys.stdin.read()
"""
RANK = """
import runpy, subprocess, sys, threading

def start():
    global child
    command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()

runpy.run_path(sys.argv[1])["end_with_launcher"]()
thread = threading.Thread(target=start)
thread.start()
thread.join()
child.communicate()
sys.exit(child.returncode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_process_that_a_thread_of_a_rank_has_started_outlives_the_thread():
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "of the launcher"}
    rank = subprocess.run([sys.executable, "-c", RANK, parent.__file__, CHILD], env=env, timeout=60)
    assert rank.returncode == 0
