"""The card of Trainer, with a section on ZeRO."""

import pytest
from huggingface_hub import ModelCard

from tests import models
from tests.trainer.harness import Rows, make


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
