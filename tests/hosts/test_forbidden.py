"""Where no namespaces can be made, such as in a container without rights, tests of hosts are skipped and say why."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import network


REFUSED = "unshare: unshare failed: Operation not permitted"


@pytest.fixture
def forbidden(tmp_path, monkeypatch) -> None:
    """A machine whose kernel refuses namespaces, whatever this one does."""
    program = tmp_path / "unshare"
    program.write_text(f"#!/bin/sh\necho '{REFUSED}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_what_is_missing_is_said(forbidden, tmp_path, monkeypatch):
    if all(map(shutil.which, ("nsenter", "ip", "tc"))):
        assert network.missing.__wrapped__() == f"no namespaces: {REFUSED}"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network.missing.__wrapped__() == "there is no program 'nsenter'"


@pytest.mark.full("slow")
def test_where_namespaces_are_forbidden_every_test_of_hosts_is_skipped_with_the_reason(forbidden):
    modules = [str(path) for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tier=all", *modules]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith(f"no namespaces: {REFUSED}") for line in skipped), skipped
    assert modules and all(any(Path(module).name in line for line in skipped) for module in modules), skipped
    assert "passed" not in done.stdout.splitlines()[-1]
