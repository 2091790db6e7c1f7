"""A run on two ranks that pushes: every strategy leaves a repository that loads, and no rank waits for ever."""

import pickle
import subprocess
import sys
import time

import pytest
from huggingface_hub import ModelCard

from hf_zero import ZeroTrainingArguments
from hf_zero.compat import check_overrides
from hf_zero.trainer.trainer import ZeroTrainerMixin
from tests import models
from tests.distributed import free_port
from tests.hub_client import HubClient, environment, kill
from tests.hub_server import HubServer
from tests.tiers import in_core
from tests.trainer.harness import Rows, make


TOKEN = "hf_alice"
OTHERS = ("every_save", "checkpoint", "all_checkpoints")
STRATEGIES = ("end", *OTHERS)
TIMEOUT = 240  # seconds for both ranks, most of them to import transformers


@pytest.fixture(scope="module")
def server():
    with HubServer({TOKEN: "alice"}) as server:
        yield server


def run_two_ranks(server, folder, *runs: str) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of each rank. Both are killed when they take too long."""
    env = environment(server.url, folder / "home")
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.trainer.hub_ranks", *runs]
    ranks, outputs = [], []
    for rank in ("0", "1"):
        files = [(folder / f"rank{rank}.{kind}").open("w+", encoding="utf-8") for kind in ("out", "err")]
        outputs.append(files)
        own = {**env, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(subprocess.Popen(command, env=own, stdout=files[0], stderr=files[1], start_new_session=True))
    deadline = time.monotonic() + TIMEOUT
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.2)
    late = [rank.poll() is None for rank in ranks]
    for rank in ranks:
        kill(rank)
    said = []
    for out, err in outputs:
        said.append(tuple(file.seek(0) or file.read() for file in (out, err)))
        out.close(), err.close()
    assert not any(late), f"ranks that did not end: {late}\n{said}"
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said)]


@pytest.fixture(scope="module")
def ended(server, tmp_path_factory):
    """The folder of a run with a wrong token, and then of one that pushes at its end; what each rank said."""
    folder = tmp_path_factory.mktemp("pushed")
    ranks = run_two_ranks(server, folder, f"{folder / 'refused'}:hf_mallory:end", f"{folder}:{TOKEN}:end")
    check_pushed(ranks, "end")
    return folder, ranks


@pytest.fixture(scope="module")
def others(server, ended):
    """The same folder, with a run of every other strategy, one after the other."""
    folder, _ = ended
    check_pushed(run_two_ranks(server, folder, *(f"{folder}:{TOKEN}:{each}" for each in OTHERS)), *OTHERS)
    return folder


@pytest.fixture
def pushed(request, strategy):
    """The folder, with a run of this strategy."""
    return request.getfixturevalue("ended")[0] if strategy == "end" else request.getfixturevalue("others")


def check_pushed(ranks: list[tuple[int, str, str]], *strategies: str) -> None:
    for code, out, err in ranks:
        assert code == 0, out + err
        assert out.splitlines()[-len(strategies) :] == [f"pushed alice/{strategy}" for strategy in strategies]
        assert "upload during training failed" not in err


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    client = HubClient(server.url, tmp_path_factory.mktemp("home"))
    yield client
    client.close()


@pytest.fixture
def assert_same(client, tmp_path):
    def call(near, far: str, subfolder: str = "") -> None:
        answer = client.call("differences", str(near), far, "main", str(tmp_path / f"cache{subfolder}"), subfolder)
        assert answer["tensors"] > 10
        assert not answer["different"]

    return call


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.full("slow")
def test_the_weights_of_the_last_step_are_there(pushed, server, assert_same, strategy):
    assert_same(pushed / strategy, f"alice/{strategy}")
    messages = server.repos[f"alice/{strategy}"].messages
    assert messages[-1] == "End of training"
    in_progress = [message for message in messages if message.startswith("Training in progress")]
    assert bool(in_progress) == (strategy != "end")


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("checkpoint", ["last-checkpoint"]), ("all_checkpoints", ["checkpoint-2", "checkpoint-4"])],
)
@pytest.mark.full("slow")
def test_checkpoints_are_pushed_with_their_state(pushed, server, assert_same, strategy, folders):
    files = server.repos[f"alice/{strategy}"].files()
    assert sorted({name.split("/")[0] for name in files if "checkpoint" in name}) == folders
    for folder in folders:
        assert {f"{folder}/zero_manifest.json", f"{folder}/zero/optimizer.safetensors"} <= set(files)
    local = pushed / strategy / ("checkpoint-4" if strategy == "checkpoint" else folders[0])
    assert files[f"{folders[0]}/model.safetensors"].content == (local / "model.safetensors").read_bytes()
    assert_same(local, f"alice/{strategy}", folders[0])


@pytest.mark.parametrize("strategy", in_core(["end"], STRATEGIES))
def test_neither_the_repository_nor_the_disk_has_the_token(pushed, server, strategy):
    files = {name: blob.content for name, blob in server.repos[f"alice/{strategy}"].files().items()}
    assert not [name for name in files if name.endswith("training_args.bin")]
    here = {str(path): path.read_bytes() for path in (pushed / strategy).rglob("*") if path.is_file()}
    assert len([path for path in here if path.endswith("training_args.bin")]) >= 3, "two checkpoints, and the model"
    assert not [name for name, content in {**files, **here}.items() if TOKEN.encode() in content]


@pytest.mark.parametrize("strategy", in_core(["end"], ["end", "every_save"]))
def test_checkpoints_stay_here_otherwise(pushed, server, strategy):
    files = server.repos[f"alice/{strategy}"].files()
    assert not [name for name in files if "checkpoint" in name or name.startswith("zero/")]


def test_a_wrong_token_ends_both_ranks_with_one_line(ended):
    _, ranks = ended
    (said, *others), (other_said, *_) = (out.splitlines() for _, out, _ in ranks)
    assert said.startswith("HubError: creating alice/end: ") and "answered 401" in said
    assert "rank 0 failed: HubError" in other_said
    assert len(others) == 1, "nothing else is said, and the next run is as any other"


@pytest.mark.full("slow")
def test_uploads_that_fail_on_the_way_are_told_and_the_last_one_counts(server, tmp_path, assert_same):
    server.clear()
    server.drops["commit"] = 2  # the client does not try a commit again; Trainer does not look
    (code, out, err), (other_code, _, _) = run_two_ranks(server, tmp_path, f"{tmp_path}:{TOKEN}:every_save")
    assert (code, other_code) == (0, 0), out + err
    assert "An upload during training failed" in err
    assert_same(tmp_path / "every_save", "alice/every_save")


class OlderTrainer:
    """As of transformers 5.17, which makes no difference between repositories when they are made."""

    def init_hf_repo(self, token=None): ...

    def push_to_hub(self, commit_message="End of training", blocking=True, token=None, revision=None, **kwargs): ...


@pytest.mark.quick
def test_pushing_asks_for_no_parameter_that_the_oldest_trainer_lacks():
    check_overrides(ZeroTrainerMixin, OlderTrainer, ("init_hf_repo", "push_to_hub"))


@pytest.mark.quick
def test_the_card_of_trainer_has_a_section_on_zero_and_of_the_caller(tmp_path):
    settings = {"bf16": True, "use_cpu": True, "hub_token": "hf_secret"}
    trainer = make(
        2, tmp_path, models.build("bert"), Rows("bert"), parts={"eval_dataset": Rows("bert", 4)}, **settings
    )
    trainer.train()
    trainer.evaluate()
    trainer.card_sections = {"Recipe": "rows.csv"}
    for _ in range(2):  # a second push
        trainer.create_model_card(model_name="mine", tags=["extra"])
    card = ModelCard.load(tmp_path / "README.md")
    assert {"extra", "generated_from_trainer", "hf_zero", "zero-stage-2"} == set(card.data.tags)
    lines = card.text.splitlines()
    for line in ("# mine", "| ZeRO stage | 2 |", "| ranks | 1 |", "| precision | bf16 with fp32 masters |"):
        assert lines.count(line) == 1
    assert "rows.csv" in lines and "- learning_rate: 0.001" in lines
    assert any(line.startswith("- Loss: ") for line in lines)
    assert "hf_secret" not in card.content and str(tmp_path) not in card.content


def test_tokens_deep_in_the_arguments_are_blanked_and_those_of_texts_are_not(tmp_path):
    args = ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.model_init_kwargs = {"token": TOKEN, "kwargs": {"use_auth_token": TOKEN}, "revision": "main"}
    args.eos_token = "</s>"
    saved = pickle.loads(pickle.dumps(args))
    assert saved.model_init_kwargs == {"token": None, "kwargs": {"use_auth_token": None}, "revision": "main"}
    assert saved.eos_token == "</s>"
    assert args.model_init_kwargs["token"] == TOKEN
