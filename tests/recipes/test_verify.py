"""`verify` says yes to what a run has left, and names what was done to it."""

import shutil
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_zero
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_zero.checkpoint.safetensors import FileLayout
from hf_zero.recipes.cli import main
from hf_zero.recipes.inspection import Tensors
from tests import models
from tests.trainer.harness import Rows, make


WEIGHTS = "model.safetensors"
STATE = "zero/optimizer.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tied language model and its optimizer state after a step, saved by one rank."""
    model = models.llama(tied=True, hidden=16, layers=2)
    engine = hf_zero.shard(model, stage=0)
    optimizer = hf_zero.ShardedOptimizer(engine, torch.optim.AdamW, lr=1e-3)
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    hf_zero.save_checkpoint(engine, optimizer, folder)
    return folder


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture
def verified(folder, capsys):
    """Runs `verify` on the folder; gives the exit code, the lines by check, and the last line of stderr."""

    def call(*flags: str) -> tuple[int, dict[str, str], str]:
        code = main(["verify", str(folder), *flags])
        output = capsys.readouterr()
        lines = [line for line in output.out.splitlines() if line.startswith(("ok ", "wrong "))]
        assert output.err.count("\n") == (0 if code == 0 else 1), output.err
        return code, {line.split()[1].rstrip(":"): line for line in lines}, output.err

    return call


@pytest.fixture
def checksums(folder):
    """Those of the table, which are what the library's reading of the files gives."""
    files = [WEIGHTS, *(f"zero/{path.name}" for path in (folder / "zero").glob("*.safetensors"))]
    expected = {file: _crc32s(folder / file) for file in files}
    table = Manifest.read(folder)
    assert {name: found.tensors for name, found in table.files.items() if found.tensors is not None} == expected
    return expected


def _crc32s(path) -> dict[str, int]:
    """Of whole tensors, by the library, beside what is tested."""
    with safe_open(path, "pt") as file:
        return {name: zlib.crc32(_bytes_of(file.get_tensor(name))) for name in file.keys()}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _change(path, change) -> None:
    """Rewrites a safetensors file after `change(tensors)`."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.quick
def test_a_checkpoint_passes_every_check(verified, checksums):
    code, lines, _ = verified()
    assert code == 0
    assert list(lines) == ["files", "values", "state", "checksums", "loads"]
    assert all(line.startswith("ok ") for line in lines.values())
    assert f"{sum(map(len, checksums.values()))} tensors and 4 files as they were saved" in lines["checksums"]
    assert "LlamaForCausalLM" in lines["loads"]


def test_a_folder_of_transformers_alone_passes_and_has_no_checksums_to_be_ok(tiny_model, capsys):
    assert main(["verify", str(tiny_model)]) == 0
    output = capsys.readouterr().out
    assert "open   checksums: none were saved with this folder" in output
    assert "3 checks passed, 1 could not be made (checksums)" in output
    assert "BertModel" in output


@pytest.mark.quick
def test_a_bit_that_has_flipped_is_found_in_its_tensor_and_file(verified, checksums, folder):
    name = "model.layers.1.mlp.up_proj.weight"
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[FileLayout.read(folder / WEIGHTS).offsets[name] + 1] ^= 1  # a low bit of the mantissa
    (folder / WEIGHTS).write_bytes(content)
    code, lines, error = verified()
    assert code == 1
    assert [check for check, line in lines.items() if line.startswith("wrong")] == ["checksums"]
    assert f"{WEIGHTS}: tensor {name!r} has checksum" in lines["checksums"]
    assert "1 of 5 checks failed (checksums)" in error


def test_tensors_are_read_in_pieces(folder, monkeypatch):
    whole = Tensors.read(folder, [WEIGHTS])
    assert whole.checksums == {(WEIGHTS, name): crc for name, crc in _crc32s(folder / WEIGHTS).items()}
    sizes = []
    monkeypatch.setattr("hf_zero.checkpoint.safetensors.PIECE_NBYTES", 64)
    monkeypatch.setattr(
        zlib, "crc32", lambda piece, value=0, crc32=zlib.crc32: sizes.append(len(piece)) or crc32(piece, value)
    )
    assert Tensors.read(folder, [WEIGHTS]) == whole
    assert max(sizes) == 64


def _another_digit(name: str):
    def damage(folder):
        content = (folder / name).read_text(encoding="utf-8")
        place = max(content.rfind(str(digit)) for digit in range(10))
        changed = content[:place] + str(9 - int(content[place])) + content[place + 1 :]
        (folder / name).write_text(changed, encoding="utf-8")

    return damage


def _in_file(name: str, change):
    return lambda folder: _change(folder / name, change)


def _in_weights(change):
    """Without optimizer state, as of another program's folder."""

    def damage(folder):
        shutil.rmtree(folder / "zero")
        _change(folder / WEIGHTS, change)

    return damage


def _spoil(value: str):
    return lambda tensors: tensors["model.norm.weight"][3:5].fill_(float(value))


@pytest.mark.parametrize(
    ("damage", "check", "message"),
    [
        *((_another_digit(name), "checksums", name) for name in ("config.json", "generation_config.json")),
        (_another_digit(MANIFEST_NAME), "checksums", MANIFEST_NAME.rpartition("/")[2]),
        (
            _in_file(STATE, lambda tensors: tensors["model.norm.weight.exp_avg"].add_(1)),
            "checksums",
            f"{STATE}: tensor 'model.norm.weight.exp_avg' has checksum",
        ),
        (
            lambda folder: (folder / MANIFEST_NAME).unlink(),
            "checksums",
            f"{MANIFEST_NAME}: not found: the checkpoint is incomplete",
        ),
        (lambda folder: (folder / STATE).unlink(), "checksums", "optimizer.safetensors: is missing"),
        (_in_file(WEIGHTS, _spoil("nan")), "values", "model.norm.weight (2 of 16)"),
        (_in_file(WEIGHTS, _spoil("inf")), "values", "model.norm.weight (2 of 16)"),
        (_in_weights(lambda tensors: tensors.pop("model.norm.weight")), "loads", "1 missing (model.norm.weight)"),
        (
            _in_weights(lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)})),
            "loads",
            "1 unexpected (model.extra.weight)",
        ),
        (
            _in_weights(lambda tensors: tensors.update({"model.norm.weight": torch.ones(4)})),
            "loads",
            "1 of another shape (model.norm.weight [4] for [16])",
        ),
    ],
)
def test_damage_is_found_by_the_check_for_it(verified, folder, damage, check, message):
    damage(folder)
    code, lines, _ = verified()
    assert code == 1 and lines[check].startswith("wrong") and message in lines[check]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (WEIGHTS, lambda found: found[:-7], "truncated, damaged, or not a safetensors file"),
        ("config.json", lambda _: b"{", "config.json: cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_stops_everything_with_one_line(verified, folder, name, content, message):
    (folder / name).write_bytes(content((folder / name).read_bytes()))
    code, lines, error = verified()
    assert (code, lines) == (1, {}) and message in error


@pytest.mark.parametrize("adapted", [False, True])
def test_checkpoints_of_a_trainer_pass(tmp_path, capsys, adapted):
    model = models.build("llama")
    if adapted:
        peft = pytest.importorskip("peft")
        model.save_pretrained(tmp_path / "base")
        model = type(model).from_pretrained(tmp_path / "base")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    settings = {"bf16": True, "use_cpu": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make(3, tmp_path / "out", model, Rows("llama"), **settings).train()
    capsys.readouterr()
    code = main(["verify", str(tmp_path / "out" / "checkpoint-2")])
    output = capsys.readouterr().out
    assert code == 0, output
    assert "state: all finite in" in output
