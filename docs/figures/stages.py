"""Draws `stages.svg`, the picture of the README and the front page: `python docs/figures/stages.py`."""

from pathlib import Path


NUM_RANKS = 4
# Bytes per parameter in mixed precision with Adam, and the first stage that partitions them.
HELD = {"parameters": (2, 3), "gradients": (2, 2), "optimizer state and masters": (12, 1)}
COLORS = dict(zip(HELD, ("#f2a65a", "#e4576e", "#4c78a8")))
LEFT, TOP, ROW, BAR, UNIT = 96, 72, 40, 24, 32  # in pixels; UNIT is one byte per parameter
WIDTH, HEIGHT = 720, TOP + 4 * ROW + 12


def held(stage: int) -> dict[str, float]:
    """Bytes per parameter that one GPU holds between backward and step, by kind.

    At stage 3 parameters are cast from the masters one block at a time, so no half-precision copy is kept.
    """
    kept = {name: size / (NUM_RANKS if stage >= since else 1) for name, (size, since) in HELD.items()}
    return {name: 0 if (name, stage) == ("parameters", 3) else size for name, size in kept.items()}


def draw() -> str:
    """The picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="14" fill="#222">',
        f"<title>Bytes per parameter on each of {NUM_RANKS} GPUs, at stages 0 to 3</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        f'<text x="16" y="24">bytes per parameter on each of {NUM_RANKS} GPUs</text>',
    ]
    for name, x in zip(HELD, (96, 216, 328)):
        lines.append(f'<rect x="{x}" y="38" width="14" height="14" fill="{COLORS[name]}"/>')
        lines.append(f'<text x="{x + 20}" y="50">{name}</text>')
    for stage in range(4):
        lines += _row(stage, y=TOP + stage * ROW)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _row(stage: int, y: int) -> list[str]:
    lines, x = [f'<text x="16" y="{y + 17}">stage {stage}</text>'], float(LEFT)
    for name, size in held(stage).items():
        if size:
            lines.append(f'<rect x="{x:g}" y="{y}" width="{size * UNIT:g}" height="{BAR}" fill="{COLORS[name]}"/>')
        x += size * UNIT
    return [*lines, f'<text x="{x + 8:g}" y="{y + 17}" font-weight="bold">{sum(held(stage).values()):g}</text>']


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
