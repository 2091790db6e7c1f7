"""`env` and `list`: facts of this machine and this repository, whatever is installed."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

import hf_zero
from hf_zero.recipes import env
from hf_zero.recipes.cli import main


ROOT = Path(__file__).parents[2]


@pytest.mark.quick
def test_env_says_versions_devices_memory_and_disk(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert facts["torch"] == metadata.version("torch")
    assert facts["hf_zero"].startswith(metadata.version("hf-zero"))
    assert facts["OMP_NUM_THREADS"] == "3"
    assert "hf_secret" not in output
    assert re.fullmatch(r"[\d.,]+ [MGT]iB free of [\d.,]+ [GT]iB", facts["memory"])
    assert re.search(r"^disk here +[\d.,]+ [MGT]iB free", output, re.MULTILINE)
    assert torch.accelerator.is_available() or facts["backend"] == "gloo"


def test_env_says_why_a_device_does_not_tell_its_memory(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error:\ndriver is broken")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    modules = iter([SimpleNamespace(__name__="torch.mps"), SimpleNamespace(mem_get_info=fail)])
    monkeypatch.setattr(torch, "get_device_module", lambda device: next(modules))
    facts = dict(env.facts())
    assert "mem_get_info" in facts["device 0"] and facts["device 0"].startswith("mps:0: ")
    assert facts["device 1"] == "mps:1: CUDA error: driver is broken"
    assert "memory" in facts


def test_env_prints_shared_memory_only_where_there_is_some(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "SHARED_MEMORY", tmp_path / "shm")
    assert "shared memory" not in dict(env.facts())
    (tmp_path / "shm").mkdir()
    assert "shared memory" in dict(env.facts())


def test_env_names_what_is_missing_and_how_to_get_it(monkeypatch):
    """As if none of the extras were installed, and torch were an old one."""
    extras = {"peft", "trl", "bitsandbytes"}
    real = metadata.version

    def version(name: str) -> str:
        if name in extras:
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "torch" else real(name)

    monkeypatch.setattr(env.metadata, "version", version)
    missing = dict(env.facts())["missing"]
    assert "torch (pip install hf-zero)" in missing
    assert "peft (pip install 'hf-zero[peft]')" in missing
    assert "trl (pip install 'hf-zero[trl]')" in missing
    assert missing.count("peft (") == 1, "several extras need it"
    assert "peft" not in dict(env.facts())


def test_a_copy_of_the_repository_that_nobody_has_installed_says_its_versions_too(monkeypatch):
    real = metadata.requires

    def requires(name: str):
        if name == env.DISTRIBUTION:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(env.metadata, "requires", requires)
    facts = dict(env.facts())
    assert facts["hf_zero"].startswith(f"{hf_zero.__version__} (")
    assert facts["torch"] == metadata.version("torch")
    assert facts["transformers"] == metadata.version("transformers")


@pytest.mark.full("slow")
def test_env_runs_without_any_extra():
    """In a process in which nothing but what hf_zero itself needs can be imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {Requirement(text).name for text in project["dependencies"]}
    extras = {Requirement(text).name for texts in project["optional-dependencies"].values() for text in texts}
    absent = sorted(extras - needed - {env.DISTRIBUTION})
    assert {"peft", "trl"} <= set(absent)
    script = (
        "import sys\n"
        f"for name in {absent!r}: sys.modules.setdefault(name.replace('-', '_'), None)\n"
        "from hf_zero.recipes.cli import main\n"
        "raise SystemExit(main(['env']))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "\nmissing " in result.stdout
