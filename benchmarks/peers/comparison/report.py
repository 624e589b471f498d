"""Tables and pictures of a comparison."""

import statistics
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]
"""Results by library."""


def seconds(once: dict[str, Any], stage: str) -> float | None:
    """Seconds of a stage in one timed round; `all` is featurizing and scoring."""
    taken = once["seconds"]
    if stage == "all" and "all" not in taken:
        return taken["featurize"] + taken["score"]
    return taken.get(stage)


def cpu_minutes(entry: dict[str, Any]) -> float:
    """CPU minutes of featurizing and scoring, the median of the rounds."""
    used = [each["cpu"] for each in entry["rounds"]]
    return statistics.median(cpu.get("all", cpu.get("featurize", 0.0) + cpu.get("score", 0.0)) for cpu in used) / 60


def ratio(rounds: list[dict[str, Any]], ours: list[dict[str, Any]], stage: str) -> str:
    """Seconds of a library ÷ ours, within each round: median and range."""
    pairs = [(seconds(a, stage), seconds(b, stage)) for a, b in zip(rounds, ours, strict=False)]
    values = [one / other for one, other in pairs if one is not None and other is not None]
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})" if values else "–"


def failed(name: str, entry: dict[str, Any], columns: int) -> str | None:
    if "error" not in entry:
        return None
    return f"| {name} | cannot: {entry['error'].replace('|', '/')[:200]} |" + " |" * (columns - 1)


def speed_table(results: Results, rows: int) -> str:
    """Markdown: throughput, ratios of time to hf_trak's, peak memory."""
    stages = ("featurize", "project", "score", "all")
    lines = [
        "| | featurize, rows/s | × our time | projection, × our time | scoring, × our time | featurize and score, "
        "× our time | seconds | peak, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = results.get("hf_trak", {}).get("rounds", [])
    for name, entry in results.items():
        if (line := failed(name, entry, 7)) is not None:
            lines.append(line)
            continue
        rounds = entry["rounds"]
        speed = rows / statistics.median(each["seconds"]["featurize"] for each in rounds)
        total = statistics.median(seconds(each, "all") or 0.0 for each in rounds)
        peak = max((each["peak_mib"] for each in rounds if each["peak_mib"] is not None), default=None)
        ratios = " | ".join(ratio(rounds, ours, stage) for stage in stages)
        lines.append(
            f"| {name} | {speed:.0f} | {ratios} | {total:.2f} | {'unknown' if peak is None else f'{peak:.0f}'} |"
        )
    return "\n".join(lines)


def quality_table(results: Results) -> str:
    """Markdown: LDS with intervals, the spread over projection seeds, and the difference to hf_trak."""
    lines = [
        "| | LDS at defaults | over seeds | ours − theirs | LDS, λ tuned | over seeds | ours − theirs | λ | LDS per "
        "CPU minute, defaults | λ tuned |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in results.items():
        if (line := failed(name, entry, 9)) is not None:
            lines.append(line)
            continue
        found = entry["lds"]
        cells = []
        for kind in ("default", "tuned"):
            cells += [number(found.get(kind), "not finite"), over_seeds(found.get(kind))]
            cells.append(number(found.get(f"behind_{kind}"), ""))
        cells.append(entry["tuning"]["tuned_lambda"])
        for kind in ("default", "tuned"):
            timed = bool(entry.get("rounds")) and kind in found
            cells.append(f"{found[kind]['value'] / cpu_minutes(entry):.1f}" if timed else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def number(found: dict[str, Any] | None, missing: str) -> str:
    return missing if found is None else f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def over_seeds(found: dict[str, Any] | None) -> str:
    return "" if found is None or found["std"] is None else f"± {found['std']:.3f}"


def plot(cases: dict[str, Results], path: Path) -> None:
    """For each case, LDS over the time of one attribution, and LDS of the tuning targets by λ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(cases), 2, figsize=(10, 4 * len(cases)), squeeze=False)
    for (left, right), (case, results) in zip(axes, cases.items(), strict=True):
        for name, entry in results.items():
            if "error" in entry:
                continue
            curve = sorted((float(relative), value) for relative, value in entry["tuning"]["by_lambda"].items())
            color = right.plot(*zip(*curve, strict=True), marker="o", label=name)[0].get_color() if curve else None
            for kind, marker in (("default", "o"), ("tuned", "^")):
                if (found := entry["lds"].get(kind)) and entry.get("rounds"):
                    total = statistics.median(seconds(each, "all") or 0.0 for each in entry["rounds"])
                    low, high = found["value"] - found["low"], found["high"] - found["value"]
                    left.errorbar(
                        total, found["value"], yerr=[[max(low, 0.0)], [max(high, 0.0)]], fmt=marker, color=color,
                        capsize=3, label=f"{name}, {kind}",
                    )  # fmt: skip
        left.set(title=case, xscale="log", xlabel="seconds, featurize and score", ylabel="LDS")
        right.set(title=case, xscale="log", xlabel="λ ÷ (trace / min(n, k))", ylabel="LDS of the tuning targets")
        if left.get_legend_handles_labels()[0]:
            left.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
