"""Damage to a trainer's checkpoint: resume and `verify` notice it in any file, and older checkpoints are taken."""

import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_zero.checkpoint.checks import check_checksums
from hf_zero.checkpoint.manifest import DISPENSABLE, MANIFEST_NAME, Manifest
from hf_zero.errors import CheckpointError
from hf_zero.recipes.cli import main
from hf_zero.trainer.resumable import check_resumable, newest_whole, refuse_damaged
from tests import models
from tests.checkpoint.fakes import resealed
from tests.distributed import run_ranks
from tests.trainer.harness import Rows, assert_equal, make, train


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


def _flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


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
            _flip(folder / name, bit)
            choice = newest_whole(str(output_dir), say=print)
            assert choice.folder == str(output_dir / "checkpoint-2"), f"{name}: bit {bit}"
            assert Path(name).name in choice.faults[str(folder)] and "\n" not in choice.faults[str(folder)]
            with pytest.raises(CheckpointError, match="--zero_resume_strict"):
                newest_whole(str(output_dir), say=print, strict=True)
            with pytest.raises(CheckpointError):  # what `verify` calls
                check_checksums(folder)
            _flip(folder / name, bit)
    assert newest_whole(str(output_dir), say=print).folder == str(folder)


def test_a_file_that_lacks_or_is_of_another_step_or_rank_is_noticed(output_dir):
    folder, older = output_dir / "checkpoint-4", output_dir / "checkpoint-2"
    for name in _files(folder):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if name in DISPENSABLE:
            check_resumable(folder)
        else:
            with pytest.raises(CheckpointError, match="missing|not found"):
                check_resumable(folder)
        if content != (older / name).read_bytes():
            shutil.copy(older / name, folder / name)
            with pytest.raises(CheckpointError):
                check_resumable(folder)
                check_checksums(folder)
        (folder / name).write_bytes(content)
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    with pytest.raises(CheckpointError, match="rng_state_1.pth: has"):
        check_resumable(folder)


def test_verify_and_resume_refuse_the_same(output_dir, capsys):
    folder = output_dir / "checkpoint-4"
    assert main(["verify", str(folder)]) == 0
    for name in ("scheduler.pt", "rng_state_1.pth", "trainer_state.json", "config.json", MANIFEST_NAME):
        _flip(folder / name, 77)
        with pytest.raises(CheckpointError) as error:
            check_resumable(folder)
        capsys.readouterr()
        assert main(["verify", str(folder)]) == 1
        output = capsys.readouterr()
        assert str(error.value) in output.out + output.err
        _flip(folder / name, 77)


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


def test_a_named_checkpoint_that_does_not_exist_is_one_line(output_dir):
    with pytest.raises(CheckpointError, match="checkpoint-9: does not exist"):
        refuse_damaged(output_dir / "checkpoint-9")


def _falls_back(folder):
    whole = train(3, folder, **SAVING)
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(folder, "checkpoint-4", "zero", "optimizer.safetensors")
        _flip(path, 8 * path.stat().st_size - 20)  # a value of the last tensor: the headers are whole
    dist.barrier()
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hf_zero.trainer.resumable").addHandler(handler)
    with pytest.raises(CheckpointError, match="optimizer.safetensors: tensor .* has checksum .*--zero_resume_strict"):
        train(3, f"{folder}", resume=True, zero_resume_strict=True, **SAVING)
    with pytest.raises(CheckpointError, match="optimizer.safetensors: tensor .* has checksum"):
        train(3, f"{folder}", resume=f"{folder}/checkpoint-4", **{**SAVING, "max_steps": 5})
    resumed = train(3, folder, resume=True, **SAVING)
    assert_equal(resumed, whole, "resumed and unbroken")
    return records


@pytest.mark.quick
def test_a_damaged_value_is_said_and_the_run_goes_on_from_the_next_older(tmp_path):
    said, silent = run_ranks(_falls_back, 2, str(tmp_path), timeout=240)
    assert "checkpoint-4 is skipped" in said[0] and "optimizer.safetensors: tensor" in said[0]
    assert said[1].endswith("checkpoint-2") and len(said) == 2 and not silent


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
    _flip(tmp_path / "vocab.txt", 3)
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
