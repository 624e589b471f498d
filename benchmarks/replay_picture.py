"""Draw the picture of docs/replay.md from the figures in pages/replay_run.md.

python benchmarks/replay_picture.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

BARS = {
    "index": "index",
    "exact (EK-FAC)": "exact, EK-FAC",
    "first and last weights": "replay, first and last weights",
    "as it comes": "replay of the recorded run",
}
"""Beginnings of rows of the table, of those about 5 % dropped rows, and what the picture calls them."""


def figures() -> dict[str, tuple[float, ...]]:
    """Read LDS and interval of each bar.

    Raises:
        ValueError: the table has no such row.
    """
    text = (ROOT / "benchmarks/pages/replay_run.md").read_text(encoding="utf-8")
    found = {}
    for name, title in BARS.items():
        rows = [line.split("|")[3] for line in text.splitlines() if line.replace("*", "").startswith(f"| {name}")]
        numbers = re.findall(r"\.\d+", rows[0]) if rows else []
        if len(numbers) != 3:
            raise ValueError(f"The table has no row {name!r} with a figure and its interval. Expected one.")
        found[title] = tuple(map(float, numbers))
    return found


def drawn(bars: dict[str, tuple[float, ...]]) -> str:
    """Draw bars with their intervals, as SVG."""
    height = 34 * len(bars) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (title, (value, low, high)) in enumerate(bars.items()):
        y, color = 12 + 34 * place, "#3f51b5" if "recorded" in title else "#9fa8da"
        start, ends = 230, (230 + 360 * low, 230 + 360 * high)
        lines += [
            f'<text x="{start - 8}" y="{y + 16}" text-anchor="end" fill="#222">{title}</text>',
            f'<rect x="{start}" y="{y}" width="{360 * value:.0f}" height="22" fill="{color}"/>',
            f'<line x1="{ends[0]:.0f}" x2="{ends[1]:.0f}" y1="{y + 11}" y2="{y + 11}" stroke="#222"/>',
            f'<text x="{start + 366}" y="{y + 16}" fill="#222">{value:.2f}</text>',
        ]
    note = "linear datamodeling score, 5 % of the rows left out; 1 is perfect, lines are 95 % intervals"
    lines += [f'<text x="8" y="{height - 10}" font-size="12" fill="#555">{note}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs/images/replay.svg").write_text(drawn(figures()), encoding="utf-8")
