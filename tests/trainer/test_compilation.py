"""`--torch_compile`: blocks are compiled at every stage, in fp32 and bf16, with and without gradient checkpointing."""

import pytest
import torch

from tests import models
from tests.distributed import run_ranks
from tests.engine.test_compilation import watch_graphs
from tests.trainer.harness import PLAIN, Rows, assert_close, assert_learned, train


CHECKPOINTING = {
    "no checkpointing": {},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def _compiles(folder, name, stage, backend, settings):
    counters = watch_graphs()
    parts = {"eval_dataset": Rows(name, 4, seed=1)}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3, **settings}
    compiled = train(stage, folder, name, parts=parts, torch_compile_backend=backend, **settings)
    found = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    plain = train(stage if settings.get("bf16") else PLAIN, folder, name, parts=parts, **settings)
    assert_learned(plain, 3)
    # bf16 keeps 8 bits: what is not the same bit for bit differs by 2^-8, and inductor keeps fp32 between operations
    rtol = 2**-6 if settings.get("bf16") else 1e-5
    assert_close(compiled, plain, f"stage {stage}, compiled, and not", rtol=rtol, atol=1e-4 if rtol > 1e-5 else 1e-6)
    return found


# One graph for training and one for evaluation, and others where transformers leaves out a mask that masks nothing.
@pytest.mark.support("torch.compile, {checkpointing}, {precision}", area="Training features")
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compiled_blocks_train_as_eager_ones(tmp_path, stage, precision, checkpointing):
    settings = {**CHECKPOINTING[checkpointing], "bf16": precision == "bf16"}
    found = run_ranks(_compiles, 2, str(tmp_path), "llama", stage, "aot_eager", settings, timeout=240)
    for num_graphs, breaks in found:
        assert 2 <= num_graphs <= 4 and not breaks, "the three blocks share them"
