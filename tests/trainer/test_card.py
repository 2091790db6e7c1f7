"""The card says what is known, nothing else, and is one that a hub accepts."""

import json
import re

import datasets
import pytest
import yaml
from transformers.training_args import ParallelMode

from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest, SavedRun
from hf_zero.engine import MemoryReport
from hf_zero.trainer.card import RunFacts, card_text, facts_of, facts_of_folder, fenced
from tests import models
from tests.trainer.harness import Rows, make


pytestmark = pytest.mark.quick


FACTS = RunFacts(
    model_name="tiny",
    base_model="someone/encoder",
    datasets=("docstrings",),
    dataset_ids=("someone/docstrings",),
    zero_stage=3,
    num_ranks=2,
    precision="bf16 with fp32 masters",
    train_seconds=61.25,
    num_steps=40,
    memory=(
        MemoryReport(2**20, 0, 2**21, 2**19, 0, 2**21, 2**21, 2**22),
        MemoryReport(2**20, 0, 2**21, 0, 0, 1, 1, 1),
    ),
    metrics={"eval_accuracy": 0.85342},
    hyperparameters={"learning_rate": 2e-5, "optimizer": "adamw | betas\n(0.9, 0.999)"},
    versions={"hf_zero": "0.1.0"},
    metadata={"language": "en", "license": None},
    tags=("mine",),
)


def head_of(card: str) -> dict:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_the_head_is_what_a_hub_reads():
    assert head_of(card_text(FACTS)) == {
        "library_name": "transformers",
        "base_model": "someone/encoder",
        "datasets": ["someone/docstrings"],
        "language": "en",
        "tags": ["mine", "hf_zero", "zero", "zero-stage-3"],
    }


def test_the_text_has_every_fact():
    text = card_text(FACTS)
    for line in (
        "# tiny",
        "This model was fine-tuned from `someone/encoder` on docstrings with ZeRO stage 3 by hf_zero.",
        "| ZeRO stage | 3 |",
        "| ranks | 2 |",
        "| precision | bf16 with fp32 masters |",
        "| training time | 61.2 s |",
        "| eval_accuracy | 0.8534 |",
        "| MiB per rank, measured | rank 0 | rank 1 | DDP |",
        "| optimizer state | 2.00 | 2.00 | 4.00 |",
        "| learning_rate | 2e-05 |",
        "| optimizer | adamw \\| betas (0.9, 0.999) |",
        "| hf_zero | 0.1.0 |",
    ):
        assert line in text.splitlines()


def test_what_data_and_files_say_is_shown_and_never_interpreted():
    html, image = "<script>alert('x')</script>", "![x](https://tracker/x.png)"
    facts = RunFacts(
        model_name=f"tiny {html}\n\n# two",
        base_model=f"base` {html} `",
        datasets=(html, image, "a\n\n<b>"),
        metrics={f"eval_{html}": 1.0, "eval_b": f"{image} `code`"},
        hyperparameters={html: f"a | {html}"},
        versions={"transformers": html},
    )
    text = card_text(facts).split("---\n", 2)[2]
    outside_code = re.sub(r"(?<!\\)`[^`\n]*(?<!\\)`", "", text)
    assert "<script>" in text and "<" not in outside_code, "in code it stays what it is"
    assert "![" not in text and "\n# two" not in text and "&lt;script&gt;alert('x')&lt;/script&gt;" in text
    assert "| &lt;script&gt;alert('x')&lt;/script&gt; | a \\| &lt;script&gt;" in text


@pytest.mark.parametrize("text", ["a: 1\n", "a: |\n  ```\n  <img src=x>\n", "````"])
def test_a_block_of_code_ends_where_its_text_ends(text):
    lines = fenced(text, "yaml").split("\n")
    fence = lines[0].removesuffix("yaml")
    assert set(fence) == {"`"} and lines[-1] == fence
    assert [line for line in lines[1:-1] if line.strip().startswith(fence)] == []
    assert "\n".join(lines[1:-1]) == text.rstrip()


def test_what_is_not_known_is_not_said():
    text = card_text(RunFacts(model_name="tiny"))
    assert head_of(text) == {"library_name": "transformers", "tags": ["hf_zero", "zero"]}
    assert text.split("---\n")[2] == "\n# tiny\n\nThis model was trained.\n"


def test_a_base_that_is_not_on_a_hub_is_named_in_the_text_only():
    text = card_text(RunFacts(model_name="tiny", base_model="local", base_on_hub=False))
    assert "base_model" not in head_of(text)
    assert "fine-tuned from `local`." in text


def test_a_trainer_tells_what_it_has_done(tmp_path):
    model = models.build("bert")
    model.config._name_or_path = str(tmp_path)
    trainer = make(2, tmp_path / "out", model, Rows("bert"), parts={"eval_dataset": Rows("bert", 4)})
    trainer.train()
    trainer.evaluate()
    facts = facts_of(trainer, model_name="mine", tags="extra")
    assert (facts.model_name, facts.zero_stage, facts.num_ranks, facts.num_steps) == ("mine", 2, 1, 4)
    assert (facts.base_model, facts.base_on_hub) == (tmp_path.name, False)  # no path of this machine
    assert facts.metrics.keys() == {"eval_loss", "train_loss"}
    assert facts.train_seconds > 0
    assert facts.memory == (trainer.memory_report(),)
    assert set(facts.tags) == {"extra", "generated_from_trainer"}
    trainer.create_model_card()
    assert "zero-stage-2" in head_of((tmp_path / "out" / "README.md").read_text(encoding="utf-8"))["tags"]


def test_data_without_a_name_is_not_named(tmp_path):
    rows = datasets.Dataset.from_list([Rows("bert")[index] for index in range(4)])
    trainer = make(2, tmp_path / "out", models.build("bert"), rows)
    assert rows.builder_name is None
    facts = facts_of(trainer)
    assert (facts.datasets, facts.dataset_ids) == ((), ())
    assert "datasets" not in head_of(card_text(facts))
    named = facts_of(trainer, dataset_tags="someone/rows")
    assert (named.datasets, named.dataset_ids) == (("someone/rows",), ("someone/rows",))


@pytest.mark.parametrize(
    ("folder", "base", "is_on_hub"),
    [
        ("minilm/model", "minilm/model", False),
        ("outputs/run/checkpoint-300", "run/checkpoint-300", False),
        ("models/llama", "llama", False),
        ("models--someone--encoder/snapshots/0a1b2c", "someone/encoder", True),
    ],
)
def test_a_base_in_a_folder_has_a_name_that_says_something(folder, base, is_on_hub, tmp_path):
    (tmp_path / folder).mkdir(parents=True)
    model = models.build("bert")
    model.config._name_or_path = str(tmp_path / folder)
    facts = facts_of(make(2, tmp_path / "out", model, Rows("bert")))
    assert (facts.base_model, facts.base_on_hub) == (base, is_on_hub)


def test_ranks_on_cpus_are_not_called_gpus(tmp_path, monkeypatch):
    trainer = make(2, tmp_path / "out", models.build("bert"), Rows("bert"))
    monkeypatch.setattr(type(trainer.args), "parallel_mode", ParallelMode.DISTRIBUTED)
    assert facts_of(trainer).hyperparameters["distributed_type"] == "multi-CPU"


def test_a_folder_tells_what_its_files_have(tmp_path):
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    state = {"global_step": 10, "log_history": [{"eval_loss": 0.5, "eval_runtime": 2.0, "epoch": 1.0}]}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    run = SavedRun(stage=1, num_ranks=4, weight_dtypes=["bfloat16"], groups=[], scalars={})
    Manifest.of_folder(checkpoint, run=run).write(checkpoint)
    (tmp_path / "config.json").write_text('{"transformers_version": "5.23.0"}', encoding="utf-8")
    facts = facts_of_folder(tmp_path, "tiny")
    assert (facts.zero_stage, facts.num_ranks, facts.precision) == (1, 4, "weights in bfloat16")
    assert (facts.num_steps, dict(facts.metrics)) == (10, {"eval_loss": 0.5})
    assert facts.versions["transformers"] == "5.23.0"


def test_a_folder_with_damaged_files_has_a_card_all_the_same(tmp_path):
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    (tmp_path / "trainer_state.json").write_text("{", encoding="utf-8")
    (tmp_path / MANIFEST_NAME).write_text("{", encoding="utf-8")
    assert "# tiny" in card_text(facts_of_folder(tmp_path, "tiny"))


def test_an_adapter_names_its_base_and_its_library(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}', encoding="utf-8")
    head = head_of(card_text(facts_of_folder(tmp_path, "tiny")))
    assert (head["base_model"], head["library_name"]) == ("a/b", "peft")
