"""The output of recipes: for each target the training rows with the highest and the lowest scores, and a report."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from torch import Tensor

from hf_trak import TrakAttributor
from hf_trak.attributor import last_result
from hf_trak.report import ReportOptions
from hf_trak.report import write_report as write_page

SIDES = {"helped_most": ("trak_", 1), "harmed_most": ("trak_harmful_", -1)}
"""Prefix of the columns of either side, and the sign of its scores."""


def attributions(
    scored: Dataset,
    rows: Sequence[int],
    count: int,
    target: Callable[[int], dict[str, Any]],
    train: Callable[[int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """List for some targets the training rows that helped and harmed them most, as plain JSON.

    Args:
        scored: result of `attribute` with `top_k` ≥ `count`.
        rows: row numbers of the targets.
        count: number of training rows per side, or fewer where fewer have scores of the side's sign.
        target: what to add about a target, by its row number.
        train: what to add about a training row, by its row number.
    """
    found = []
    for row in rows:
        columns = scored[row]
        entry = {"row": row, **target(row)}
        for side, (prefix, sign) in SIDES.items():
            pairs = zip(columns[f"{prefix}indices"][:count], columns[f"{prefix}scores"][:count], strict=True)
            entry[side] = [
                {"row": index, "score": score, **train(index)} for index, score in pairs if sign * score > 0
            ]
        found.append(entry)
    return found


def print_attributions(found: Sequence[dict[str, Any]], headline: Callable[[dict[str, Any]], str]) -> None:
    """Print the result of [`attributions`], one line per training row: its `text`, after its `label` if it has one."""
    for entry in found:
        print(f"\nTarget {entry['row']}: {headline(entry)}")
        for side in SIDES:
            print(f"  {side.replace('_', ' ')}:")
            for item in entry[side]:
                label = f" {item['label']}:" if "label" in item else ""
                print(f"    row {item['row']:>6} ({item['score']:+.3g}){label} {shortened(item['text'])}")


def shortened(text: str, width: int = 90) -> str:
    """Return the beginning of a text, on one line."""
    return textwrap.shorten(text, width, placeholder=" …")


def write_report(
    attributor: TrakAttributor, output_dir: Path, self_influence: Tensor | None = None, **options: Any
) -> None:
    """Write the last answer of an attributor as `report.html`. All processes call this.

    Args:
        attributor: the attributor.
        output_dir: where the file goes.
        self_influence: of all training rows, `(n,)`. The page then lists the highest, among which wrong labels are.
        options: those of `TrakAttributor.report`.
    """
    run = last_result(attributor).run(attributor.features)
    if self_influence is not None:
        run = replace(run, self_influence=self_influence.float().numpy())
    path = write_page(run, output_dir / "report.html", ReportOptions(**options))
    PartialState().print(f"Report:  {path}")
