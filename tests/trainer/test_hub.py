"""A run on two ranks that pushes: every strategy leaves a repository that loads, and no rank waits for ever."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_zero import ZeroTrainingArguments
from hf_zero.compat import check_overrides
from hf_zero.errors import HfZeroError, HubError
from hf_zero.trainer.trainer import ZeroTrainerMixin
from tests import models
from tests.distributed import ranks
from tests.hub import FakeHub
from tests.output import logged
from tests.trainer.harness import Rows, make


TOKEN = "hf_alice"
NAME = "alice/model"


def make_pushing(folder, strategy: str, token: str = TOKEN):
    """A trainer of four steps, which saves and evaluates every second one."""
    torch.manual_seed(0)
    pushing = {"push_to_hub": True, "hub_model_id": NAME, "hub_strategy": strategy, "hub_token": token}
    every_second = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    parts = {"eval_dataset": Rows("llama", 4, seed=1)}
    settings = {**pushing, **every_second, "hub_always_push": True}
    return make(3, folder, models.build("llama"), Rows("llama"), parts=parts, **settings)


def assert_same(near: Path, far: Path) -> None:
    expected, found = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (near, far))
    assert len(expected) > 10
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("strategy", "checkpoints"),
    [
        ("end", set()),
        ("every_save", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all_checkpoints", {"checkpoint-2", "checkpoint-4"}),
    ],
)
@ranks(2)
def test_every_strategy_leaves_a_repository_that_loads(tmp_path, strategy, checkpoints):
    hub, out = FakeHub(tmp_path / "hub", hf_alice="alice"), tmp_path / "out"
    with hub.installed(), logged("hf_zero.trainer.hub") as messages:
        trainer = make_pushing(out, strategy)
        trainer.train()
        trainer.push_to_hub()
    assert trainer.hub_model_id == NAME and not messages, messages
    if dist.get_rank() != 0:
        assert not hub.messages
        return
    assert hub.messages[-1] == "End of training"
    in_progress = {message for message in hub.messages if message.startswith("Training in progress")}
    assert bool(in_progress) == (strategy != "end")
    repo, files = hub.root / NAME / "main", hub.files(NAME)
    assert_same(out, repo)
    assert {name.split("/")[0] for name in files if "checkpoint" in name or name.startswith("zero/")} == checkpoints
    for folder in checkpoints:
        assert {f"{folder}/zero_manifest.json", f"{folder}/zero/optimizer.safetensors"} <= set(files)
        local = out / folder.replace("last-checkpoint", "checkpoint-4")
        assert files[f"{folder}/model.safetensors"] == (local / "model.safetensors").read_bytes()
        assert_same(local, repo / folder)
    # neither the repository nor the disk has the token
    assert not [name for name in files if name.endswith("training_args.bin")]
    here = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len([path for path in here if path.name == "training_args.bin"]) >= 3, "two checkpoints, and the model"
    assert not [path for path, content in here.items() if TOKEN.encode() in content]


@ranks(2)
def test_a_wrong_token_ends_both_ranks_with_one_line(tmp_path):
    is_first = dist.get_rank() == 0
    with FakeHub(tmp_path).installed(), pytest.raises(HubError if is_first else HfZeroError) as raised:
        make_pushing(tmp_path / "out", "end", token="hf_mallory")
    (said,) = str(raised.value).splitlines()
    if is_first:
        assert said.startswith(f"creating {NAME}: ") and "answered 401" in said
    else:
        assert "rank 0 failed: HubError" in said


@ranks(2)
def test_uploads_that_fail_on_the_way_are_told_and_the_last_one_counts(tmp_path):
    hub = FakeHub(tmp_path / "hub", hf_alice="alice")
    hub.num_failures = 2  # the client does not try a commit again; Trainer does not look
    with hub.installed(), logged("hf_zero.trainer.hub") as messages:
        trainer = make_pushing(tmp_path / "out", "every_save")
        trainer.train()
        trainer.push_to_hub()
    if dist.get_rank() == 0:
        assert [message[:33] for message in messages] == ["An upload during training failed:"] * 2
        assert "answered 503" in messages[0]
        assert_same(tmp_path / "out", hub.root / NAME / "main")


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
