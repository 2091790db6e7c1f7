"""sentence-transformers' trainer, which writes a pipeline of modules by a method of its own."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import check_checkpoint
from hf_zero.errors import MissingCheckpointError
from tests.compare import assert_equal
from tests.distributed import ranks
from tests.trainer.harness import PLAIN, SETTINGS, Run, compare, record, reset_accelerate, seed_everything


pytestmark = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)

WORDS = "a cat dog sat ran on the mat hill far near and saw it".split()
NUM_ROWS = 24


@pytest.fixture
def encoder(tmp_path) -> str:
    """The folder of a tiny BERT with its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    path = tmp_path / "encoder"
    path.mkdir()
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 20}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=5 + len(WORDS), max_position_embeddings=24, **sizes)).save_pretrained(path)
    return str(path)


def _model(encoder: str):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(1)
    modules = [Transformer(encoder), Pooling(16), Dense(16, 9), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def _rows(seed: int = 0):
    from datasets import Dataset

    draw = torch.Generator().manual_seed(seed)

    def sentence() -> str:
        length = int(torch.randint(2, 9, (), generator=draw))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=draw))

    return Dataset.from_dict({name: [sentence() for _ in range(NUM_ROWS)] for name in ("anchor", "positive")})


LOSSES = {
    "in-batch negatives": ("MultipleNegativesRankingLoss", {}),
    "gathered negatives": ("MultipleNegativesRankingLoss", {"gather_across_devices": True}),
    "gradient cache": ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 2}),
    "gathered gradient cache": (
        "CachedMultipleNegativesRankingLoss",
        {"mini_batch_size": 2, "gather_across_devices": True},
    ),
}


def _make(kind, folder, encoder: str, loss: str = "in-batch negatives", *, parts=None, **settings):
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses
    from transformers import PrinterCallback

    from tests.trainer.sentences import ZeroSentenceArguments, ZeroSentenceTrainer

    reset_accelerate()
    seed_everything()
    model = _model(encoder)
    settings = {**SETTINGS, "per_device_train_batch_size": 4, "output_dir": str(folder), **settings}
    if kind == PLAIN:
        settings = {key: value for key, value in settings.items() if not key.startswith("zero_")}
        cls, args = SentenceTransformerTrainer, SentenceTransformerTrainingArguments(use_cpu=True, **settings)
    else:
        cls, args = ZeroSentenceTrainer, ZeroSentenceArguments(zero_stage=kind, **settings)
    name, options = LOSSES[loss]
    made = getattr(losses, name)(model, **options)
    trainer = cls(model=model, args=args, train_dataset=_rows(), loss=made, **(parts or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer


def _train(kind, folder, encoder, loss="in-batch negatives", resume=None, **settings) -> Run:
    trainer = _make(kind, folder, encoder, loss, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return record(trainer)


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("loss", LOSSES)
@ranks(2, timeout=400)
def test_each_loss_trains_as_under_ddp(tmp_path, encoder, loss):
    compare(lambda kind: _train(kind, f"{tmp_path}/{kind}", encoder, loss), stages=(0, 1, 2, 3), equal=())


def _loaded(folder: str):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu")


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "hub_token": "hf_secret"}


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize(
    "stage, settings", [(3, {"zero_async_save": True}), (1, {"batch_sampler": "no_duplicates"}), (2, {"bf16": True})]
)
@ranks(2, timeout=400)
def test_what_is_saved_can_be_loaded_and_gone_on_from(tmp_path, encoder, stage, settings):
    trainer = _make(stage, f"{tmp_path}/out", encoder, **SAVING, **settings)
    trainer.train()
    whole = record(trainer)
    trainer.save_model(f"{tmp_path}/model")
    sentences = _rows(seed=1)["anchor"]
    with hf_zero.gathered(trainer.model):
        wanted = trainer.model.eval().encode(sentences, convert_to_tensor=True)
        weights = {name: p.clone() for name, p in trainer.model.named_parameters()}
    torch.distributed.barrier()
    loaded = _loaded(f"{tmp_path}/model")
    if "bf16" not in settings:
        assert torch.equal(loaded.encode(sentences, convert_to_tensor=True), wanted)
    for name, values in loaded.named_parameters():
        assert values.dtype is torch.float32 and values.to(weights[name].dtype).equal(weights[name]), name
    for name in (f"{tmp_path}/model", f"{tmp_path}/out/checkpoint-2"):
        assert b"hf_secret" not in Path(name, "training_args.bin").read_bytes()
    assert not Path(tmp_path, "model", "parameters.safetensors").exists()
    check_checkpoint(tmp_path / "out" / "checkpoint-2")
    # the second epoch begins with the fourth step
    for step in (2, 4):
        resumed = _train(
            stage, f"{tmp_path}/{step}", encoder, resume=f"{tmp_path}/out/checkpoint-{step}", **SAVING, **settings
        )
        assert_equal(resumed, whole, f"resumed at step {step}")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"modules.json", "1_Pooling", "2_Dense", "model.safetensors", "tokenizer.json"} <= names
    kinds = [
        module["type"].rpartition(".")[2] for module in json.loads((tmp_path / "model" / "modules.json").read_text())
    ]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]


def _evaluates(folder: str, encoder: str, kind):
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    rows = _rows(seed=2)[:7]  # of which one rank embeds four, and the other three
    scores = [index / 7 for index in range(7)]
    evaluator = EmbeddingSimilarityEvaluator(rows["anchor"], rows["positive"], scores, batch_size=1)
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "pearson_cosine"}
    parts = {"evaluator": evaluator, "eval_dataset": _rows(seed=3).select(range(5))}
    trainer = _make(kind, f"{folder}/{kind}", encoder, parts=parts, **settings)
    trainer.train()
    run = record(trainer)
    run.evals += [entry["eval_pearson_cosine"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return run


@pytest.mark.full("slow")
@ranks(2, timeout=400)
def test_an_evaluator_measures_as_under_ddp(tmp_path, encoder):
    compare(lambda kind: _evaluates(tmp_path, encoder, kind), stages=(1, 3), equal=())


@ranks(2)
def test_a_checkpoint_of_the_trainer_without_zero_is_refused(tmp_path, encoder):
    _make(PLAIN, tmp_path / "plain", encoder, save_strategy="steps", save_steps=2, max_steps=2).train()
    torch.distributed.barrier()
    with pytest.raises(MissingCheckpointError, match="has no parameters.safetensors, .* load the model from it"):
        _make(3, tmp_path / "out", encoder).train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
