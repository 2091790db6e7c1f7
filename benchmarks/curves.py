"""Compares the losses of training on values that go between ranks in few bits with those of exact ones.

    python -m benchmarks.curves --steps 300 --num_processes 2

A small Llama learns the bytes of this repository's pages, from the same weights and in the same order in each run. One
page is kept back. The table has, for each part of the steps, the mean of the losses of all ranks; below it the losses
on the page that was kept back, with the values that training computes with and with exact ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import hf_zero
from benchmarks.launch import run_group
from benchmarks.machine import describe_machine, one_line


ROOT = Path(__file__).parents[1]
KEPT_BACK = ROOT / "docs" / "design.md"
ROWS, LENGTH, PARTS, SEED = 4, 64, 6, 0
GATHERS = {"gather_dtype": torch.int8}
# by messages: ranks that share memory sum exactly
SUMS = {"reduce_dtype": torch.int8, "shared_memory": False}
HALF = {"compute_dtype": torch.bfloat16}
WAYS = {
    "fp32": {},
    "fp32, gathers int8": GATHERS,
    "fp32, sums int8": SUMS,
    "fp32, both int8": GATHERS | SUMS,
    "bf16": HALF,
    "bf16, gathers int8": HALF | GATHERS,
    "bf16, both int8": HALF | GATHERS | SUMS,
}


def pages() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes to train on, and those that are kept back, as tokens."""
    paths = [path for path in sorted((ROOT / "docs").glob("*.md")) if path != KEPT_BACK]
    texts = [b"".join(path.read_bytes() for path in paths), KEPT_BACK.read_bytes()]
    train, test = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts)
    return train, test


def train(spec: dict, rank: int) -> dict:
    """Trains in one way, on one rank of several."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    shape = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **shape)).train()
    sharded = hf_zero.shard(model, stage=3, **WAYS[spec["way"]])
    optimizer = hf_zero.ShardedOptimizer(sharded, torch.optim.AdamW, lr=3e-3)
    texts, losses, own = pages(), [], torch.Generator().manual_seed(SEED + 1 + rank)
    for _ in range(spec["steps"]):
        rows = _rows(texts[0], torch.randint(len(texts[0]) - LENGTH, (ROWS,), generator=own).tolist())
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        as_trained = _test_loss(model, texts[1])
        with hf_zero.gathered(model):
            exact = _test_loss(model, texts[1])
    return {"losses": losses, "as_trained": as_trained, "exact": exact}


def _rows(text: torch.Tensor, starts: list[int]) -> torch.Tensor:
    return torch.stack([text[start : start + LENGTH] for start in starts])


def _test_loss(model, text: torch.Tensor) -> float:
    starts = list(range(0, len(text) - LENGTH, 4 * LENGTH))
    batches = [_rows(text, starts[first : first + 64]) for first in range(0, len(starts), 64)]
    sums = [model(input_ids=rows, labels=rows).loss.item() * len(rows) for rows in batches]
    return sum(sums) / len(starts)


def summary(ranks: list[dict]) -> dict:
    """What is kept of a way: of each step the mean of the losses of all ranks, and the losses on the kept page."""
    losses = [round(sum(each) / len(each), 4) for each in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {"losses": losses, "as_trained": ranks[0]["as_trained"], "exact": ranks[0]["exact"]}


def table(ways: dict[str, dict]) -> str:
    """Returns the losses as a table of Markdown. `ways` are summaries."""
    lines = [f"| loss of steps | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    steps = min(len(way["losses"]) for way in ways.values())
    for part in range(PARTS):
        low, high = part * steps // PARTS, (part + 1) * steps // PARTS
        means = [sum(way["losses"][low:high]) / (high - low) for way in ways.values()]
        lines.append(f"| {low + 1} to {high} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    for key, name in (("as_trained", "held-out page"), ("exact", "held-out page, exact parameters")):
        lines.append(f"| {name} | " + " | ".join(f"{way[key]:.3f}" for way in ways.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file for the loss of every step")
    options = parser.parse_args()
    machine, ways = describe_machine(), {}
    print(one_line(machine))
    for way in WAYS:
        spec = {"way": way, "steps": options.steps}
        group = {"num_processes": options.num_processes, "timeout": 3600.0}
        ways[way] = summary(run_group("benchmarks.curves:train", spec, **group))
    print(table(ways))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "ways": ways}) + "\n")


if __name__ == "__main__":
    main()
