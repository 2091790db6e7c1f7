"""Language models of a few thousand random weights, a tokenizer trained on local text, and rows in all formats."""

from pathlib import Path

import pytest

from tests.recipes.conftest import byte_level_tokenizer


NOUNS = "cat dog bird fish horse cow".split()
SOUNDS = "purrs barks sings swims runs eats".split()
SENTENCES = [
    f"The {noun} {sound} in the {place}."
    for noun, sound in zip(NOUNS, SOUNDS, strict=True)
    for place in ("house", "garden", "morning")
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """What `datasets` keeps is each test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE, with ChatML's tokens but without a chat template."""
    texts = [*SENTENCES, "user assistant system"] * 3
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
    return byte_level_tokenizer(texts, special, eos_token="<|endoftext|>", pad_token="<pad>")


@pytest.fixture(scope="session")
def language_models(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """Folders of a Llama, a Qwen3 and a Mistral with a sliding window, each with the tokenizer."""
    import torch
    import transformers

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    own = {"Llama": {}, "Qwen3": {"head_dim": 8}, "Mistral": {"sliding_window": 5, "head_dim": 8}}
    folders = {}
    for name, more in own.items():
        folders[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def chats() -> list[dict]:
    """Chats of one and of two turns."""
    rows = []
    for number, sentence in enumerate(SENTENCES):
        turns = [
            {"role": "user", "content": f"Tell of number {number}"},
            {"role": "assistant", "content": sentence},
            {"role": "user", "content": "More?"},
            {"role": "assistant", "content": SENTENCES[number - 1]},
        ]
        rows.append({"messages": turns[: 2 + 2 * (number % 2)]})
    return rows


def completions() -> list[dict]:
    return [{"prompt": " ".join(s.split()[:3]), "completion": " " + " ".join(s.split()[3:])} for s in SENTENCES]
