"""A process whose hub is the one of the tests: the client's settings are read once, at import.

It serves many tests, since importing transformers takes longer than most of them. Run as a module it answers jobs, one
JSON line each, until its input ends.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


ROOT = Path(__file__).parents[1]
DROPPED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "RANK", "LOCAL_RANK", "WORLD_SIZE")


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """Of a process whose hub is `endpoint`, with a cache and a login of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    return {
        **kept,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }


def kill(process: subprocess.Popen) -> None:
    """Ends a process that leads its own group, and the group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class HubClient:
    """The tests' end of the process.

    Args:
        endpoint (`str`): of the hub.
        home (`Path`): for its cache.
    """

    def __init__(self, endpoint: str, home: Path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tests.hub_client"]
        self._process = subprocess.Popen(command, env=environment(endpoint, home), start_new_session=True, **pipes)

    def call(self, job: str, *args: str, endpoint: str | None = None, timeout: float = 150.0) -> dict:
        """Runs one of the functions below; a process that does not answer in time is killed."""
        timer = threading.Timer(timeout, kill, [self._process])
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"job": job, "args": args, "endpoint": endpoint}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        assert line, f"{job} {args}: no answer within {timeout} s"
        return json.loads(line)

    def close(self) -> None:
        kill(self._process)


def recipes(*argv: str) -> dict:
    """The command line, its exit code and what it says."""
    from hf_zero.recipes.cli import main
    from tests.output import without_imports

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(argv))
    return {"code": code, "out": out.getvalue(), "err": without_imports(err.getvalue())}


def differences(near: str, far: str, revision: str, cache: str, subfolder: str) -> dict:
    """What a user with an empty cache gets by name, compared with a folder tensor by tensor."""
    import torch
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(near).state_dict()
    model = AutoModelForCausalLM.from_pretrained(far, revision=revision, cache_dir=cache, subfolder=subfolder)
    found = model.state_dict()
    different = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    return {"tensors": len(expected), "different": different + sorted(set(found) - set(expected))}


def _serve() -> None:
    from huggingface_hub import constants

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no answer
    endpoint = constants.ENDPOINT
    for line in sys.stdin:
        job = json.loads(line)
        constants.ENDPOINT = job["endpoint"] or endpoint
        answer = {"recipes": recipes, "differences": differences}[job["job"]](*job["args"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
