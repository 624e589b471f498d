"""`hf-trak attribute`: score the training set against targets, and save the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_trak.attributor import TrakAttributor
from hf_trak.cli.arguments import DataArguments, ModelArguments, OutputArguments, TargetArguments
from hf_trak.cli.build import build, build_from_index, quiet, remember, remembered, require_run, target_rows
from hf_trak.cli.output import answer
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.config import TrakConfig
from hf_trak.featurize.exact import ExactScores
from hf_trak.report.exact import exact_distributions
from hf_trak.report.run import AttributionRun, score_distributions
from hf_trak.report.views import RunViews
from hf_trak.scores.score_files import SCORE_FILES, score_file_digests
from hf_trak.store.atomic import safe_name


@dataclass
class RunArguments:
    """The scores to compute, and what is saved of them."""

    index: str | None = field(
        default=None, metadata={"help": "Published index, a repo or a directory, to use instead of training rows."}
    )
    top_k: int = field(
        default=20,
        metadata={"help": "Number of training rows to keep per target, of the highest scores and of the lowest."},
    )
    exact: bool = field(
        default=False,
        metadata={"help": "Score with whole gradients under a curvature, which is fitted first if it is missing."},
    )
    first_pass_bytes: int | None = field(
        default=None,
        metadata={"help": "Look at so many bytes of every row, and at whole rows of the best alone (codes only)."},
    )
    candidates: int | None = field(default=None, metadata={"help": "Rows that are then read whole."})
    all_scores: bool = field(default=False, metadata={"help": "Keep every score, which `hf-trak evaluate` needs."})
    name: str = field(
        default="targets", metadata={"help": "Name of the run, which is saved in `output_dir/scores/NAME`."}
    )
    distributions: bool = field(
        default=True, metadata={"help": "Count all scores of each target. Takes as long as scoring once more."}
    )
    self_influence: bool = field(
        default=True,
        metadata={"help": "Rank training rows by self-influence. With `--exact`, one more pass over them."},
    )
    save_train_dataset: bool = field(default=False, metadata={"help": "Save all training rows in the run."})

    def __post_init__(self) -> None:
        safe_name(self.name, "name")
        if self.top_k < 1:
            raise ValueError(f"`top_k` is {self.top_k}. Expected at least 1.")
        if self.first_pass_bytes is not None and (self.exact or self.all_scores):
            raise ValueError(
                f"`first_pass_bytes` is {self.first_pass_bytes}, together with `exact` or `all_scores`. A first pass "
                "finds the best rows of each target from stored features. Leave it out for other scores."
            )


def run(argv: Sequence[str]) -> None:
    """Score the training set against targets, and save what a report needs.

    Raises:
        ValueError: exact scores are asked of an index whose training rows are not given.
    """
    kinds = (TargetArguments, RunArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    parse = partial(
        parse_yaml_and_args,
        kinds,
        argv,
        prog="hf-trak attribute",
        description="Score the training set against targets. Model, training rows and settings are by default those "
        "that `hf-trak featurize` has recorded in output_dir.",
    )
    _, first, _, _, where, _ = parse()
    saved = remembered(where.output_dir)  # refuses a copy of an index, which `--index` takes
    if first.index is not None:
        saved = {}  # an index brings its settings itself; the directory may hold another run
    targets, wanted, model_args, data, trak, output = parse(defaults=saved)
    quiet(trak)
    if wanted.index is None:
        require_run(trak.output_dir, model_args, data)
    elif wanted.exact and data.dataset_name is None:
        raise ValueError(
            "`exact` is set for an index, and `--train_dataset` is missing. Expected the training rows of the index, "
            "whose gradients exact scores need. Give them, or leave `--exact` out."
        )
    stored = target_rows(data, targets)
    if wanted.index is not None:
        built = build_from_index(wanted.index, model_args, data, trak, stored, with_rows=wanted.exact)
    else:
        built = build(model_args, data, trak)
        if saved:
            remember(built, model_args, data, write=False)
    attributor = built.attributor
    rows = built.preparation.prepare(stored)
    top_k = None if wanted.all_scores else wanted.top_k
    scored = attributor.attribute(
        rows,
        top_k=top_k,
        name=wanted.name,
        checkpoints=model_args.checkpoints,
        exact=wanted.exact,
        first_pass_bytes=wanted.first_pass_bytes,
        candidates=wanted.candidates,
    )
    counted = wanted.distributions and top_k is not None  # with all scores at hand, collecting the run counts them
    count = exact_distributions if wanted.exact else score_distributions
    counts = count(attributor, scored, rows, wanted.name) if counted else None
    influence = attributor.self_influence(exact=wanted.exact) if wanted.self_influence else None
    directory = Path(attributor.args.output_dir) / "scores" / wanted.name
    facts: dict[str, Any] = {
        "dataset": data.dataset_name,
        "target_dataset": targets.eval_dataset_name or data.dataset_name,
        **(_exact_facts(attributor) if wanted.exact else {}),
    }
    if wanted.all_scores:
        facts[SCORE_FILES] = attributor.processes.broadcast_from_main(lambda: score_file_digests(scored, directory))
    found = AttributionRun.collect(attributor, scored, distributions=counts, self_influence=influence, facts=facts)
    if attributor.processes.is_main_process:
        found.save(directory, every_train_row=wanted.save_train_dataset)
    attributor.processes.wait_for_everyone()
    content = {"run": str(directory), "targets": len(scored), "train_rows": len(attributor.train_dataset)}
    answer(content, _lines(found, directory), output.json)


def _exact_facts(attributor: TrakAttributor) -> dict[str, Any]:
    """Say in the run what its scores were computed with, in the place of projection and ridge."""
    exact = ExactScores(attributor)
    ridge = f"; λ {attributor.args.hybrid_lambda:g} relative" if exact.hybrid else ""
    return {
        "projection": f"none: exact scores, {'hybrid' if exact.hybrid else exact.kind}",
        "features": attributor.layout.total,
        "ridge": f"damping {exact.damping:g} relative{ridge}",
    }


def _lines(run: AttributionRun, directory: Path) -> list[str]:
    views = RunViews(run, examples=3)
    lines = []
    for index in range(min(3, len(run.scored))):
        view = views.target(index)
        lines.append(view.target.alt)
        for name, side in (("helped most", view.helped), ("harmed most", view.harmed)):
            shown = ", ".join(f"row {item.example.row} ({item.score})" for item in side) or "no example"
            lines.append(f"  {name}: {shown}")
    return [*lines, f"Run: {directory}", f"Next: hf-trak report {directory}"]
