"""`pretrain` of a new model: made of a config alone, with the same random weights on any number of ranks."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, ViTConfig

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.recipes.models import config_of, load_language_model, tokenizer_of
from hf_zero.recipes.output_dir import check_start
from hf_zero.recipes.run_config import RunConfig
from hf_zero.recipes.tasks import TASKS
from tests.distributed import run_ranks
from tests.recipes.data.conftest import SENTENCES
from tests.recipes.data.tasks import run
from tests.recipes.preferences import write_rows


OVERRIDES = "num_hidden_layers=3,hidden_size=48"


@pytest.fixture
def argv(tmp_path, language_models, tokenizer):
    """A config file whose special tokens are others than the tokenizer's, and a tokenizer without a model."""
    config = json.loads((language_models["Qwen3"] / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "new.json").write_text(json.dumps({**config, "eos_token_id": 99, "pad_token_id": None}))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path / "rows.jsonl", [{"text": " ".join(SENTENCES)}] * 8)
    flags = [f"--config_name={tmp_path / 'new.json'}", f"--config_overrides={OVERRIDES}"]
    flags += [f"--tokenizer_name={tmp_path / 'tokenizer'}", f"--train_file={tmp_path / 'rows.jsonl'}"]
    return [*flags, "--max_length=64", "--learning_rate=0.01", "--max_steps=3", "--seed=7"]


@pytest.mark.full("slow")
def test_a_new_model_begins_and_trains_alike_on_one_rank_and_on_two(argv, tmp_path, cache, tokenizer):
    runs = {1: ["--zero_stage=0", "--per_device_train_batch_size=4"]}
    runs[2] = ["--zero_stage=3", "--per_device_train_batch_size=2"]
    losses = {}
    for num_ranks, more in runs.items():
        more = [*more, f"--output_dir={tmp_path / str(num_ranks)}"]
        losses[num_ranks] = run_ranks(run, num_ranks, "pretrain", cache, [*argv, *more])[0]["losses"]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][0] == pytest.approx(math.log(len(tokenizer)), rel=0.1) and losses[1][2] < losses[1][0]
    config = AutoConfig.from_pretrained(tmp_path / "2")
    assert (config.num_hidden_layers, config.hidden_size, len(config.layer_types)) == (3, 48, 3)
    assert config.eos_token_id == tokenizer.eos_token_id
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "2", output_loading_info=True)
    assert not any(report.values()), report
    assert AutoTokenizer.from_pretrained(tmp_path / "2")("The cat").input_ids


def test_the_token_that_ends_texts_is_learned_where_it_pads_too(argv, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = RunConfig.parse("pretrain", argv)
    plain = SimpleNamespace(bf16=False, fp16=False)
    model = load_language_model(settings.arguments, plain, tokenizer_of(settings.arguments))
    sharded = hf_zero.shard(model, stage=0)
    # not tied: what the embedding is taught, it is taught as the input
    embedding, ids = model.get_input_embeddings().weight, torch.tensor([[tokenizer.eos_token_id, 5, 6, 7]])
    assert model.get_output_embeddings().weight is not embedding
    assert embedding[tokenizer.eos_token_id].abs().min() > 0
    model(input_ids=ids, labels=ids).loss.backward()
    assert sharded.full_grad("model.embed_tokens.weight")[tokenizer.eos_token_id].abs().min() > 0


def test_what_follows_from_a_value_follows_from_the_new_one(argv, tmp_path, language_models):
    stored = json.loads((language_models["Llama"] / "config.json").read_text(encoding="utf-8"))
    del stored["head_dim"]
    (tmp_path / "llama.json").write_text(json.dumps(stored))
    more = [f"--config_name={tmp_path / 'llama.json'}", "--config_overrides=hidden_size=64"]
    config = config_of(RunConfig.parse("pretrain", [*argv, *more]).arguments)
    assert (config.hidden_size, config.head_dim, config._name_or_path) == (64, 16, "")
    stored = {**config.to_dict(), "model_type": "smollm3", "no_rope_layers": [1, 0], "layer_types": None}
    stored["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "llama.json").write_text(json.dumps(stored))
    more[1] = "--config_overrides=num_hidden_layers=5"
    config = config_of(RunConfig.parse("pretrain", [*argv, *more]).arguments)
    assert config.no_rope_layers == [1, 1, 1, 0, 1] and "quantization_config" not in config.to_dict()


@pytest.mark.quick(cases=2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokenizer_name="], "tokenizer_name: not set; name the tokenizer of the new model"),
        (["--model_name_or_path=MODEL"], "config_name and model_name_or_path .*: a new model has random weights"),
        (["--config_name="], "config_overrides: is that of a new model; give config_name too, or leave it out"),
        (["--config_name=nowhere"], "config_name 'nowhere': no such folder"),
        (["--config_overrides=layers=3"], "config_overrides 'layers=3': key layers .*; write key=value,key=value"),
        (["--config_overrides=vocab_size=9"], r"has \d+ tokens, the new model 9; give --config_overrides vocab_size="),
        (
            ["--tokenizer_name=nowhere"],
            r"tokenizer_name nowhere: its tokenizer does not load .*; give the folder or hub",
        ),
        (
            ["--config_name=MODEL", "--config_overrides=num_attention_heads=7"],
            r"num_attention_heads=7': .*\(32\).*\(7\).*; give what such a model can have",
        ),
        (
            ["--config_overrides=hidden_act=none"],
            r"config_name .*new.json: does not load as a causal .*KeyError\('none'\)",
        ),
        (
            ["--config_name=uneven.json", "--config_overrides="],
            r"uneven.json: its config does not load .*\(32\).*\(7\)",
        ),
        (
            ["--config_name=image.json", "--config_overrides="],
            "config_name image.json: does not load as a causal langu",
        ),
        (["--use_peft"], "use_peft: an adapter is trained on a model with weights, and config_name makes a new one"),
        (["--max_length=4096"], "max_length 4096: .*new.json has 128 positions"),
    ],
)
def test_a_new_model_that_cannot_be_made_is_refused_before_a_process_is_started(
    argv, given, message, tmp_path, language_models, monkeypatch
):
    folder = shutil.copytree(language_models["Llama"], tmp_path / "model")
    given = [flag.replace("MODEL", str(folder)) for flag in given]
    LlamaConfig(hidden_size=32, num_attention_heads=4).to_json_file(tmp_path / "uneven.json")
    stored = (tmp_path / "uneven.json").read_text(encoding="utf-8")
    (tmp_path / "uneven.json").write_text(stored.replace('"num_attention_heads": 4', '"num_attention_heads": 7'))
    ViTConfig(hidden_size=16, num_attention_heads=2).to_json_file(tmp_path / "image.json")
    monkeypatch.chdir(tmp_path)
    settings = RunConfig.parse("pretrain", [*argv, "--output_dir=out", *given])
    with pytest.raises(ConfigError, match=message) as caught:
        TASKS["pretrain"].load().check(settings.arguments, settings.training)
        check_start(settings)
    assert "\n" not in str(caught.value)
