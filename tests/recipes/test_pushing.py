"""The tool `push`, and runs with `--push_to_hub`: what is uploaded, and one line for what cannot be."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from hf_zero.recipes.cli import main
from tests.distributed import ranks
from tests.hub import FakeHub
from tests.recipes.ranks import run_on_this_rank


TOKEN = "hf_alice"
NAME = "alice/model"


@pytest.fixture
def hub(tmp_path):
    with FakeHub(tmp_path / "hub", hf_alice="alice", hf_bob="bob").installed() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    """A small language model in several files, and what a run leaves beside it."""
    torch.manual_seed(0)
    folder = tmp_path / "run" / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    model.save_pretrained(folder, max_shard_size="12KB")
    state = ("zero/state.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin")
    for name in (*state, "checkpoint-2/config.json", "_notes.txt", ".hidden"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"state of a run")
    (folder / "trainer_state.json").write_text(
        '{"global_step": 7, "log_history": [{"eval_loss": 1.25}, {"train_runtime": 3.5, "train_loss": 2.0}]}',
        encoding="utf-8",
    )
    return folder


@pytest.fixture
def push(folder, capsys):
    """Runs `push`; gives the exit code and what it said: one line when it failed."""

    def call(*flags: str, token: str = TOKEN) -> tuple[int, str]:
        code = main(["push", str(folder), f"--hub_model_id={NAME}", f"--token={token}", *flags])
        said = capsys.readouterr()
        assert said.err.count("\n") == (0 if code == 0 else 1), said.err
        return code, said.err or said.out

    return call


def assert_same(near: Path, far: Path) -> None:
    expected, found = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (near, far))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_is_pushed_is_what_from_pretrained_gets(hub, push, folder):
    assert push() == (0, f"{constants.ENDPOINT}/{NAME}\n")
    files = hub.files(NAME)
    weights = {path.name for path in folder.glob("*.safetensors")}
    assert len(weights) == 3
    described = {"config.json", "generation_config.json", "README.md", "trainer_state.json"}
    assert set(files) == weights | described | {"model.safetensors.index.json"}
    assert not hub.private[NAME]
    card = files["README.md"].decode()
    assert "- hf_zero" in card and "# model" in card
    assert_same(folder, hub.root / NAME / "main")


def test_a_second_push_leaves_no_weights_of_the_first(hub, push, folder):
    assert push()[0] == 0
    repo = hub.root / NAME / "main"
    shutil.copy(next(repo.glob("*.safetensors")), repo / "model.safetensors")  # an older model in a single file
    assert push("--commit_message=again")[0] == 0
    assert "model.safetensors" not in hub.files(NAME)
    assert hub.messages == ["Upload model", "again"]
    assert_same(folder, repo)


def test_a_private_repository_and_a_branch_are_made(hub, push):
    assert push("--private", "--revision=trial") == (0, f"{constants.ENDPOINT}/{NAME}/tree/trial\n")
    assert hub.private[NAME]
    assert not hub.files(NAME)
    assert "config.json" in hub.files(NAME, "trial")


@pytest.mark.parametrize(
    ("flags", "token", "code", "words"),
    [
        (
            [],
            "hf_mallory",
            1,
            "answered 401 (Invalid credentials in Authorization header): the token",
        ),
        ([], "hf_bob", 1, f"{constants.ENDPOINT} answered 403 (You don't have write access): the token"),
        (["--hub_model_id=a/b/c"], TOKEN, 1, "use a name such as user/"),
        (["--hub_model_id=a..b"], TOKEN, 1, "use a name such as user/"),
        (["--hub_model_id="], TOKEN, 2, "user/"),
    ],
)
def test_what_cannot_be_pushed_is_one_line(hub, push, flags, token, code, words):
    found, said = push(*flags, token=token)
    assert found == code and words in said
    assert not hub.private


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:9", "connection to http://127.0.0.1:9 failed ("),
        ("http://no-such-host.invalid", "connection to http://no-such-host.invalid failed ("),
        (None, "HF_HUB_OFFLINE is set; unset it"),
    ],
)
def test_a_hub_out_of_reach_is_one_line(push, monkeypatch, endpoint, words):
    """Of the real client, whose library for HTTP differs between versions."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", endpoint is None)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    code, said = push()
    assert code == 1 and words in said


def test_a_folder_that_is_not_whole_is_not_pushed(hub, push, folder):
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    code, said = push()
    assert code == 1
    assert "truncated" in said
    assert not hub.private


def test_a_link_out_of_the_folder_is_refused(hub, push, folder, tmp_path):
    (tmp_path / "passwords").write_text("all of them")
    (folder / "notes.txt").symlink_to(tmp_path / "passwords")
    code, said = push()
    assert code == 2
    assert f"notes.txt: leads out of the folder, to {tmp_path}/passwords; " in said
    assert not hub.private
    (folder / "notes.txt").rename(folder / "_notes.txt")  # what is not uploaded may be a link
    (folder / "more.txt").symlink_to(folder / "config.json")
    assert push()[0] == 0
    assert {"more.txt", "_notes.txt"} & set(hub.files(NAME)) == {"more.txt"}


@ranks(2)
def test_a_run_is_pushed_with_its_report_and_loads_from_there(tiny_model, csv_file, tmp_path):
    hub, out = FakeHub(tmp_path / "hub", hf_alice="alice"), tmp_path / "out"
    argv = f"classify --model_name_or_path={tiny_model} --train_file={csv_file} --output_dir=out --max_steps=3".split()
    argv += f"--save_steps=2 --push_to_hub --hub_model_id={NAME} --hub_token={TOKEN} --use_cpu".split()
    with hub.installed():
        for _ in range(2):  # the second one has nothing left to train, and pushes what is there
            ended = run_on_this_rank(argv, str(tmp_path))
            assert ended.code == 0, ended.err
    if torch.distributed.get_rank() != 0:
        assert not hub.messages
        return
    files = hub.files(NAME)
    names = {"model.safetensors", "tokenizer.json", "README.md", "report.html"}
    assert names | {"training_log.jsonl"} <= set(files)
    assert not [name for name in files if name.startswith(("checkpoint", "_"))]
    assert {"resolved.yaml", "training_args.bin"} <= {path.name for path in out.iterdir()} - set(files)
    assert not [name for name, content in files.items() if str(csv_file.parent).encode() in content]
    assert b"the soup was" not in files["report.html"]
    for name in ("model.safetensors", "report.html"):
        assert files[name] == (out / name).read_bytes()
    assert "- zero-stage-3" in files["README.md"].decode()
    everything = {path: path.read_bytes() for where in (hub.root, out) for path in where.rglob("*") if path.is_file()}
    assert not [path for path, content in everything.items() if TOKEN.encode() in content]
    model = AutoModelForSequenceClassification.from_pretrained(hub.root / NAME / "main")
    assert sorted(model.config.label2id) == ["film", "food"] and model.num_parameters() == 6130
