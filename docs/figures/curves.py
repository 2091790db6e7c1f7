"""Draws `curves.svg`, the losses of training on values in few bits: `python docs/figures/curves.py`."""

import json
from pathlib import Path


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-24-curves.json"
COLORS = {
    "fp32": "#222",
    "fp32, gathers int8": "#4c78a8",
    "fp32, sums int8": "#54a24b",
    "fp32, both int8": "#e4576e",
    "bf16": "#aaa",
}
MEAN_OF = 10  # steps: batches differ more than ways do
LEFT, TOP, WIDTH, HEIGHT = 48, 40, 640, 280  # of the axes, in pixels
LOW, HIGH, STEP = 2.4, 3.6, 0.2  # of the losses that are drawn


def means(losses: list[float]) -> list[tuple[int, float]]:
    """The last step of each few, and the mean of their losses."""
    ends = range(MEAN_OF, len(losses) + 1, MEAN_OF)
    return [(end, sum(losses[end - MEAN_OF : end]) / MEAN_OF) for end in ends]


def draw() -> str:
    """The picture as SVG."""
    ways = json.loads(RESULTS.read_text(encoding="utf-8"))["ways"]
    num_steps = len(ways["fp32"]["losses"])
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="372" viewBox="0 0 720 372"'
        ' font-family="sans-serif" font-size="13" fill="#222">',
        f"<title>Losses of {num_steps} steps in fp32, with gathers and sums in 8 bits and without</title>",
        '<rect width="720" height="372" rx="8" fill="#fff"/>',
        f'<text x="16" y="22">loss, means of {MEAN_OF} steps</text>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 36}" text-anchor="end">step</text>',
    ]
    for index in range(round((HIGH - LOW) / STEP) + 1):
        loss = LOW + index * STEP
        lines.append(f'<path d="M{LEFT} {_y(loss):.1f}H{LEFT + WIDTH}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{_y(loss) + 4:.1f}" text-anchor="end">{loss:.1f}</text>')
    for step in range(0, num_steps + 1, num_steps // 6):
        lines.append(f'<text x="{_x(step, num_steps):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{step}</text>')
    for index, (name, color) in enumerate(COLORS.items()):
        seen = [(step, loss) for step, loss in means(ways[name]["losses"]) if loss <= HIGH]
        points = " ".join(f"{_x(step, num_steps):.1f},{_y(loss):.1f}" for step, loss in seen)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        y = TOP + 16 + 20 * index
        lines.append(f'<path d="M{LEFT + WIDTH - 176} {y - 4}h24" stroke="{color}" stroke-width="3"/>')
        lines.append(f'<text x="{LEFT + WIDTH - 146}" y="{y}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(step: int, num_steps: int) -> float:
    return LEFT + WIDTH * step / num_steps


def _y(loss: float) -> float:
    return TOP + HEIGHT * (HIGH - loss) / (HIGH - LOW)


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
