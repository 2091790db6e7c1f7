"""The files of recipes/launchers/: what starts a recipe on several machines can be parsed, and starts what it says."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from torch.distributed.run import get_args_parser

from hf_zero.accelerator.environment import LAUNCHER_VARIABLES
from hf_zero.recipes import launch
from hf_zero.recipes.parser import ready_made
from tests.recipes.ranks import logged, run_on_ranks


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "launchers"
# What the cluster tells each machine, or its first task.
CLUSTER = {
    **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
    **{"SKYPILOT_TASK_ID": "sky-1", "SKYPILOT_NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    **{"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "41234", "SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "8"},
}
# In place of the programs: each says how it was called. Slurm's starts two of its tasks.
PROGRAMS = {
    "torchrun": 'printf "%s\\n" "$@"',
    "python": 'printf "%s " "$RANK" "$LOCAL_RANK" "$WORLD_SIZE" "$MASTER_ADDR" "$MASTER_PORT" "$@"; echo',
    "scontrol": "printf 'node1\\nnode2\\n'",
    "srun": 'shift; for n in 0 9; do SLURM_PROCID=$n SLURM_LOCALID=$((n % 8)) "$@"; done',
}


@pytest.fixture
def said(tmp_path):
    """Returns what the programs say that a line of shell starts."""
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(argv: list[str]) -> list[str]:
        env = {**CLUSTER, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", *argv], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.splitlines()

    return run


def _is_of_sixteen_ranks(argv: list[str]) -> None:
    """Whether this is torchrun for two machines, with their first as the meeting point, and a recipe that exists."""
    told = get_args_parser().parse_args(argv)
    assert (told.nnodes, told.nproc_per_node) == ("2", "8")
    assert (told.rdzv_backend, told.rdzv_endpoint) == ("c10d", "10.0.0.1:29500") and told.rdzv_id != "none"
    assert told.module and told.training_script == "hf_zero.recipes"
    _names_a_recipe(told.training_script_args)


@pytest.mark.parametrize("file", ["slurm.sh", "kubernetes.yaml", "skypilot.yaml"])
def test_each_lets_nccl_order_launches(file):
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" in (FOLDER / file).read_text()


def test_the_launcher_warns_of_more_processes_than_cores(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2), raising=False)
    for num_processes, warning in ((2, ""), (16, "hf-zero: --num_processes 16: they share 2 cores\n")):
        launch._set_environment(num_processes)
        assert capsys.readouterr().err == warning


def _names_a_recipe(argv: list[str]) -> None:
    assert argv[0] == "sft" and argv[argv.index("--config") + 1] in ready_made()


def test_the_manifest_for_kubernetes_starts_torchrun_on_each_machine(said):
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["kind"], job["apiVersion"]) == ("PyTorchJob", "kubeflow.org/v1")
    assert sum(each["replicas"] for each in replicas.values()) == 2
    for each in replicas.values():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        _is_of_sixteen_ranks(said([*container["command"][1:], *container["args"]]))


def test_the_task_for_skypilot_starts_torchrun_on_each_machine(said):
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"].endswith(":8")
    _is_of_sixteen_ranks(said(["-c", task["run"]]))


def test_the_script_for_slurm_tells_each_task_its_rank(said):
    script = FOLDER / "slurm.sh"
    example = next(line for line in script.read_text().splitlines() if line.startswith("#   sbatch"))
    _, _, *argv = example.removeprefix("#").split()
    _names_a_recipe(argv)
    lines = said([str(script), *argv, "--title", "two words"])
    for line, ranks in zip(lines, ("0 0 16", "9 1 16"), strict=True):
        assert line.strip() == f"{ranks} node1 21234 -m hf_zero.recipes {' '.join(argv)} --title two words"


def _started_by_ray(argv: list[str], folder: Path, *own: str) -> subprocess.Popen:
    """Starts a recipe in two workers of a Ray cluster of its own."""
    pytest.importorskip("ray.train", reason="ray is not installed; install the extra `ray`")
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(FOLDER / "ray_train.py"), "--num_workers=2", *own, *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def _settings(tiny_model, csv_file, **own) -> list[str]:
    settings = {"model_name_or_path": tiny_model, "train_file": csv_file, "zero_stage": 3, "logging_steps": 1}
    settings |= {"save_strategy": "no", "report_to": "none", "learning_rate": 5e-3, **own}
    return ["classify", "--use_cpu", *(f"--{name}={value}" for name, value in settings.items())]


@pytest.mark.full("slow")
def test_ray_goes_on_where_a_worker_was_killed(tiny_model, csv_file, tmp_path):
    argv = _settings(tiny_model, csv_file, max_steps=60, save_strategy="steps", save_steps=10)
    own = tmp_path / "of_ray"
    run = _started_by_ray([*argv, f"--output_dir={own}"], tmp_path, "--max_failures=1")
    deadline = time.monotonic() + 200
    while not (own / "checkpoint-10").exists():
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.02)
    workers = [each for each in psutil.Process(run.pid).children(recursive=True) if "TrainWorker" in each.name()]
    assert len(workers) == 2
    workers[1].kill()
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert [each.code for each in run_on_ranks([*argv, f"--output_dir={tmp_path / 'of_torch'}"], tmp_path)] == [0, 0]
    losses, expected = (logged(tmp_path / name, "loss") for name in ("of_ray", "of_torch"))
    assert len(losses) == 60 and losses == expected
