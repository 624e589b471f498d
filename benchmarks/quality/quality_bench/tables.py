"""Tables in Markdown: every method on a case, beside the highest possible score."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.evaluation import Bank, BankScore, evaluate_bank
from hf_trak.evaluation.bank import judged_parts
from quality_bench.banks import open_bank
from quality_bench.case import Case
from quality_bench.removals import removal_result
from quality_bench.scored import DEFAULT, all_scored, judging_targets


def report(case: Case, work: Path) -> dict[str, Any]:
    """Print the tables of a case, and return what they show as plain JSON."""
    bank = open_bank(case, work)
    parts = judged_parts(bank)
    methods = all_scored(work)
    scores: dict[str, np.ndarray] = {}
    for scored in methods:
        if scored.error is not None:
            continue
        if DEFAULT in scored.variants:
            scores[scored.name] = scored.variants[DEFAULT]
        best = scored.best(bank)
        if best != DEFAULT:
            scores[f"{scored.name} ({best})"] = scored.variants[best]
    found = evaluate_bank(bank, scores, parts=parts, targets=judging_targets(bank.n_targets))
    by_method = {name: {each.part: each for each in found if each.method == name} for name in scores}
    removal = removal_result(bank)
    removed = {} if removal is None else {effect.name: effect.own for effect in removal.effects}
    costs = {scored.name: scored.result for scored in methods}
    print(f"\n### {case.title}\n\n{_facts(case, bank)}\n")
    head = ["", *(f"LDS, {_dropped(part)} dropped" for part in parts), "removal of 5 %", "fit, s", "score, s"]
    lines = [[*head, "bytes per row", "peak, MiB"]]
    for name, cells in by_method.items():
        line = [name, *(str(cells[part].lds) for part in parts)]
        line.append(
            f"{removed[name].value:+.2f} [{removed[name].low:+.2f}, {removed[name].high:+.2f}]"
            if name in removed
            else ""
        )
        lines.append(line + _cost(costs.get(name)))
    if removal is not None:
        random = removed["random"]
        lines.append(
            [
                "random rows",
                *[""] * len(parts),
                f"{random.value:+.2f} [{random.low:+.2f}, {random.high:+.2f}]",
                *[""] * 4,
            ]
        )
    for label, kind in (("ceiling, perturbed start", "perturbed"), ("ceiling, other seed", "other-seed")):
        first = next(iter(by_method.values()))
        cells_of = [first[part].ceilings.get(f"{part}-{kind}") for part in parts]
        lines.append([label, *("" if cell is None else str(cell) for cell in cells_of), *[""] * 5])
    for scored in methods:
        if scored.error is not None:
            lines.append([scored.name, f"cannot: {scored.error[:160].replace('|', '/')}", *[""] * (len(parts) + 4)])
    lines.insert(1, ["---"] * len(lines[0]))
    print("\n".join(f"| {' | '.join(line)} |" for line in lines), flush=True)
    return {
        "facts": _facts(case, bank),
        "scores": [_plain(each) for each in found],
        "cost": costs,
        "removal": None if removal is None else removal.to_dict(),
    }


def summary(results: dict[str, dict[str, Any]]) -> str:
    """One table of all cases: LDS averaged over the shares of dropped rows, default / best variant of each method."""
    names = dict.fromkeys(name for result in results.values() for name in result["cost"])
    lines = [["", *results], ["---"] * (1 + len(results))]
    for name in names:
        lines.append([name, *(_averages(result, name) for result in results.values())])
    for label, kind in (("ceiling, perturbed start", "perturbed"), ("ceiling, other seed", "other-seed")):
        lines.append([label, *(_ceilings(result, kind) for result in results.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _averages(result: dict[str, Any], name: str) -> str:
    own = [each for each in result["scores"] if each["method"] == name]
    best = [each for each in result["scores"] if each["method"].startswith(f"{name} (")]
    if not own and not best:
        return "cannot" if name in result["cost"] else ""
    cells = [_mean(each["lds"]["value"] for each in values) for values in (own, best or own)]
    return " / ".join(cells)


def _ceilings(result: dict[str, Any], kind: str) -> str:
    found = {each["part"]: each["ceilings"] for each in result["scores"]}
    values = [one["value"] for each in found.values() for other, one in each.items() if other.endswith(kind)]
    return _mean(values)


def _mean(values: Iterable[float]) -> str:
    listed = list(values)
    return f"{np.mean(listed):.2f}" if listed else "–"


def _plain(score: BankScore) -> dict[str, Any]:
    return {key: value for key, value in score.to_dict().items() if key != "per_target"}


def _dropped(part: str) -> str:
    return f"{100 * float(part.removeprefix('drop-')):g} %"


def _facts(case: Case, bank: Bank) -> str:
    trainings = sum(bank.description(name)["subsets"] for name in bank.parts if bank.is_complete(name))
    return (
        f"P = {bank.recipe['parameters']:,}, n = {bank.n_train:,}, m = {bank.n_targets} targets, every second "
        f"judges; {case.subsets} subsets at each share, {trainings} trainings in the bank."
    )


def _cost(result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return [""] * 4
    seconds = [f"{result['seconds'][stage]:.1f}" if stage in result["seconds"] else "" for stage in ("fit", "score")]
    peak = "" if result["peak_mib"] is None else f"{result['peak_mib']:.0f}"
    return [*seconds, f"{result['bytes_per_row']:,.0f}", peak]
