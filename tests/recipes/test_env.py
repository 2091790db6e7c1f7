"""`env`: facts of this machine, whatever is installed."""

import re
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import hf_zero
from hf_zero.recipes import env
from hf_zero.recipes.cli import main


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
    assert "peft" not in facts


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    real = metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(env.metadata, "version", version)
    assert dict(env.facts())["peft"] == "not installed"
