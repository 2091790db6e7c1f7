"""`--torch_compile`: blocks are compiled at every stage, in fp32 and bf16, with and without gradient checkpointing."""

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin

from hf_zero.accelerator.accelerator import compile_options
from tests import models
from tests.distributed import run_new_ranks
from tests.engine.test_compilation import watch_graphs
from tests.tiers import in_core
from tests.trainer.harness import PLAIN, Rows, assert_close, assert_learned, train
from tests.trainer.test_features import dropping, with_lora


MODELS = {
    "Llama": ("llama", models.llama),
    "T5": ("t5", models.t5),
    "LoRA": ("llama", with_lora),
    "dropout": ("bert", dropping),
}


def _checkpointing(use_reentrant: bool) -> dict:
    kwargs = {"use_reentrant": use_reentrant}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}


WAYS = {
    "no checkpointing": {},
    "checkpointing": _checkpointing(False),
    "reentrant checkpointing": _checkpointing(True),
}
# The model, the backend and settings.
CASES = {
    f"{way}, {precision}": ("Llama", "aot_eager", {**settings, "bf16": precision == "bf16"})
    for way, settings in WAYS.items()
    for precision in ("fp32", "bf16")
}
CASES |= {model: (model, "aot_eager", {}) for model in ("LoRA", "T5", "dropout")}
CASES |= {"checkpointing and dropout": ("dropout", "aot_eager", WAYS["checkpointing"])}
CASES |= {
    f"inductor, {precision}": (
        "Llama",
        "inductor",
        {"torch_compile_mode": "default", "bf16": precision == "bf16", **WAYS["checkpointing"]},
    )
    for precision in ("fp32", "bf16")
}
# One graph for training and one for evaluation, and others where transformers leaves out a mask that masks nothing.
# T5 has two stacks, whose first blocks have a position bias of their own.
MAX_GRAPHS = {"Llama": 4}
OF_OTHERS = 16


def _compiles(folder, case, stage):
    model, backend, settings = CASES[case]
    name, build = MODELS[model]
    counters = watch_graphs()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3, **settings}

    def run(kind, **more):
        torch.manual_seed(0)
        parts = {"eval_dataset": Rows(name, 4, seed=1)}
        return train(kind, folder, name, model=build().train(), parts=parts, **settings, **more)

    compiled = run(stage, torch_compile_backend=backend)
    num_graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    assert 2 <= num_graphs <= MAX_GRAPHS.get(model, OF_OTHERS) and not breaks, "the blocks share them"
    plain = run(stage if settings.get("bf16") else PLAIN)
    assert_learned(plain, 3)
    # bf16 keeps 8 bits: what is not the same bit for bit differs by 2^-8, and inductor keeps fp32 between operations
    rtol = 2**-6 if settings.get("bf16") else 1e-5
    assert_close(compiled, plain, f"stage {stage}, compiled, and not", rtol=rtol, atol=1e-4 if rtol > 1e-5 else 1e-6)


@pytest.mark.support("torch.compile, {case}", area="Training features")
@pytest.mark.parametrize(
    "case, stage",
    in_core([("reentrant checkpointing, fp32", 3)], [(case, stage) for case in CASES for stage in (1, 2, 3)]),
)
def test_compiled_blocks_train_as_eager_ones(tmp_path, case, stage):
    run_new_ranks(_compiles, 2, str(tmp_path), case, stage, timeout=560)


def test_options_come_from_flags_and_from_accelerate_launch(monkeypatch):
    chosen = TorchDynamoPlugin(backend="inductor", mode="max-autotune")
    assert compile_options(chosen).items() >= {"backend": "inductor", "mode": "max-autotune"}.items()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    assert compile_options(TorchDynamoPlugin()) == {"backend": "aot_eager", "fullgraph": True, "disable": False}
