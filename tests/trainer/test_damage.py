"""Damage to a trainer's checkpoint: resume and `verify` notice it in any file, and older checkpoints are taken."""

import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_zero.checkpoint.manifest import DISPENSABLE, MANIFEST_NAME, Manifest, check_checksums
from hf_zero.errors import CheckpointError
from hf_zero.trainer.resumable import check_resumable, newest_whole
from tests import models
from tests.checkpoint.subjects import flip, resealed
from tests.compare import assert_equal
from tests.distributed import run_ranks
from tests.output import logged
from tests.trainer.harness import Rows, make, train


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


class Tokenizer:
    """Has a file in each checkpoint, as tokenizers do."""

    def save_pretrained(self, folder):
        Path(folder, "vocab.txt").write_text("a\nb\nc\n")


def _saves(folder):
    train(3, folder, parts={"processing_class": Tokenizer()}, **SAVING)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What a run of two ranks has left: checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(_saves, 2, str(folder), timeout=240)
    return folder


@pytest.fixture
def output_dir(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.quick
def test_a_checkpoint_has_all_its_files_in_the_table(run):
    folder = run / "checkpoint-4"
    names = set(_files(folder))
    assert {"scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "vocab.txt"} <= names
    assert {"training_args.bin", "config.json", MANIFEST_NAME} <= names
    assert set(Manifest.read(folder).files) == names - {MANIFEST_NAME}


def test_a_bit_of_any_file_is_noticed_and_the_next_older_checkpoint_is_taken(output_dir):
    folder, generator = output_dir / "checkpoint-4", random.Random(0)
    before = newest_whole(str(output_dir), say=print)
    assert (before.folder, before.faults) == (str(folder), {})
    for name in _files(folder):
        nbits = 8 * (folder / name).stat().st_size
        for bit in {0, nbits - 1, nbits // 2, *(generator.randrange(nbits) for _ in range(3))}:
            flip(folder / name, bit)
            choice = newest_whole(str(output_dir), say=print)
            assert choice.folder == str(output_dir / "checkpoint-2"), f"{name}: bit {bit}"
            assert Path(name).name in choice.faults[str(folder)] and "\n" not in choice.faults[str(folder)]
            with pytest.raises(CheckpointError, match="--zero_resume_strict"):
                newest_whole(str(output_dir), say=print, strict=True)
            with pytest.raises(CheckpointError):  # what `verify` calls
                check_checksums(folder)
            flip(folder / name, bit)
    assert newest_whole(str(output_dir), say=print).folder == str(folder)


def test_a_file_that_is_missing_empty_or_of_another_step_is_noticed(output_dir):
    folder, older = output_dir / "checkpoint-4", output_dir / "checkpoint-2"
    for name in _files(folder):
        path, content = folder / name, (folder / name).read_bytes()
        may_be_missing = {None} if path.name in DISPENSABLE else set()
        for damaged in {None, b"", (older / name).read_bytes()} - {content} - may_be_missing:
            path.unlink() if damaged is None else path.write_bytes(damaged)
            choice = newest_whole(str(output_dir), say=print)
            assert choice.folder == str(older), f"{name}: {damaged and damaged[:9]}"
            with pytest.raises(CheckpointError):  # what `verify` calls
                check_checksums(folder)
            path.write_bytes(content)
    assert newest_whole(str(output_dir), say=print).folder == str(folder)


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"global_step": ' + b"[" * 200_000, "trainer_state.json: cannot be read"),
        (b'{"global_step": "4"}', "trainer_state.json: global_step is '4', expected a number of steps"),
        (None, "trainer_state.json: is missing"),
    ],
)
def test_a_checkpoint_whose_table_was_written_over_damage_is_refused(output_dir, content, message):
    folder = output_dir / "checkpoint-4"
    (folder / "trainer_state.json").unlink()
    if content is not None:
        (folder / "trainer_state.json").write_bytes(content)
    resealed(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        check_resumable(folder)
    assert "\n" not in str(error.value)


def test_checkpoints_of_equal_steps_are_looked_at_in_the_same_order_by_every_process(tmp_path):
    names = [f"checkpoint-{'0' * zeros}5" for zeros in range(12)]
    for name in names:
        (tmp_path / name).mkdir()
    found = newest_whole(str(tmp_path), say=print).faults
    assert [Path(path).name for path in found] == sorted(names, reverse=True)


def _falls_back(folder):
    whole = train(3, folder, **{**SAVING, "max_steps": 6})
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(folder, "checkpoint-6", "zero", "optimizer.safetensors")
        flip(path, 8 * path.stat().st_size - 20)  # a value of the last tensor: the headers are whole
        Path(folder, "checkpoint-4", "trainer_state.json").unlink()
        Path(folder, "checkpoint-99").mkdir()
    dist.barrier()
    with pytest.raises(CheckpointError, match="--zero_resume_strict: .*checkpoint-99 is the newest"):
        train(3, folder, resume=True, zero_resume_strict=True, **SAVING)
    with pytest.raises(CheckpointError, match="optimizer.safetensors: tensor .* has checksum"):
        train(3, folder, resume=f"{folder}/checkpoint-6", **{**SAVING, "max_steps": 7})
    with logged("hf_zero.trainer.resumable") as messages:
        resumed = train(3, folder, resume=True, **{**SAVING, "max_steps": 6})
    assert_equal(resumed, whole, "resumed and unbroken")
    return messages


@pytest.mark.quick
def test_resume_takes_the_newest_that_is_intact_and_says_what_it_skipped(tmp_path):
    said, silent = run_ranks(_falls_back, 2, str(tmp_path), timeout=240)
    assert "checkpoint-99 is skipped" in said[0]
    assert "checkpoint-6 is skipped" in said[1] and "optimizer.safetensors: tensor" in said[1]
    assert "checkpoint-4 is skipped" in said[2] and "trainer_state.json" in said[2]
    assert said[3].endswith("checkpoint-2") and len(said) == 4 and not silent


class Extra(TrainerCallback):
    """Adds a file to a checkpoint that is complete, as callbacks do."""

    def on_save(self, args, state, control, **kwargs):
        Path(args.output_dir, f"checkpoint-{state.global_step}", "mine.txt").write_text("mine")


def _saves_final(folder):
    trainer = make(
        3,
        folder,
        models.build("bert"),
        Rows("bert"),
        parts={"processing_class": Tokenizer(), "callbacks": [Extra()]},
        **{**SAVING, "max_steps": 2},
    )
    trainer.train()
    for _ in range(2):  # the second save replaces the files of the first
        trainer.save_model()


def test_the_final_model_has_checksums_of_all_that_was_saved_with_it(tmp_path):
    torch.set_num_threads(1)
    run_ranks(_saves_final, 2, str(tmp_path), timeout=240)
    names = {"config.json", "model.safetensors", "training_args.bin", "vocab.txt"}
    assert set(Manifest.read(tmp_path).files) == names
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / "all_results.json").write_text("{}")
    assert set(check_checksums(tmp_path).files) == names
    flip(tmp_path / "vocab.txt", 3)
    with pytest.raises(CheckpointError, match="vocab.txt: has checksum"):
        check_checksums(tmp_path)
    check_resumable(tmp_path / "checkpoint-2")  # with the file that the callback has added


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_3.pth"])
def test_an_archive_of_a_plain_trainer_that_is_empty_or_cut_off_is_named(tmp_path, name):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4}')
    for each in ("optimizer.pt", name):
        torch.save({"last_epoch": 3, "rates": torch.ones(100)}, tmp_path / each)
    check_resumable(tmp_path)
    content = (tmp_path / name).read_bytes()
    for part in (b"", content[: len(content) // 2]):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \(.*\); it is damaged or incomplete"):
            check_resumable(tmp_path)
