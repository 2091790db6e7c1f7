"""Rows that share a sequence do not see each other, and count as if each were alone."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_zero.errors import ConfigError
from hf_zero.recipes.models import check_packing
from tests.distributed import ranks
from tests.recipes.data.conftest import chats
from tests.recipes.data.tasks import mean_token_loss, run
from tests.recipes.preferences import write_rows


PARTS = [[7, 1, 9], [3, 11]]  # tokens of the rows of two sequences


def packed_rows(vocab_size: int) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(4, vocab_size, (sum(parts),), generator=generator).tolist() for parts in PARTS]
    return [{"input_ids": row, "seq_lengths": parts} for row, parts in zip(ids, PARTS, strict=True)]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_packed_row_has_the_logits_that_it_has_alone(kind, attention, language_models):
    """Rows are longer than the sliding window of Mistral, five tokens, and shorter; one has a single token."""
    model = AutoModelForCausalLM.from_pretrained(language_models[kind], attn_implementation=attention).eval()
    check_packing(model)
    rows = packed_rows(model.config.vocab_size)
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    ids = torch.tensor([token for row in rows for token in row["input_ids"]])
    assert batch["input_ids"].tolist() == [ids.tolist()]
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits[0]
        for part, logits in zip(ids.split(sum(PARTS, [])), packed.split(sum(PARTS, [])), strict=True):
            torch.testing.assert_close(logits, model(part[None]).logits[0], atol=1e-5, rtol=1e-5)


@ranks(2)
def test_packed_losses_are_the_token_weighted_losses_of_rows_alone(tmp_path, cache, language_models):
    """All 18 rows are in every step: nine on each of two ranks, or eight sequences, four on each, one by one or two in
    a batch."""
    rows = tmp_path / "rows.jsonl"
    if dist.get_rank() == 0:
        write_rows(rows, chats())
    dist.barrier()
    argv = [f"--model_name_or_path={language_models['Qwen3']}", f"--train_file={rows}", f"--test_file={rows}"]
    argv += ["--max_steps=3", "--learning_rate=0.01", "--zero_stage=3", "--max_length=120"]
    argv.append("--per_device_eval_batch_size=4")
    alone = run("sft", cache, [*argv, f"--output_dir={tmp_path / 'a'}", "--per_device_train_batch_size=9"])
    argv += ["--packing", f"--output_dir={tmp_path / 'b'}"]
    for size, steps in ((1, 4), (2, 2)):
        sizes = [f"--per_device_train_batch_size={size}", f"--gradient_accumulation_steps={steps}"]
        found = run("sft", cache, [*argv, *sizes])
        assert any("train: 18 rows packed into 8 sequences of up to 120 tokens" in note for note in found["notes"])
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert found["losses"][2] < found["losses"][0]
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-4)
    argv = [f"--model_name_or_path={tmp_path / 'b'}", f"--train_file={rows}", f"--output_dir={tmp_path / 'c'}"]
    rows = run("sft", cache, [*argv, "--max_length=120"], "data")["rows"]
    assert found["eval_loss"] == pytest.approx(mean_token_loss(tmp_path / "b", rows), abs=1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)), "attention mask"),
        (
            lambda: Qwen3NextForCausalLM(
                Qwen3NextConfig(
                    vocab_size=8,
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=2,
                    num_experts=2,
                    layer_types=["linear_attention", "full_attention"],
                )
            ),
            "linear_attention carry a state",
        ),
    ],
    ids=["Bloom", "Qwen3Next"],
)
def test_a_model_that_cannot_keep_rows_apart_is_refused(model, reason):
    with torch.device("meta"):
        built = model()
    with pytest.raises(ConfigError, match=reason):
        check_packing(built)
