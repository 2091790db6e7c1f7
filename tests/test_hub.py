"""Pushing and loading through the real client, against a hub on loopback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.hub_server import HubServer


TIMEOUT = 120
TOKEN = "hf_alice"
ROOT = Path(__file__).parents[1]
SAME = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
near = AutoModelForCausalLM.from_pretrained(sys.argv[1]).state_dict()
far = AutoModelForCausalLM.from_pretrained(sys.argv[2], revision=sys.argv[3]).state_dict()
assert near.keys() == far.keys() and all(torch.equal(near[name], far[name]) for name in near)
print(len(near), "tensors are the same")
"""


@pytest.fixture
def hub():
    with HubServer({TOKEN: "alice", "hf_bob": "bob"}) as server:
        yield server


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """Of a process whose hub is `endpoint`, and whose cache is empty."""
    dropped = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        **kept,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }


def finish(process: subprocess.Popen, timeout: float = TIMEOUT) -> subprocess.CompletedProcess:
    """Waits for a process that leads its own group; the group is killed when it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(argv: list[str], env: dict[str, str]) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *argv], env=env, start_new_session=True, **pipes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small language model in several files, with its tokenizer and what a run leaves beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run") / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).save_pretrained(
        folder, max_shard_size="12KB"
    )
    for name in ("zero/optimizer.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "_notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"state of a run")
    (folder / "zero" / "optimizer.safetensors").unlink()
    (folder / "trainer_state.json").write_text(
        '{"global_step": 7, "log_history": [{"eval_loss": 1.25}, {"train_runtime": 3.5, "train_loss": 2.0}]}',
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def push(hub, folder, tmp_path):
    """Runs `recipes push`; the last line of stderr must be the only one of ours."""

    def call(*flags: str, token: str = TOKEN, endpoint: str | None = None) -> subprocess.CompletedProcess:
        argv = ["-m", "hf_zero.recipes", "push", str(folder), "--hub_model_id=alice/model", f"--token={token}", *flags]
        result = finish(start(argv, environment(endpoint or hub.url, tmp_path / "home")))
        ours = [line for line in result.stderr.splitlines() if line.startswith("hf_zero.recipes: ")]
        assert len(ours) == (0 if result.returncode == 0 else 1), result.stderr
        assert "Traceback" not in result.stderr
        return result

    return call


def same(hub: HubServer, folder: Path, home: Path, revision: str = "main") -> None:
    """A user with an empty cache gets the folder's tensors by the name of the repository."""
    env = environment(hub.url, home)
    result = finish(start(["-c", SAME, str(folder), "alice/model", revision], env))
    assert result.returncode == 0, result.stderr
    assert "tensors are the same" in result.stdout


def test_what_is_pushed_is_what_from_pretrained_gets(hub, push, folder, tmp_path):
    result = push()
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{hub.url}/alice/model\n"
    files = hub.repos["alice/model"].files()
    assert set(files) == {
        *(path.name for path in folder.glob("model*")),
        *("config.json", "generation_config.json", "README.md", "trainer_state.json"),
    }
    for path in folder.glob("*.safetensors"):
        assert files[path.name].content == path.read_bytes()
    assert hub.count("PUT", "/part/") >= 4  # files of 12 kB in parts of 4 kB
    assert not hub.repos["alice/model"].private
    card = files["README.md"].content.decode()
    assert "hf_zero" in card and "| optimizer steps | 7 |" in card and "| eval_loss | 1.25 |" in card
    same(hub, folder, tmp_path / "other")


def test_a_second_push_leaves_no_weights_of_the_first(hub, push, folder, tmp_path):
    assert push().returncode == 0
    repo = hub.repos["alice/model"]
    old = (
        {**repo.files(), "model.safetensors": repo.files()["model-00001-of-00002.safetensors"]}
        if ("model-00001-of-00002.safetensors" in repo.files())
        else {
            **repo.files(),
            "model.safetensors": next(b for n, b in repo.files().items() if n.endswith("safetensors")),
        }
    )
    repo.commit("main", old, "an older model in a single file")
    assert push("--commit_message=again").returncode == 0
    assert "model.safetensors" not in repo.files()
    assert repo.messages[-1] == "again"
    same(hub, folder, tmp_path / "other")


def test_a_private_repository_and_a_branch_are_made(hub, push, folder, tmp_path):
    result = push("--private", "--revision=trial")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{hub.url}/alice/model/tree/trial\n"
    repo = hub.repos["alice/model"]
    assert repo.private
    assert not repo.files("main")
    assert "config.json" in repo.files("trial")


@pytest.mark.parametrize(
    ("token", "message"),
    [("hf_mallory", "answered 401"), ("hf_bob", "answered 403")],
)
def test_a_token_that_is_wrong_is_one_line(hub, push, token, message):
    result = push(token=token)
    assert result.returncode == 1
    assert message in result.stderr
    assert "token" in result.stderr
    assert not hub.repos


def test_a_hub_that_is_not_there_is_one_line(push):
    result = push(endpoint="http://127.0.0.1:9")  # the discard port: nobody listens
    assert result.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in result.stderr


def test_a_name_that_no_host_has_is_one_line(push):
    result = push(endpoint="http://no-such-host.invalid")
    assert result.returncode == 1
    assert "http://no-such-host.invalid cannot be reached" in result.stderr


@pytest.mark.parametrize("kind", ["create", "upload", "commit"])
def test_a_connection_that_breaks_is_tried_again(hub, push, folder, tmp_path, kind):
    hub.drops[kind] = 2
    result = push()
    assert result.returncode == 0, result.stderr
    assert hub.drops[kind] == 0
    files = hub.repos["alice/model"].files()
    for path in folder.glob("*.safetensors"):
        assert files[path.name].content == path.read_bytes()


@pytest.mark.parametrize("kind", ["create", "batch", "commit"])
def test_a_server_that_has_no_time_is_asked_again(hub, push, kind):
    hub.refusals[kind] = 1
    result = push()
    assert result.returncode == 0, result.stderr
    assert hub.refusals[kind] == 0


def test_a_connection_that_always_breaks_is_one_line(hub, push):
    hub.drops["create"] = 100
    result = push()
    assert result.returncode == 1
    assert "cannot be reached or broke off" in result.stderr
    assert hub.drops["create"] == 97  # three attempts


def test_a_folder_that_is_not_whole_is_not_pushed(hub, folder, tmp_path):
    import shutil

    broken = shutil.copytree(folder, tmp_path / "broken")
    path = next(broken.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    argv = ["-m", "hf_zero.recipes", "push", str(broken), "--hub_model_id=alice/model", f"--token={TOKEN}"]
    result = finish(start(argv, environment(hub.url, tmp_path / "home")))
    assert result.returncode == 1
    assert "truncated" in result.stderr
    assert not hub.requests


def test_the_server_serves_ranges(hub, push, folder):
    import urllib.request

    assert push().returncode == 0
    path = next(folder.glob("*.safetensors"))
    url = f"{hub.url}/alice/model/resolve/main/{path.name}"
    request = urllib.request.Request(url, headers={"Range": "bytes=8-"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        assert answer.status == 206
        assert answer.read() == path.read_bytes()[8:]
    assert load_file(path)
