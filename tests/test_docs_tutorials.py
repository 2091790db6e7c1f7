"""docs/tutorial.md and the pages of docs/tutorials run from their first block to their last, each in a folder of its
own. The first runs as it is.

For the others, models of a few thousand weights stand for those of the hub, one process for two, and two steps for
all. The run is interrupted in its first step, and gone on with by the same command, as the pages say.
"""

import contextlib
import io
import re
import shlex
import signal
from pathlib import Path

import pytest

from hf_zero.recipes.cli import main
from hf_zero.recipes.tasks import TASKS
from tests.docs import DOCS, fenced_blocks, text_of
from tests.recipes import conftest, test_classify
from tests.recipes.ranks import run_on_ranks
from tests.tiers import in_core


pytest.importorskip("trl")

tiny_llama, tiny_model, tiny_vit = conftest.tiny_llama, conftest.tiny_model, test_classify.tiny_vit

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((DOCS / "tutorials").glob("*.md"))}
IN_GRPO = "rloo"  # which has no page of its own
FEW = ["--max_steps=2", "--logging_steps=1", "--use_cpu=true", "--report_to=none"]


@pytest.mark.quick
def test_each_task_has_a_page():
    assert {*PAGES, IN_GRPO} == set(TASKS) and f"`{IN_GRPO}` takes the same command" in " ".join(PAGES["grpo"].split())


class Reader:
    """Does what a page says.

    Args:
        folder (`Path`): where.
        models (`dict[str, Path]`): what stands for a name of the hub.
    """

    def __init__(self, folder: Path, models: dict[str, Path]):
        self._folder, self._models = folder, models
        self._said = ""  # by what was run last

    def read(self, page: str) -> list[str]:
        """Does all of a page. Gives the tasks and tools that were run."""
        done, end = [], 0
        for block in fenced_blocks(page):
            start = page.index(block.text, end)
            names = re.findall(r"`([\w-]+\.(?:jsonl|py))`", page[end:start])
            end = start + len(block.text)
            if names and block.language in ("json", "python"):
                (self._folder / names[-1]).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(block.text, {})
                assert "0." in out.getvalue(), "a pipeline gives a score"
            elif block.language == "bash":
                done.append(self._run(block.text))
            elif re.fullmatch(r"(\S+\.jpg\n)+", block.text):
                self._make_images(block.text.split())
            else:
                assert block.language == "text"
                check_said(block.text, self._said)
        return done

    def _run(self, command: str) -> str:
        for name in sorted(self._models, key=len, reverse=True):
            command = command.replace(f" {name} ", f" {self._models[name]} ")
        program, *argv = shlex.split(re.sub(r"--num_processes \d+", "", command.replace("\\\n", " ")))
        assert program == "hf-zero"
        if argv[0] in TASKS:
            [stopped] = run_on_ranks([*argv, *FEW], self._folder, 1, stop_in=1)
            assert stopped.code == 128 + signal.SIGTERM, stopped.err
            [ended] = run_on_ranks([*argv, *FEW], self._folder, 1)
            assert ended.code == 0, ended.err
            self._said = stopped.out + ended.out
            return argv[0]
        few = [] if "--max_new_tokens" in argv else ["--max_new_tokens=8"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*argv, *few, "--use_cpu=true"]) == 0
        assert out.getvalue().endswith("\n")
        self._said = out.getvalue()
        return argv[0]

    def _make_images(self, names: list[str]) -> None:
        from PIL import Image

        for index, name in enumerate(names):
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 12), (40 * index, 90, 30)).save(self._folder / name)


def check_said(lines: str, said: str) -> None:
    """Whether the lines were printed in this order. `...` stands for anything."""
    at = 0
    for line in lines.splitlines():
        found = re.compile(".*".join(map(re.escape, line.split("...")))).search(said, at)
        assert found, f"{line!r} is not said, or not in this order: {said}"
        at = found.end()


@pytest.fixture(scope="module")
def models(tiny_llama, tiny_model, tiny_vit, tmp_path_factory) -> dict[str, Path]:
    """What stands for the models of the hub that the pages name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    language_model = tmp_path_factory.mktemp("language_model")
    AutoModelForCausalLM.from_pretrained(tiny_llama, max_position_embeddings=2048).save_pretrained(language_model)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(language_model)
    sizes = dict.fromkeys(("135M-Instruct", "135M", "360M"), language_model)
    return {
        **{f"HuggingFaceTB/SmolLM2-{size}": folder for size, folder in sizes.items()},
        "answerdotai/ModernBERT-base": tiny_model,
        "google/vit-base-patch16-224-in21k": tiny_vit,
    }


@pytest.mark.parametrize("name", in_core(["sft"], [*PAGES, IN_GRPO]))
def test_a_page_runs_from_its_rows_to_an_answer(name, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGES["grpo"].replace("hf-zero grpo", "hf-zero rloo") if name == IN_GRPO else PAGES[name]
    done = Reader(tmp_path, models).read(page)
    assert done[0] == name and (name in ("reward", "classify") or done[-1] in ("chat", "generate"))


def test_the_first_tutorial_runs_from_rows_to_the_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, names, outputs = text_of("tutorial.md"), {}, []
    for block in fenced_blocks(text):
        if block.language == "python":
            exec(block.text, names)
            continue
        program, *arguments = shlex.split(block.text.replace("\\\n", " "))
        assert (block.language, program) == ("bash", "hf-zero")
        num_ranks = int(arguments[arguments.index("--num_processes") + 1]) if "--num_processes" in arguments else 1
        ended, *_ = run_on_ranks(arguments, tmp_path, num_ranks)
        assert ended.code == 0, ended.err
        outputs.append(ended.out)
    left, start = re.search(r"`checkpoint-(\d+)`", text)[1], re.search(r"step (\d+):", text)[1]
    first, second, answer = outputs
    assert int(start) == int(left) + 1
    assert f"checkpoint-{left}" not in first and f"checkpoint-{left}" in second
    assert (tmp_path / "capitals" / "report.html").is_file()
    promised = re.search(r"It prints `(.+)`\.", text)[1]
    assert capsys.readouterr().out.splitlines()[-1] == promised
    assert promised.endswith(f"? {answer.strip()}")
