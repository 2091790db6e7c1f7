"""A hub's token is never written to disk."""

import pickle

import pytest
import torch

from hf_zero import ZeroTrainingArguments
from tests import models
from tests.trainer.harness import Rows, make


SECRET = "hf_very_secret"


def read(folder):
    return torch.load(folder / "training_args.bin", weights_only=False)


@pytest.mark.quick
def test_what_a_run_saves_has_no_token_and_the_run_keeps_it(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "hub_token": SECRET}
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    trainer.train()
    trainer.save_model()
    assert trainer.args.hub_token == SECRET
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        assert SECRET.encode() not in (folder / "training_args.bin").read_bytes()
        assert read(folder).hub_token is None and read(folder).save_steps == 2


def test_tokens_deep_in_the_arguments_are_blanked_and_those_of_texts_are_not(tmp_path):
    args = ZeroTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.model_init_kwargs = {"token": SECRET, "kwargs": {"use_auth_token": SECRET}, "revision": "main"}
    args.eos_token = "</s>"
    saved = pickle.loads(pickle.dumps(args))
    assert saved.model_init_kwargs == {"token": None, "kwargs": {"use_auth_token": None}, "revision": "main"}
    assert saved.eos_token == "</s>"
    assert args.model_init_kwargs["token"] == SECRET
