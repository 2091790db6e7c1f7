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


CHECKPOINTING = {
    "no checkpointing": {},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def _compiles(folder, model, stage, backend, settings):
    name, build = MODELS[model]
    counters = watch_graphs()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3, **settings}

    def run(kind, **more):
        torch.manual_seed(0)
        parts = {"eval_dataset": Rows(name, 4, seed=1)}
        return train(kind, folder, name, model=build().train(), parts=parts, **settings, **more)

    compiled = run(stage, torch_compile_backend=backend)
    found = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    plain = run(stage if settings.get("bf16") else PLAIN)
    assert_learned(plain, 3)
    # bf16 keeps 8 bits: what is not the same bit for bit differs by 2^-8, and inductor keeps fp32 between operations
    rtol = 2**-6 if settings.get("bf16") else 1e-5
    assert_close(compiled, plain, f"stage {stage}, compiled, and not", rtol=rtol, atol=1e-4 if rtol > 1e-5 else 1e-6)
    return found


# One graph for training and one for evaluation, and others where transformers leaves out a mask that masks nothing.
MAX_GRAPHS = 4
WAYS = [(stage, precision, way) for stage in (1, 2, 3) for precision in ("fp32", "bf16") for way in CHECKPOINTING]
IN_CORE = [(3, "fp32", "reentrant checkpointing")]


@pytest.mark.support("torch.compile, {checkpointing}, {precision}", area="Training features")
@pytest.mark.parametrize(
    "stage, precision, checkpointing",
    in_core(IN_CORE, WAYS),
)
def test_compiled_blocks_train_as_eager_ones(tmp_path, stage, precision, checkpointing):
    settings = {**CHECKPOINTING[checkpointing], "bf16": precision == "bf16"}
    found = run_new_ranks(_compiles, 2, str(tmp_path), "Llama", stage, "aot_eager", settings, timeout=240)
    for num_graphs, breaks in found:
        assert 2 <= num_graphs <= MAX_GRAPHS and not breaks, "the three blocks share them"


@pytest.mark.full("slow")
@pytest.mark.support("torch.compile, {model}", area="Training features")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["LoRA", "T5", "dropout"])
def test_compiled_models_train_as_eager_ones(tmp_path, model, stage):
    found = run_new_ranks(_compiles, 2, str(tmp_path), model, stage, "aot_eager", {}, timeout=240)
    # T5 has two stacks, whose first blocks have a position bias of their own
    assert all(num_graphs <= 4 * MAX_GRAPHS and not breaks for num_graphs, breaks in found)


@pytest.mark.full("slow")
@pytest.mark.support("torch.compile, checkpointing and dropout", area="Training features")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recomputation_in_a_graph_draws_the_same_dropout(tmp_path, stage):
    run_new_ranks(
        _compiles, 2, str(tmp_path), "dropout", stage, "aot_eager", CHECKPOINTING["checkpointing"], timeout=240
    )


@pytest.mark.full("slow")
@pytest.mark.support("torch.compile, inductor, {precision}", area="Training features")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_inductor_trains_as_eager_blocks(tmp_path, stage, precision):
    settings = {"bf16": precision == "bf16", "torch_compile_mode": "default", **CHECKPOINTING["checkpointing"]}
    found = run_new_ranks(_compiles, 2, str(tmp_path), "Llama", stage, "inductor", settings, timeout=560)
    assert not any(breaks for _, breaks in found)


def test_options_come_from_flags_and_from_accelerate_launch(monkeypatch):
    chosen = TorchDynamoPlugin(backend="inductor", mode="max-autotune")
    assert compile_options(chosen).items() >= {"backend": "inductor", "mode": "max-autotune"}.items()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    assert compile_options(TorchDynamoPlugin()) == {"backend": "aot_eager", "fullgraph": True, "disable": False}
