"""`hf-trak verify`: take a training step on the rows that were found for one target, and see what it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_trak.cli.build import begin, build, build_from_index, record_names, require_run, target_rows
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, TargetArguments, answer, option
from hf_trak.config import TrakConfig
from hf_trak.data.columns import LABELS, PREDICTED, is_text
from hf_trak.modelout_functions.aggregated import TARGET_MASK
from hf_trak.report.run import AttributionRun
from hf_trak.runtime.progress import with_column
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.store.atomic import safe_name

SIMILARITIES = ("embeddings", "bm25", "none")


@dataclass
class VerifyArguments:
    """The answer to verify."""

    target: int = option("Number of the target among the rows to explain.", 0)
    rows: list[int] | None = option("Numbers of training rows. By default those that the run found.", None)
    name: str = option("Name of the run of `hf-trak attribute` with the rows.", "targets")
    count: int = option("Number of rows to take from the run.", 10)
    harmful: bool = option("Take the rows of the lowest scores from the run.", False)
    similar: str = option("How rows that look like the target are found: embeddings, bm25 or none.", "embeddings")
    draws: int = option("How often as many random rows are drawn.", 16)
    save: bool = option("Write the verdict into the run, whose report then shows it.", False)
    index: str | None = option("Published index, a repo or a directory; needs --train_dataset, too.", None)

    def __post_init__(self) -> None:
        safe_name(self.name, "name")
        if self.similar not in SIMILARITIES:
            raise ValueError(f"`similar` is {self.similar!r}. Expected one of {', '.join(SIMILARITIES)}.")
        if self.save and self.rows is not None:
            raise ValueError(
                f"`save` is set, and `rows` is {self.rows}. Expected the rows of the run, in which the verdict is "
                "saved. Leave `--rows` or `--save` out."
            )
        if self.count < 1:
            raise ValueError(f"`count` is {self.count}. Expected at least 1.")


def run(argv: Sequence[str]) -> None:
    """Verify one answer.

    Raises:
        ValueError: the target does not exist, the run has other targets, or an index is given without training rows.
    """
    kinds = (TargetArguments, VerifyArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    saved, (targets, wanted, model_args, data, trak, output) = begin(
        kinds,
        argv,
        prog="hf-trak verify",
        description="Take one small training step on the rows that were found for a target, on random rows and on "
        "rows that look like it, and compare what each does to the target's output. The model is left as it was. "
        "Model, training rows and settings are by default those that `hf-trak featurize` has recorded in output_dir.",
    )
    if wanted.index is None:
        require_run(trak.output_dir, model_args, data)
    elif data.dataset_name is None:
        raise ValueError(
            "`index` is given, and `--train_dataset` is missing. Expected the training rows of the index, on which "
            "steps are taken. Give them."
        )
    stored = target_rows(data, targets)
    if not 0 <= wanted.target < len(stored):
        raise ValueError(
            f"`target` is {wanted.target}. Expected a number from 0 to {len(stored) - 1}, of the targets."
        )
    if wanted.index is not None:
        built = build_from_index(wanted.index, model_args, data, trak, stored, with_rows=True)
    else:
        built = build(model_args, data, trak, saved)
    attributor = built.attributor
    directory = Path(attributor.args.output_dir) / "scores" / wanted.name
    target, rows = stored.select([wanted.target]), wanted.rows
    if rows is None:
        scored = AttributionRun.load(directory).scored
        rows = _rows_of_run(scored, directory, wanted, stored)
        prepared = _as_attributed(scored.select([wanted.target]), target, built.preparation.prepare)
    else:
        prepared = built.preparation.prepare(target)
    found = attributor.verify(
        prepared,
        rows,
        similar=None if wanted.similar == "none" else wanted.similar,
        draws=wanted.draws,
        checkpoints=model_args.checkpoints,
    )
    if wanted.save and attributor.features.processes.is_main_process:
        saved_run = AttributionRun.load(directory)
        end = "lowest" if wanted.harmful else "highest"
        saved_run.facts[f"verified: target {wanted.target}, its {len(rows)} {end} rows"] = found.verdict
        saved_run.save(directory)
    content: dict[str, Any] = {"target": wanted.target, **found.to_dict()}
    heading = f"Target {wanted.target}, training rows {', '.join(map(str, rows))}"
    if saved:
        record_names(built, model_args, data)
    answer(content, [heading, *str(found).split("\n")], output.json)


def _as_attributed(scored: Dataset, target: Dataset, prepare: Callable[..., Dataset]) -> Dataset:
    """Prepare a target as a run has attributed it: what it says itself, or a part of it, is in the run alone."""
    names = {*scored.column_names} - {*target.column_names}
    if TARGET_MASK in names:
        return scored
    label = next((name for name in LABELS if name in scored.column_names), None)
    if PREDICTED not in names or label is None:
        return prepare(target)
    bare = prepare(target, labelled=False)
    bare = bare.remove_columns([name for name in LABELS if name in bare.column_names])
    return with_column(bare, label, scored[label][:], feature=scored.features[label])


def _rows_of_run(scored: Dataset, directory: Path, wanted: VerifyArguments, targets: Dataset) -> list[int]:
    """Take the rows that a run found for the target, which has to be the one that is to be explained."""
    if len(scored) != len(targets):
        raise ValueError(
            f"The run in {str(directory)!r} has {len(scored)} targets, and there are {len(targets)} rows to explain. "
            "Expected the same rows. Give the `--eval_dataset` of the run, or name rows with `--rows`."
        )
    mine, other = scored[wanted.target], targets[wanted.target]
    shared = [
        name
        for name in targets.column_names
        if name in mine and is_text(targets.features[name]) and name not in LABELS
    ]
    if changed := [name for name in shared if mine[name] != other[name]]:
        raise ValueError(
            f"Target {wanted.target} of the run in {str(directory)!r} has the {changed[0]} {mine[changed[0]]!r:.80}, "
            f"and the row to explain {other[changed[0]]!r:.80}. Expected the same rows. Give the `--eval_dataset` of "
            "the run, or name rows with `--rows`."
        )
    listed = mine[TOP_K_COLUMNS[2 if wanted.harmful else 0]]
    return [int(row) for row in listed[: wanted.count]]
