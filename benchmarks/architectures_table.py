"""The stored table of architectures: what was found for each, and what differs in another release of transformers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

STORED = Path(__file__).with_name("architectures.jsonl")
"""What was found with the release that `docs/works_with.md` names."""

TOLERANCE = 1e-4
"""Relative error from which on gradients are wrong. Models are tiny, and in float32."""

Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]


class Changes(NamedTuple):
    """Differences between two tables, each a list of lines to print."""

    wrong: list[str]
    broken: list[str]
    engines: list[str]
    new: list[str]
    gone: list[str]
    mended: list[str]

    @property
    def bad(self) -> bool:
        """Tell whether anything is worse than in the stored table, or wrong."""
        return bool(self.wrong or self.broken)


def read(path: Path) -> Rows:
    """Read a table: a JSON object a line, with `head`, `architecture`, `engine`, `error` and `note`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["head"], row["architecture"]): row for row in rows}


def write(path: Path, rows: Rows) -> None:
    """Write a table, without the times."""
    kept = [{name: value for name, value in row.items() if name != "seconds"} for row in rows.values()]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def is_wrong(row: Row) -> bool:
    """Tell whether an engine gave other gradients than autograd; NaN is wrong."""
    return row["error"] is not None and not row["error"] <= TOLERANCE


def changes(stored: Rows, found: Rows) -> Changes:
    """Compare a table with the stored one.

    Args:
        stored: the stored table.
        found: that of the installed transformers.

    Returns:
        `Changes`: gradients that are wrong now; architectures that have no engine or cannot be built any more, or
        whose engine is a slower one; those with another engine; new and gone ones; those that could not be tried
        before.
    """
    made = Changes([], [], [], [], [], [])
    for key, row in sorted(found.items()):
        name, before = " ".join(key), stored.get(key)
        if is_wrong(row):
            made.wrong.append(f"{name}: relative error {row['error']} with the engine {row['engine']}")
        if before is None:
            made.new.append(f"{name}: {_described(row)}")
        elif before["engine"] == row["engine"]:
            continue
        elif before["error"] is None and row["error"] is not None:
            made.mended.append(f"{name}: {_described(row)}, was {_described(before)}")
        elif row["error"] is None:
            made.broken.append(f"{name}: {_described(row)}, was {_described(before)}")
        else:
            made.engines.append(f"{name}: {_described(row)}, was {_described(before)}")
    made.gone.extend(" ".join(key) for key in sorted(stored.keys() - found.keys()))
    return made


def summary(rows: Rows, classes: dict[str, str]) -> str:
    """Count engines by class of transformers, as a Markdown table.

    Args:
        rows: the table.
        classes: the class of each head.
    """
    engines = ("hooked", "functional", "iterative", "none", "not built")
    lines = [f"| class | {' | '.join(engines)} |", "|---" * (1 + len(engines)) + "|"]
    heads = list(dict.fromkeys(head for head, _ in rows))
    for head in [*heads, "all"]:
        counts = Counter(row["engine"] for (of, _), row in rows.items() if head in (of, "all"))
        name = "all" if head == "all" else f"`{classes[head]}`"
        lines.append(f"| {name} | " + " | ".join(str(counts[engine] or "") for engine in engines) + " |")
    return "\n".join(lines)


def _described(row: Row) -> str:
    return f"{row['engine']} ({row['note'][:100]})" if row["error"] is None else row["engine"]
