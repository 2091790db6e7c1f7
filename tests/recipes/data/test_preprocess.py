"""Rows that are made ready once, and found by the run."""

import json
import os
from pathlib import Path

import pytest

from hf_zero.errors import ConfigError
from hf_zero.recipes.run import dry_run, preprocess
from hf_zero.recipes.run_config import RunConfig
from tests.recipes.data.conftest import chats, completions
from tests.recipes.preferences import write_rows
from tests.recipes.ranks import run_on_ranks


def kept(folder: Path) -> dict[str, int]:
    """The tables in a cache, and when each was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.arrow")}


@pytest.mark.full("slow")
def test_a_run_on_two_ranks_finds_the_rows_that_another_process_has_made(tmp_path, language_models):
    """Two data sets are read, checked, tokenized, mixed, cut and packed; nothing of that is done again."""
    write_rows(tmp_path / "chats.jsonl", chats())
    write_rows(tmp_path / "asked.jsonl", completions())
    entries = [{"path": str(tmp_path / name), "fraction": 1} for name in ("chats.jsonl", "asked.jsonl")]
    argv = ["sft", "--model_name_or_path", str(language_models["Llama"]), "--datasets", *map(json.dumps, entries)]
    argv += ["--dataset_mixing", "interleave", "--packing", "--max_length", "64", "--max_steps", "1"]
    argv += ["--test_file", str(tmp_path / "asked.jsonl"), "--report_to", "none", "--save_strategy", "no"]
    argv += ["--output_dir", "out", "--samples", "0"]
    [result] = run_on_ranks([*argv, "--preprocess"], tmp_path, num_ranks=1)
    assert result.code == 0, result.err
    assert f"preprocessed: the run finds these rows in {tmp_path}/cache" in result.out
    assert not (tmp_path / "out").exists()
    before = kept(tmp_path / "cache")
    assert len(before) > 4
    first, second = run_on_ranks(argv, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert kept(tmp_path / "cache") == before
    counts = [line for line in result.out.splitlines() if line.startswith(("train", "test:"))]
    assert len(counts) > 7 and [line for line in counts if line not in first.out] == []
    os.utime(tmp_path / "chats.jsonl", ns=(0, 0))  # the file is another one now
    assert all(rank.code == 0 for rank in run_on_ranks([*argv, "--overwrite_output_dir"], tmp_path))
    assert kept(tmp_path / "cache").keys() > before.keys()


@pytest.mark.quick
def test_rows_of_a_stream_cannot_be_made_ready():
    with pytest.raises(ConfigError, match="--preprocess: dataset_streaming reads rows while training goes on"):
        preprocess(RunConfig.parse("sft", ["--dataset_streaming", "--preprocess"]))


@pytest.mark.quick
def test_nothing_is_asked_of_the_device_of_the_run_and_nothing_is_computed_for_it(monkeypatch):
    """What a reference model gives is not computed here: the run would find it, in another precision."""
    made = []

    def refuse(settings):
        made.append({**vars(settings.arguments), **settings.training})
        raise ConfigError("seen")

    monkeypatch.setattr(RunConfig, "training_arguments", refuse)
    asked = ["--bf16=true", "--zero_autocast=true", "--tf32=true", "--attn_implementation=flash_attention_2"]
    for task, flags in (("dpo", ["--precompute_ref_log_probs", *asked]), ("grpo", ["--use_vllm"])):
        for do in (preprocess, dry_run):
            with pytest.raises(ConfigError, match="seen"):
                do(RunConfig.parse(task, flags))
    changed = {"precompute_ref_log_probs": False, "use_cpu": True, "bf16": False, "zero_autocast": False}
    assert made[0] == made[0] | changed | {"tf32": None, "attn_implementation": None}
    assert made[1]["precompute_ref_log_probs"] is made[2]["use_vllm"] is made[3]["use_vllm"] is False
