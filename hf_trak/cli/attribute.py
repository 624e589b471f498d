"""`hf-trak attribute`: score the training set against targets, and save the run."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hf_trak.attributor import last_result
from hf_trak.cli.build import (
    MethodArguments,
    begin,
    build,
    build_from_index,
    record_names,
    require_run,
    target_rows,
)
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, TargetArguments, answer, option
from hf_trak.config import TrakConfig
from hf_trak.data.columns import LABELS
from hf_trak.engines.engine import Engine
from hf_trak.methods import Exact, Index, Replay, Rerank, check_best_rows, checked_method
from hf_trak.modelout_functions.classification import ClassificationModelOutput
from hf_trak.report.run import AttributionRun
from hf_trak.report.views import RunViews
from hf_trak.runtime.checks import required
from hf_trak.scores.score_files import SCORE_FILES, score_file_digests
from hf_trak.scores.spans import Span
from hf_trak.store.atomic import safe_name


@dataclass
class RunArguments(MethodArguments):
    """The scores to compute, and what is saved of them."""

    index: str | None = option(
        "Published index, in place of training rows; or the directory or address of its tables.", None
    )
    scored_by: Literal["local", "ray", "spark"] = option(
        "This process, or workers of Ray or Spark, which find the best rows alone: no self-influence.", "local"
    )
    top_k: int = option("Training rows to keep per target, from either end.", 20)
    group_by: str | None = option(
        "Score the mean of each group of targets: a column, or `all` for one group of all targets.", None
    )
    predict: bool = option("Score the model's own class or answer, not the labels.", False)
    max_new_tokens: int = option("Tokens to write at most, for `--predict` with a language model.", 64)
    words: str | None = option("Score one word of what each target says.", None)
    all_scores: bool = option("Keep every score, which `hf-trak evaluate` needs.", False)
    name: str = option("Name of the run, which is saved in `output_dir/scores/NAME`.", "targets")
    distributions: bool = option("Count all scores of each target, in a second pass.", True)
    self_influence: bool = option(
        "Rank training rows by self-influence. With exact scores, one more pass over them; replays leave "
        "it out, since every row would be a target.",
        True,
    )
    training_args: str | None = option(
        "For replays: the trainer's arguments, a JSON file or `learning_rate=5e-5,weight_decay=0.1,…`.", None
    )
    save_train_dataset: bool = option("Save all training rows in the run.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        safe_name(self.name, "name")
        for name in ("top_k", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"`{name}` is {value}. Expected at least 1.")
        check_best_rows(checked_method(self.chosen()), None if self.all_scores else self.top_k, "target")


def run(argv: Sequence[str]) -> None:
    """Score the training set against targets, and save what a report needs.

    Raises:
        ValueError: exact or replayed scores are asked of an index whose training rows are not given, or the arguments
            of the training are not known.
    """
    kinds = (TargetArguments, RunArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    saved, (targets, wanted, model_args, data, trak, output) = begin(
        kinds,
        argv,
        prog="hf-trak attribute",
        description="Score the training set against targets. Model, training rows and settings are by default those "
        "that `hf-trak featurize` has recorded in output_dir.",
    )
    method = wanted.chosen()
    exact, replays = isinstance(method, Exact), isinstance(method, Replay)
    if wanted.index is None:
        require_run(trak.output_dir, model_args, data)
    elif (exact or replays) and data.dataset_name is None:
        raise ValueError(
            f"`method` is {wanted.method!r}, for an index, and `--train_dataset` is missing. Expected the training "
            "rows of the index, whose gradients these scores need. Give them, or set `--method index`."
        )
    stored = target_rows(data, targets)
    if wanted.index is not None:
        every = exact or replays
        built = build_from_index(wanted.index, model_args, data, trak, stored, every, isinstance(method, Rerank))
    else:
        built = build(model_args, data, trak, saved)
    attributor = built.attributor
    attributor.features.scored_by = _engine(wanted.scored_by)
    if replays and (wanted.replay.of == "recipe" or wanted.training_args is not None):
        from hf_trak.cli.training import trainer_of  # slow to import

        source = model_args.model_name_or_path
        attributor.features.trainer = trainer_of(attributor.features, wanted.training_args, source)
    rows = built.preparation.prepare(stored, labelled=not wanted.predict)
    if wanted.predict:
        classifies = isinstance(attributor.task, ClassificationModelOutput)
        written = {} if classifies else {"max_new_tokens": wanted.max_new_tokens}
        # A replay is about the weights that the model has.
        with nullcontext() if replays else attributor.features.last_weights(model_args.checkpoints):
            rows = attributor.predict(rows, **written)
    top_k = None if wanted.all_scores else wanted.top_k
    group_by, labels = wanted.group_by, {built.preparation.columns.label_column, *LABELS}
    if group_by is not None and group_by in labels - {*rows.column_names}:
        group_by = "labels"  # as labels are called once they are prepared
    scored = attributor.attribute(
        rows,
        top_k=top_k,
        name=wanted.name,
        checkpoints=model_args.checkpoints,
        method=method,
        group_by=group_by,
        part=None if wanted.words is None else Span(words=wanted.words),
    )
    last, features = last_result(attributor), attributor.features
    # With all scores at hand, collecting the run counts them; of a reranked run only some scores are exact.
    here = attributor.features.scored_by is None
    counts = last.counted() if wanted.distributions and here and last.answer.rows is None else None
    taken = last.answer.method
    asked = wanted.self_influence and here and not isinstance(taken, Replay)
    same = replace(taken, refine=None) if isinstance(taken, Exact) else Index()
    influence = attributor.self_influence(same) if asked else None
    directory = Path(attributor.args.output_dir) / "scores" / wanted.name
    facts: dict[str, Any] = {
        "dataset": data.dataset_name,
        "target_dataset": targets.eval_dataset_name or data.dataset_name,
        **({} if wanted.group_by is None else {"groups of targets": wanted.group_by}),
        **({} if wanted.words is None else {"part of targets": wanted.words}),
        **built.preparation.columns.given(),
        **last.facts(features),
    }
    if wanted.all_scores:
        facts[SCORE_FILES] = features.processes.broadcast_from_main(lambda: score_file_digests(scored, directory))
    shown = last.with_classes(features)
    found = AttributionRun.collect(features, shown, distributions=counts, self_influence=influence, facts=facts)
    if features.processes.is_main_process:
        found.save(directory, every_train_row=wanted.save_train_dataset)
    features.processes.wait_for_everyone()
    if saved:
        record_names(built, model_args, data)
    content = {"run": str(directory), "targets": len(scored), "train_rows": len(attributor.train_dataset)}
    answer(content, _lines(found, directory), output.json)


def _engine(name: str) -> Engine | None:
    """Make the engine of a name; `None` for this process.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if name == "ray":
        from hf_trak.engines.ray import RayEngine

        return RayEngine(num_cpus=1)
    if name == "spark":
        from hf_trak.engines.spark import SparkEngine

        sql = required("pyspark.sql", "`--scored_by spark` needs Spark. Install it with `pip install pyspark`.")
        return SparkEngine(sql.SparkSession.builder.getOrCreate())
    return None


def _lines(run: AttributionRun, directory: Path) -> list[str]:
    views = RunViews(run, examples=3)
    lines = [line for index in range(min(3, len(run.scored))) for line in views.target(index).lines]
    return [*lines, f"Run: {directory}", f"Next: hf-trak report {directory}"]
