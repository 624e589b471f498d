"""The tables of the benchmark: medians over the rounds."""

from statistics import median
from typing import Any

from curvature_bench.stages import FIT, HYBRID, SCORING, STAGES

Rounds = dict[str, list[dict[str, Any]]]
"""Of every library, what each round measured: `Measured`, or `{"error": …}`."""


def tables(rounds: Rounds, rows: int) -> str:
    """Time and memory of all libraries as Markdown.

    Args:
        rounds: what was measured.
        rows: training rows.
    """
    return f"{_times(rounds, rows)}\n\n{_memory(rounds)}"


def _times(rounds: Rounds, rows: int) -> str:
    lines = ["| library | stage | seconds | ÷ plain pass | rows/s |", "|---|---|---|---|---|"]
    for library, measured in rounds.items():
        if error := _error(measured):
            lines.append(f"| {library} | cannot: {error} | | | |")
            continue
        plain = median(seconds for one in measured for seconds in one["plain"])
        lines.append(f"| {library} | plain pass | {plain:.2f} | 1 | {rows / plain:.1f} |")
        for stage in STAGES:
            if stage not in measured[0]["seconds"]:
                continue
            seconds = median(one["seconds"][stage] for one in measured)
            ratio = median(one["ratios"][stage] for one in measured)
            lines.append(f"| {library} | {stage} | {seconds:.2f} | {ratio:.2f} | {rows / seconds:.1f} |")
    return "\n".join(lines)


def _memory(rounds: Rounds) -> str:
    lines = [
        "| library | peak MiB: plain pass | fit (promised) | scoring (promised) | hybrid |",
        "|---|---|---|---|---|",
    ]
    for library, measured in rounds.items():
        if error := _error(measured):
            lines.append(f"| {library} | cannot: {error} | | | |")
            continue
        cells = [_peak(measured, group) for group in ("plain", FIT, SCORING, HYBRID)]
        lines.append(f"| {library} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _peak(measured: list[dict[str, Any]], group: str) -> str:
    if group not in measured[0]["peak_mib"]:
        return "–"
    cell = f"{median(one['peak_mib'][group] for one in measured):.0f}"
    if group in measured[0]["promised_mib"]:
        cell += f" ({median(one['promised_mib'][group] for one in measured):.0f})"
    return cell


def _error(measured: list[dict[str, Any]]) -> str | None:
    error = next((one["error"] for one in measured if "error" in one), None)
    return None if error is None else error.replace("|", "/")
