"""Rows of answers, one of which is to be preferred."""

import json
import random
from pathlib import Path


COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
ANSWERS = ("chosen", "rejected")
THINGS = ["door", "house", "car", "bird", "boat", "tree", "stone", "lamp"]


def preferences(count: int, seed: int = 0) -> list[dict]:
    """The chosen answer repeats the thing that was asked for, the rejected one does not."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        thing, colour = draw.choice(THINGS), draw.choice(COLOURS)
        rows.append({"prompt": f"the {thing} is", "chosen": f" {colour} {colour}", "rejected": f" a {thing}"})
    return rows


def as_chats(rows: list[dict]) -> list[dict]:
    def turn(role: str, text: str) -> list[dict]:
        return [{"role": role, "content": text.strip()}]

    return [{"prompt": turn("user", r["prompt"]), **{k: turn("assistant", r[k]) for k in ANSWERS}} for r in rows]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
