"""A hub's token is never on disk, and one that another program has left there is told."""

import logging

import pytest
import torch
from transformers import TrainingArguments

from hf_zero.checkpoint.table import ChecksumTable
from hf_zero.trainer.hub import token_warning, without_tokens
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
        assert token_warning(folder) is None


def test_tokens_deep_in_the_arguments_are_blanked_and_those_of_texts_are_not(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.model_init_kwargs = {"token": SECRET, "kwargs": {"use_auth_token": SECRET}, "revision": "main"}
    args.eos_token = "</s>"
    saved = without_tokens(args)
    assert saved.model_init_kwargs == {"token": None, "kwargs": {"use_auth_token": None}, "revision": "main"}
    assert saved.eos_token == "</s>"
    assert args.model_init_kwargs["token"] == SECRET


@pytest.mark.parametrize(
    ("held", "is_told"),
    [
        ({"hub_token": SECRET, "seed": 1}, True),
        ({"model_init_kwargs": {"token": SECRET}}, True),
        ({"hub_token": None, "eos_token": "</s>"}, False),
        ({"token": True}, False),
    ],
)
def test_a_token_in_a_file_of_others_is_found(tmp_path, held, is_told):
    torch.save(held, tmp_path / "training_args.bin")
    assert (token_warning(tmp_path) is not None) == is_told


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", b"no archive"])
def test_a_file_that_cannot_be_read_is_not_told_of(tmp_path, content):
    if content is not None:
        (tmp_path / "training_args.bin").write_bytes(content)
    assert token_warning(tmp_path) is None


def test_resuming_from_a_folder_that_holds_a_token_says_so(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    trainer.train()
    trainer.args.hub_token = SECRET
    torch.save(trainer.args, tmp_path / "checkpoint-2" / "training_args.bin")
    ChecksumTable.of_folder(tmp_path / "checkpoint-2", {}).write(tmp_path / "checkpoint-2")
    resumed = make(3, tmp_path, models.build("bert"), Rows("bert"), **settings)
    with caplog.at_level(logging.WARNING, logger="hf_zero"):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-2/training_args.bin: holds the hub's token in plain text" in caplog.text
    assert SECRET not in caplog.text
