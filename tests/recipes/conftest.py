"""A model and a data set small enough to train in seconds."""

import csv
from pathlib import Path

import pytest

from tests.recipes.preferences import preferences


WORDS = "the a soup was cold hot fine and waiter kind film long dull bright actor sang".split()
TEXTS = {
    "food": "the soup was {} and the waiter was {}",
    "film": "the film was {} and the actor sang a {} song",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a two-layer BERT of a few thousand random weights, and a tokenizer of twenty words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny_model")
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def csv_file(tmp_path_factory) -> Path:
    """Two classes, seventy distinct texts."""
    adjectives = ["cold", "hot", "fine", "long", "dull", "bright", "kind"]
    texts = [(text.format(a, b), label) for label, text in TEXTS.items() for a in adjectives for b in adjectives]
    return write_csv(tmp_path_factory.mktemp("data") / "rows.csv", [("text", "label"), *texts])


@pytest.fixture
def command_line(tmp_path, tiny_model, csv_file, monkeypatch, capsys):
    """The command line, with a model, data and an `output_dir` (`argv`). It gives the exit code, what was said of a
    fault, and whether a run would have started; none is."""
    from hf_zero.accelerator.environment import LAUNCHER_VARIABLES
    from hf_zero.recipes.cli import main

    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    started = []
    monkeypatch.setattr("hf_zero.recipes.run.run_task", started.append)

    def call(task: str, *more: str) -> tuple[int, str, bool]:
        started.clear()
        code = main([task, *call.argv, *more])
        return code, capsys.readouterr().err, bool(started)

    call.argv = [f"--model_name_or_path={tiny_model}", f"--train_file={csv_file}", f"--output_dir={tmp_path / 'out'}"]
    return call


def write_csv(path: Path, rows: list[tuple]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return path


def byte_level_tokenizer(texts: list[str], special: list[str], **tokens: str):
    """A byte-level BPE that is trained on texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=360, **options))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **tokens)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Two layers of a few thousand weights, and a tokenizer trained on the rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, texts = tmp_path_factory.mktemp("tiny_llama"), [text for row in preferences(100) for text in row.values()]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = byte_level_tokenizer(texts, [*special.values()], **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
