"""`hf-trak attribute`: score the training set against targets, and save the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_trak.attributor import last_result
from hf_trak.cli.build import build, build_from_index, quiet, remember, remembered, require_run, target_rows
from hf_trak.cli.parser import (
    DataArguments,
    ModelArguments,
    OutputArguments,
    TargetArguments,
    answer,
    parse_yaml_and_args,
)
from hf_trak.config import TrakConfig
from hf_trak.methods import Exact, Index, Rerank, check_best_rows
from hf_trak.report.run import AttributionRun
from hf_trak.report.views import RunViews
from hf_trak.scores.score_files import SCORE_FILES, score_file_digests
from hf_trak.store.atomic import safe_name


@dataclass
class RunArguments:
    """The scores to compute, and what is saved of them."""

    index: str | None = field(
        default=None, metadata={"help": "Published index, a repo or a directory, to use instead of training rows."}
    )
    top_k: int = field(default=20, metadata={"help": "Training rows to keep per target, from either end."})
    exact: bool = field(
        default=False,
        metadata={"help": "Score with whole gradients under a curvature, fitted first if missing."},
    )
    refine: str | None = field(
        default=None, metadata={"help": "Refine targets of `--exact`: `cg`, or `cg,steps=5,rows=512`."}
    )
    first_pass_bytes: int | None = field(
        default=None, metadata={"help": "Look at so many bytes of every row first (codes only)."}
    )
    candidates: int | None = field(default=None, metadata={"help": "Rows that are then read whole."})
    rerank: int | None = field(default=None, metadata={"help": "Score so many of the best rows exactly."})
    all_scores: bool = field(default=False, metadata={"help": "Keep every score, which `hf-trak evaluate` needs."})
    name: str = field(
        default="targets", metadata={"help": "Name of the run, which is saved in `output_dir/scores/NAME`."}
    )
    distributions: bool = field(default=True, metadata={"help": "Count all scores of each target, in a second pass."})
    self_influence: bool = field(
        default=True,
        metadata={"help": "Rank training rows by self-influence. With `--exact`, one more pass over them."},
    )
    save_train_dataset: bool = field(default=False, metadata={"help": "Save all training rows in the run."})

    def __post_init__(self) -> None:
        safe_name(self.name, "name")
        if self.top_k < 1:
            raise ValueError(f"`top_k` is {self.top_k}. Expected at least 1.")
        if self.refine is not None and not self.exact and self.rerank is None:
            raise ValueError(
                f"`refine` is {self.refine!r}, for scores from features, whose targets are not refined. Expected "
                "exact scores. Set `exact` or `rerank`, or leave `refine` out."
            )
        if self.rerank is not None and self.exact:
            raise ValueError(
                f"`rerank` is {self.rerank}, with `exact`, which scores all rows exactly. Expected one of the two. "
                "Leave `exact` out to score the shortlist of the index alone, or leave `rerank` out."
            )
        check_best_rows(self.method, None if self.all_scores else self.top_k, "target")
        if self.first_pass_bytes is not None and (self.exact or self.all_scores):
            raise ValueError(
                f"`first_pass_bytes` is {self.first_pass_bytes}, together with `exact` or `all_scores`. A first pass "
                "finds the best rows of each target from stored features. Leave it out for other scores."
            )

    @property
    def method(self) -> Index | Exact | Rerank:
        """How scores are computed."""
        index = Index(self.first_pass_bytes, self.candidates)
        if self.rerank is not None:
            return Rerank(self.rerank, refine=self.refine, index=index)
        return Exact(refine=self.refine) if self.exact else index


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
    quiet()
    if wanted.index is None:
        require_run(trak.output_dir, model_args, data)
    elif wanted.exact and data.dataset_name is None:
        raise ValueError(
            "`exact` is set for an index, and `--train_dataset` is missing. Expected the training rows of the index, "
            "whose gradients exact scores need. Give them, or leave `--exact` out."
        )
    stored = target_rows(data, targets)
    if wanted.index is not None:
        reranked = wanted.rerank is not None
        built = build_from_index(wanted.index, model_args, data, trak, stored, wanted.exact, reranked)
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
        method=wanted.method,
    )
    last, features = last_result(attributor), attributor.features
    # With all scores at hand, collecting the run counts them; of a reranked run only some scores are exact.
    counts = last.counted() if wanted.distributions and last.answer.rows is None else None
    influence = attributor.self_influence("exact" if wanted.exact else "index") if wanted.self_influence else None
    directory = Path(attributor.args.output_dir) / "scores" / wanted.name
    facts: dict[str, Any] = {
        "dataset": data.dataset_name,
        "target_dataset": targets.eval_dataset_name or data.dataset_name,
        **last.facts(features),
    }
    if wanted.all_scores:
        facts[SCORE_FILES] = features.processes.broadcast_from_main(lambda: score_file_digests(scored, directory))
    found = AttributionRun.collect(features, scored, distributions=counts, self_influence=influence, facts=facts)
    if features.processes.is_main_process:
        found.save(directory, every_train_row=wanted.save_train_dataset)
    features.processes.wait_for_everyone()
    content = {"run": str(directory), "targets": len(scored), "train_rows": len(attributor.train_dataset)}
    answer(content, _lines(found, directory), output.json)


def _lines(run: AttributionRun, directory: Path) -> list[str]:
    views = RunViews(run, examples=3)
    lines = [line for index in range(min(3, len(run.scored))) for line in views.target(index).lines]
    return [*lines, f"Run: {directory}", f"Next: hf-trak report {directory}"]
