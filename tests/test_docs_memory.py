"""The Python in docs/memory.md runs, and each line of what to set takes off what its table of peaks says."""

from pathlib import Path

import pytest
import torch

from hf_zero.engine import engine_of
from hf_zero.planner import predict
from hf_zero.recipes.plan_input import example_batch
from tests.distributed import run_ranks
from tests.generated import check_part
from tests.public_models import empty_model
from tests.test_readme import fenced_blocks


PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BLOCKS = [block.text for block in fenced_blocks(PAGE.read_text(encoding="utf-8")) if block.language == "python"]


def _offloads() -> None:
    names: dict = {}
    exec(BLOCKS[0], names)
    assert engine_of(names["sharded"]).bus.host_nbytes > 0
    started = [p.detach().clone() for p in names["model"].parameters()]
    assert all(p.dtype is torch.bfloat16 and p.isfinite().all() for p in started)
    exec(BLOCKS[0].partition("\n\n")[2].partition("optimizer = ")[2].partition("\n\n")[2], names)  # one step more
    assert any(not torch.equal(p, before) for p, before in zip(names["model"].parameters(), started))


def test_the_loop_that_offloads():
    assert len(BLOCKS) == 1
    for num_ranks in (1, 2):
        run_ranks(_offloads, num_ranks)


MODEL, NUM_RANKS, LENGTH = "meta-llama/Llama-3.1-8B", 8, 4096
# What is set, one behind the other, and what that is for the planner.
ADDED = {
    "`--zero_stage 0`": {"stage": 0, "rows": 2},
    "`--zero_stage 3`": {"stage": 3},
    "`--gradient_checkpointing`": {"gradient_checkpointing": True},
    "`--bf16`": {"compute_dtype": torch.bfloat16},
    "`--per_device_train_batch_size 1`": {"rows": 1},
    "`--zero_chunked_loss auto`, the default of trainers": {"chunked_loss": "auto"},
    "`--zero_offload optimizer`": {"offload": "optimizer"},
    "`--zero_offload_activations`": {"offload_activations": True},
    "`--zero_offload params`": {"offload": "params"},
}


def peaks() -> list[tuple[str, float, float]]:
    """What is added, and the GiB of each device and of the host for it."""
    found, settings, model = [], {}, empty_model(MODEL)
    for name, more in ADDED.items():
        settings |= more
        given = {key: value for key, value in settings.items() if key != "rows"}
        batch = example_batch(model, settings["rows"], LENGTH)
        told = predict(model, num_ranks=NUM_RANKS, batch=batch, **given)
        found.append((name, told.peak_nbytes / 2**30, told.host_nbytes / 2**30))
    return found


@pytest.mark.full("slow")
def test_each_line_of_what_to_set_takes_off_what_the_table_says(request):
    found = peaks()
    lines = [f"| {name} | {device:.1f} | {host:.1f} |" for name, device, host in found]
    table = "\n".join(["| set | GPU | host |", "|---|--:|--:|", *lines])
    check_part(PAGE, "peaks", table, request.config.getoption("--write-docs"))
    devices = [device for _, device, _ in found]
    assert devices == sorted(devices, reverse=True)
