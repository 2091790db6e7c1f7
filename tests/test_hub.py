"""Pushing and loading through the real client, against a hub on loopback."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.hub_client import HubClient
from tests.hub_server import HubServer


TOKEN = "hf_alice"
NAME = "alice/model"


@pytest.fixture(scope="module")
def server():
    with HubServer({TOKEN: "alice", "hf_bob": "bob"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    client = HubClient(server.url, tmp_path_factory.mktemp("home"))
    yield client
    client.close()


@pytest.fixture
def hub(server):
    """The server, without what earlier tests have left there."""
    server.clear()
    return server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small language model in several files, and what a run leaves beside it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run") / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    model.save_pretrained(folder, max_shard_size="12KB")
    for name in ("zero/state.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "_notes.txt", ".hidden"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"state of a run")
    (folder / "trainer_state.json").write_text(
        '{"global_step": 7, "log_history": [{"eval_loss": 1.25}, {"train_runtime": 3.5, "train_loss": 2.0}]}',
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def push(hub, client, folder):
    """Runs `recipes push`; gives the exit code and what it said: one line when it failed."""

    def call(*flags: str, source=folder, token: str = TOKEN, endpoint: str | None = None) -> tuple[int, str]:
        argv = ("push", str(source), f"--hub_model_id={NAME}", f"--token={token}", *flags)
        answer = client.call("recipes", *argv, endpoint=endpoint)
        assert answer["err"].count("\n") == (0 if answer["code"] == 0 else 1), answer["err"]
        return answer["code"], answer["err"] or answer["out"]

    return call


@pytest.fixture
def assert_same(hub, client, folder, tmp_path):
    def call(revision: str = "main") -> None:
        answer = client.call("differences", str(folder), NAME, revision, str(tmp_path / "cache"), "")
        assert answer == {"tensors": 21, "different": []}

    return call


def assert_weights_are_there(hub: HubServer, folder) -> None:
    files = hub.repos[NAME].files()
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) == 3
    for path in paths:
        assert files[path.name].content == path.read_bytes()


def test_what_is_pushed_is_what_from_pretrained_gets(hub, push, folder, assert_same):
    assert push() == (0, f"{hub.url}/{NAME}\n")
    files = hub.repos[NAME].files()
    described = {"config.json", "generation_config.json", "README.md", "trainer_state.json"}
    assert set(files) == {path.name for path in folder.glob("model*")} | described
    assert_weights_are_there(hub, folder)
    assert not hub.repos[NAME].private
    card = files["README.md"].content.decode()
    assert "- hf_zero" in card and "# model" in card
    assert_same()


def test_a_second_push_leaves_no_weights_of_the_first(hub, push, assert_same):
    assert push()[0] == 0
    repo = hub.repos[NAME]
    some = next(blob for name, blob in repo.files().items() if name.endswith(".safetensors"))
    repo.commit("main", {**repo.files(), "model.safetensors": some}, "an older model in a single file")
    assert push("--commit_message=again")[0] == 0
    assert "model.safetensors" not in repo.files()
    assert repo.messages[-1] == "again"
    assert_same()


def test_a_private_repository_and_a_branch_are_made(hub, push):
    assert push("--private", "--revision=trial") == (0, f"{hub.url}/{NAME}/tree/trial\n")
    repo = hub.repos[NAME]
    assert repo.private
    assert not repo.files("main")
    assert "config.json" in repo.files("trial")


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"token": "hf_mallory"}, 1, ["answered 401", "token"]),
        ({"token": "hf_bob"}, 1, ["answered 403", "token"]),
        ({"endpoint": "http://127.0.0.1:9"}, 1, ["connection to http://127.0.0.1:9 failed ("]),
        ({"endpoint": "http://no-such-host.invalid"}, 1, ["connection to http://no-such-host.invalid failed ("]),
        ({"name": "a/b/c"}, 1, ["user/"]),
        ({"name": "a..b"}, 1, ["user/"]),
        ({"name": ""}, 2, ["user/"]),
        ({"drops": 100}, 1, ["connection to ", " failed ("]),
    ],
    ids=str,
)
def test_what_cannot_be_pushed_is_one_line(hub, push, settings, code, words):
    hub.drops["create"] = settings.get("drops", 0)  # the connection always breaks, and is tried once
    flags = [f"--hub_model_id={settings['name']}"] if "name" in settings else []
    found, said = push(*flags, token=settings.get("token", TOKEN), endpoint=settings.get("endpoint"))
    assert found == code and [word for word in words if word not in said] == []
    assert not hub.repos and hub.drops["create"] == max(0, settings.get("drops", 0) - 1)


def test_a_folder_that_is_not_whole_is_not_pushed(hub, push, folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    path = next(broken.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    code, said = push(source=broken)
    assert code == 1
    assert "truncated" in said
    assert not hub.requests


def test_training_arguments_stay_here(hub, push, folder, tmp_path):
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    torch.save({"hub_token": "hf_secret"}, theirs / "training_args.bin")
    code, said = push(source=theirs)
    assert code == 0
    assert "training_args.bin" not in hub.repos[NAME].files()


def test_a_link_out_of_the_folder_is_refused(hub, push, folder, tmp_path):
    linked = shutil.copytree(folder, tmp_path / "linked")
    (tmp_path / "passwords").write_text("all of them")
    (linked / "notes.txt").symlink_to(tmp_path / "passwords")
    code, said = push(source=linked)
    assert code == 2
    assert f"notes.txt: leads out of the folder, to {tmp_path}/passwords; " in said
    assert not hub.requests
    (linked / "notes.txt").rename(linked / "_notes.txt")  # what is not uploaded may be a link
    (linked / "more.txt").symlink_to(linked / "config.json")
    assert push(source=linked)[0] == 0
    assert {"more.txt", "_notes.txt"} & set(hub.repos[NAME].files()) == {"more.txt"}
