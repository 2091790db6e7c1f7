"""Rows that share a sequence do not see each other, and count as if each were alone."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from hf_zero.errors import ConfigError
from hf_zero.recipes.causal import check_packing
from hf_zero.recipes.data.packing import Collate, best_fit_decreasing
from tests.distributed import run_ranks
from tests.recipes.data.conftest import chats, write_lines
from tests.recipes.data.tasks import mean_token_loss, run


@pytest.mark.quick
def test_every_row_is_in_one_pack_and_no_pack_is_too_long():
    lengths = torch.randint(1, 65, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    packs = best_fit_decreasing(lengths, 64)
    assert sorted(row for pack in packs for row in pack) == list(range(2000))
    assert all(sum(lengths[row] for row in pack) <= 64 for pack in packs)
    assert len(packs) <= 1.02 * -(-sum(lengths) // 64)  # of short rows there are enough to fill the gaps


def test_each_row_goes_where_it_leaves_the_least_room():
    assert best_fit_decreasing([3, 7, 2, 5, 4, 10], 10) == [[5], [1, 0], [3, 4], [2]]


def packed_rows(vocab_size: int) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    lengths = [[7, 1, 9], [3, 11]]  # of different sums: the second is padded
    ids = [torch.randint(4, vocab_size, (sum(parts),), generator=generator).tolist() for parts in lengths]
    return [
        {"input_ids": row, "position_ids": [p for length in parts for p in range(length)]}
        for row, parts in zip(ids, lengths, strict=True)
    ]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_a_packed_row_has_the_logits_that_it_has_alone(kind, attention, language_models):
    """Rows are longer than the sliding window of Mistral, five tokens, and shorter; one has a single token."""
    model = AutoModelForCausalLM.from_pretrained(language_models[kind], attn_implementation=attention).eval()
    check_packing(model)
    rows = packed_rows(model.config.vocab_size)
    batch = Collate(pad_token_id=0)(rows)
    assert "attention_mask" not in batch
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        for logits, row in zip(packed, rows, strict=True):
            starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
            for start, stop in pairwise([*starts, len(row["input_ids"])]):
                alone = model(torch.tensor([row["input_ids"][start:stop]])).logits[0]
                torch.testing.assert_close(logits[start:stop], alone, atol=1e-5, rtol=1e-5)


def test_batches_for_flash_attention_are_one_row_whose_positions_start_again():
    batch = Collate(pad_token_id=0, flatten=True)(packed_rows(50))
    assert batch["input_ids"].shape == (1, 31)
    positions = [*range(7), 0, *range(9), *range(3), *range(11)]
    assert batch["position_ids"].tolist() == [positions]
    assert (batch["labels"][0] == -100).tolist() == [position == 0 for position in positions]
    assert _is_packed_sequence(batch["position_ids"], batch_size=1)


def both_ways(folder: Path, cache: Path, model: Path) -> tuple[dict, dict]:
    argv = ["--model_name_or_path", str(model), "--train_file", str(folder / "rows.jsonl"), "--max_steps", "3"]
    argv += ["--test_file", str(folder / "rows.jsonl"), "--learning_rate", "0.01", "--zero_stage", "3"]
    argv += ["--max_length", "120", "--per_device_eval_batch_size", "4"]
    alone = run("sft", cache, [*argv, "--output_dir", str(folder / "a"), "--per_device_train_batch_size", "9"])
    argv += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"]
    packed = run("sft", cache, [*argv, "--output_dir", str(folder / "b"), "--packing"])
    return alone, packed


def test_packed_losses_are_the_token_weighted_losses_of_rows_alone(tmp_path, cache, language_models):
    """All 18 rows are in every step: nine on each of two ranks, or eight sequences, four times one on each."""
    write_lines(tmp_path / "rows.jsonl", chats())
    alone, packed = run_ranks(both_ways, 2, tmp_path, cache, language_models["Qwen3"])[0]
    assert any("18 rows packed into 8 sequences of up to 120 tokens" in note for note in packed["notes"])
    assert packed["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert packed["losses"][2] < packed["losses"][0]
    assert packed["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-4)
    argv = ["--model_name_or_path", str(tmp_path / "b"), "--train_file", str(tmp_path / "rows.jsonl")]
    rows = run("sft", cache, [*argv, "--output_dir", str(tmp_path / "c"), "--max_length", "120"], "data")["rows"]
    assert packed["eval_loss"] == pytest.approx(mean_token_loss(tmp_path / "b", rows), abs=1e-5)


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
