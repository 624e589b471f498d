"""Draw the picture of docs/replay.md from the figures in replay.json.

python benchmarks/replay_picture.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

COLORS = {"index": "#bdbdbd", "EK-FAC": "#757575", "recipe": "#7986cb", "recorded": "#1a237e"}
NAMES = {"recipe": "replay of the recipe", "recorded": "replay of the run"}
SHARE, LEFT, WIDTH, ROW = "5 %", 230, 380, 26


def drawn(cases: dict[str, Any]) -> str:
    """Draw a line for each case, with a dot for each method, as SVG."""
    shown = [case for case in cases.values() if all(SHARE in case["methods"].get(name, {}) for name in COLORS)]
    height = ROW * len(shown) + 92
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (name, color) in enumerate(COLORS.items()):
        x = 24 + (0, 80, 170, 350)[place]
        lines.append(f'<circle cx="{x}" cy="20" r="6" fill="{color}"/>')
        lines.append(f'<text x="{x + 12}" y="25" fill="#222">{NAMES.get(name, name)}</text>')
    for place, case in enumerate(shown):
        y = 54 + ROW * place
        lines.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end" fill="#222">{case["about"]["title"]}</text>'
        )
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        for name, color in COLORS.items():
            x = LEFT + WIDTH * max(0.0, case["methods"][name][SHARE][0])
            lines.append(f'<circle cx="{x:.0f}" cy="{y}" r="6" fill="{color}"/>')
    bottom = 54 + ROW * len(shown)
    for tick in range(6):
        x = LEFT + WIDTH * tick / 5
        lines.append(f'<text x="{x:.0f}" y="{bottom + 6}" text-anchor="middle" fill="#555">{tick / 5:g}</text>')
    note = f"linear datamodeling score, {SHARE} of the rows left out; 1 is perfect"
    lines += [f'<text x="{LEFT}" y="{bottom + 28}" fill="#555">{note}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    figures = json.loads((ROOT / "benchmarks/replay.json").read_text(encoding="utf-8"))
    (ROOT / "docs/images/replay.svg").write_text(drawn(figures), encoding="utf-8")
