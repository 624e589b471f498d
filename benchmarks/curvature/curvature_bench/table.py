"""The tables of the benchmark: medians over the rounds."""

from statistics import median
from typing import Any

from curvature_bench.stages import FIT, HYBRID, SCORING, STAGES

Clocks = dict[str, float]
"""A `Time`, or the quotient of two, as a dictionary."""

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
    lines = [
        "| library | stage | seconds | ÷ plain pass | rows/s | CPU seconds | ÷ plain pass |",
        "|---|---|---|---|---|---|---|",
    ]
    for library, measured in rounds.items():
        if error := _error(measured):
            lines.append(f"| {library} | cannot: {error} | | | | | |")
            continue
        plain = [each for one in measured for each in one["plain"]]
        lines.append(_line(library, "plain pass", plain, [{"wall": 1.0, "cpu": 1.0}], rows))
        for stage in STAGES:
            if stage in measured[0]["times"]:
                times, ratios = ([one[kind][stage] for one in measured] for kind in ("times", "ratios"))
                lines.append(_line(library, stage, times, ratios, rows))
    return "\n".join(lines)


def _line(library: str, stage: str, times: list[Clocks], ratios: list[Clocks], rows: int) -> str:
    wall, cpu = (median(one[clock] for one in times) for clock in ("wall", "cpu"))
    to_plain, cpu_to_plain = (median(one[clock] for one in ratios) for clock in ("wall", "cpu"))
    return (
        f"| {library} | {stage} | {wall:.2f} | {to_plain:.2f} | {rows / wall:.1f} | {cpu:.2f} | {cpu_to_plain:.2f} |"
    )


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
