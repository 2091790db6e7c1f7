"""`list`, and ready-made recipes that are found by name."""

import re

import pytest
import yaml

from hf_zero.errors import ConfigError
from hf_zero.recipes import listing, parser
from hf_zero.recipes.cli import main
from hf_zero.recipes.run_config import RunConfig


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_list_prints_every_recipe_with_its_first_comment(capsys):
    assert main(["list"]) == 0
    output, found = capsys.readouterr().out, parser.ready_made()
    assert "quickstart.yaml" in found
    for name, path in found.items():
        comment = listing.first_comment(path)
        assert comment, f"{name} begins with no comment"
        assert re.search(rf"^  {re.escape(name)} +{re.escape(comment)}$", output, re.MULTILINE)


def test_a_ready_made_recipe_is_found_in_any_folder_unless_a_file_there_has_its_name(tmp_path):
    for output_dir in ("outputs/quickstart", "mine"):
        settings = RunConfig.parse("classify", ["--config", "quickstart.yaml"])
        assert settings.training["output_dir"] == output_dir
        (tmp_path / "quickstart.yaml").write_text(yaml.safe_dump({"output_dir": "mine"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("quick-start.yaml", r"a ready-made recipe; did you mean quickstart\.yaml\?$"),
        ("recipes/quickstart.yaml", r"a ready-made recipe; did you mean quickstart\.yaml\?$"),
        ("nowhere.yaml", "no such file, nor a ready-made recipe$"),
    ],
)
def test_of_a_file_that_is_not_there_the_nearest_recipe_is_named(config, told):
    with pytest.raises(ConfigError, match=rf"^--config {re.escape(config)}: .*{told}"):
        RunConfig.parse("classify", ["--config", config])


def test_an_installed_package_has_its_files_beside_it(tmp_path):
    """The first folder that has any counts, which a checkout has not."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.yaml").touch()
    folders = (tmp_path / "nowhere", tmp_path / "files", *parser.FOLDERS)
    assert parser.ready_made(folders) == {"mine.yaml": tmp_path / "files" / "mine.yaml"}
    assert parser.ready_made([]) == {}
