"""The report of a training as one HTML file, in the style of the report of targets."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

from hf_trak.evaluation.intervals import Interval
from hf_trak.evaluation.review import trained_classes
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.methods import Method
from hf_trak.report.content import Columns, content_of, stored, visible
from hf_trak.report.images import PictureBook
from hf_trak.report.page import ReportOptions, facts_shown, model_name, write_page
from hf_trak.report.run import known_facts
from hf_trak.report.training import SOURCE, GroupEffect, TrainingReport, effects_of_training
from hf_trak.report.views import EXAMPLE_TEXT, RowView, ScoredView, SoundRoom, bar, shortened, sign_of, signed
from hf_trak.report.words import row_texts
from hf_trak.scores.groups import GroupBy

_GROUPS = 12
"""Sources or labels that are shown from either end."""

_LISTED = 24
"""Doubted rows, and duplicates, that are shown."""

_FACTS = ("model", "model_class", "task", "parameters", "train_fingerprint", "seed", "created", "hf_trak_version")


def _groups(groups: Sequence[GroupEffect]) -> dict[str, Any]:
    """Prepare the table of groups, the most harmful first, and the number of those in between that are not shown."""
    largest = max((abs(one.effect) for one in groups), default=0.0)
    ends = list(groups) if len(groups) <= 2 * _GROUPS else [*groups[:_GROUPS], *groups[-_GROUPS:]]
    shown = [
        {
            **_change(one.effect),
            "value": shortened(one.value),
            "rows": f"{one.rows:,}",
            "each": signed(one.each),
            "bar": bar(one.effect, largest),
        }
        for one in ends
    ]
    return {"shown": shown, "left_out": len(groups) - len(shown)}


def training_report(
    features: FeaturizedModel,
    eval_dataset: Any,
    path: str | Path | None = None,
    *,
    method: Method = "auto",
    train_group_by: GroupBy | None = None,
    make_trainer: Callable[[Any, int], Any] | None = None,
    earlier: TrainingReport | None = None,
    **options: Any,
) -> TrainingReport:
    """Report what the training rows did to the validation loss: rows, sources, labels, duplicates, and a proof.

    Nothing has to be featurized; near duplicates take features. All processes call this together.

    Args:
        features (`FeaturizedModel`):
            The model after the training, and its training rows: `attributor.features`.
        eval_dataset (`Dataset`):
            The validation rows, whose mean loss is one target.
        path (`str` or `Path`, *optional*):
            An HTML file to write.
        method (`str` or a dataclass, *optional*, defaults to `"auto"`):
            [`~hf_trak.Replay`] or [`~hf_trak.Exact`]. `"auto"` replays the run if `TrakCallback(record=True)` has
            recorded it, and else takes exact scores, whose sizes are rougher.
        train_group_by (`str` or a sequence, *optional*):
            The sources: a column of the training dataset, or one value per training row. By default the column
            `source`, if there is one.
        make_trainer (`Callable`, *optional*):
            Proves it: one training without the 5 % of the rows that raised the loss most, and one without as many
            random ones, by `make_trainer(rows, seed)` as in [`~hf_trak.TrakAttributor.verify_replay`].
        earlier (`TrainingReport`, *optional*):
            The report of a training before, such as the one whose rows [`~hf_trak.evaluation.fixed_dataset`] has
            fixed since. The page compares both on the same validation rows.
        options:
            Fields of [`~hf_trak.report.ReportOptions`], such as `title` and `examples`.

    Returns:
        [`~hf_trak.report.training.TrainingReport`]: the effect of each row in units of the mean loss, and all that
        the page shows; `print` shows the most of it.

    Raises:
        TypeError: the task has no loss of every row, or the training rows are no `datasets.Dataset`.
        ValueError: the method is another one, a column does not exist, the trainer's loss cannot be masked, or the
            earlier report has other validation rows.
        ImportError: jinja2, or scipy for a proof or a comparison, is not installed.
        StoreError: the file cannot be written.
        All that [`~hf_trak.TrakAttributor.attribute`] raises.
    """
    shown = ReportOptions(**options)
    found = effects_of_training(features, eval_dataset, method, train_group_by, make_trainer, earlier)
    if path is not None and features.processes.is_main_process:
        write_training_report(found, features, path, shown)
    return found


def write_training_report(
    report: TrainingReport, features: FeaturizedModel, path: str | Path, options: ReportOptions | None = None
) -> Path:
    """Write the report of a training.

    Args:
        report (`TrainingReport`):
            Its content.
        features (`FeaturizedModel`):
            The model and its training rows.
        path (`str` or `Path`):
            The HTML file. It is replaced atomically once it is complete.
        options (`ReportOptions`, *optional*):
            What to show; there are no targets.

    Returns:
        `Path`: the file.

    Raises:
        ImportError: jinja2 or, for images, pillow is not installed.
        ValueError: a column does not exist, or an image column contains something else.
        StoreError: the file cannot be written.
    """
    options = options or ReportOptions()
    known = known_facts(features)
    rows = _Rows(features, options)
    largest = float(abs(report.effects).max())
    doubted = sorted(report.doubted, key=lambda row: -report.effects[row])[:_LISTED]

    def scored(row: int) -> ScoredView:
        effect = float(report.effects[row])
        return ScoredView(rows.view(row), signed(effect), sign_of(-effect), bar(effect, largest))

    settings = {
        f"10 % more {name}": f"changes the loss by {signed(change)}, as far as its derivative tells"
        for name, change in report.settings.items()
    }
    duplicates = _duplicates(report, rows)
    tables = {"sources": report.sources, "labels": report.labels}
    context = {
        "title": visible(options.title or f"What the training rows did to {model_name(known)}"),
        "report": report,
        "summary": [
            (f"{report.loss:.4g}", "validation loss"),
            (f"{len(report.losses):,}", "validation rows"),
            (f"{len(report.effects):,}", "training rows"),
            (f"{(report.effects > 0).mean():.0%}", "of them raised the loss"),
            (f"{report.no_effect:.0%}", "have no effect"),
        ],
        "helped": [scored(row) for row in report.helpful(options.examples)],
        "harmed": [scored(row) for row in report.harmful(options.examples)],
        "tables": {name: _groups(groups) for name, groups in tables.items() if groups},
        "doubted": [(scored(row), shortened(report.doubted[row])) for row in doubted],
        "duplicates": duplicates[:_LISTED],
        "more_duplicates": max(0, len(duplicates) - _LISTED),
        "proof": _proof(report),
        "facts": facts_shown(
            {"method": report.method, "price": report.price, **settings, **{name: known[name] for name in _FACTS}}
        ),
    }
    return write_page("training.html.jinja", path, {**context, "pictures": rows.book.pictures}, with_script=False)


class _Rows:
    """Makes the views of training rows."""

    def __init__(self, features: FeaturizedModel, options: ReportOptions) -> None:
        self.book = PictureBook()
        self._features, self._rows = features, stored(features.train_dataset)
        self._columns = Columns.find(self._rows, **options.columns())
        shown = [*set(self._columns.texts) - {SOURCE}, self._columns.image, self._columns.sound]
        self._decoded = not any(shown)
        self._room = SoundRoom()
        self._label = trained_classes(features)

    def view(self, index: int) -> RowView:
        """Make the view of a row. Rows of tokens alone are decoded."""
        content = content_of(self._rows[index], self._columns)
        train = self._features.train_dataset
        if self._decoded and "input_ids" in train.column_names:
            texts = row_texts(train.select_columns("input_ids"), self._features.processing_class, [index]) or {}
            found = tuple(("text", text) for text in texts.values())
            content = replace(content, texts=(*found, *content.texts))
        return self._room.within(RowView.of(content, index, "Training row", self.book, "small", EXAMPLE_TEXT))

    def same_label(self, row: int, other: int) -> str:
        """Say whether two rows have the same label."""
        if self._label is None:
            return "–"
        first, second = (self._rows[index][self._label] for index in (row, other))
        return "the same" if first == second else "different"


def _duplicates(report: TrainingReport, rows: _Rows) -> list[dict[str, Any]]:
    """List exact and near duplicates."""
    exact = [(row, other, "1, exact") for row, other in report.repeated.items()]
    listed = () if isinstance(report.near, str) else report.near
    near = [(row, other, f"{cosine:.4f}") for row, other, cosine in listed]
    found = list[dict[str, Any]]()
    for row, other, cosine in [*exact[:_LISTED], *near, *exact[_LISTED:]]:
        change = _change(float(report.effects[[row, other]].sum()))
        labels = rows.same_label(row, other) if len(found) < _LISTED else ""
        found.append({**change, "row": f"{row:,}", "other": f"{other:,}", "cosine": cosine, "labels": labels})
    return found


def _proof(report: TrainingReport) -> list[dict[str, Any]]:
    """List what both trainings say."""
    if (proof := report.proof) is None:
        return []

    def view(name: str, predicted: float, measured: Interval) -> dict[str, Any]:
        interval = f"({signed(measured.low)} to {signed(measured.high)})"
        known = "" if isnan(predicted) else signed(predicted)
        return {**_change(measured.value), "name": name, "predicted": known, "interval": interval}

    return [
        view("the most harmful rows", proof.predicted, proof.measured),
        view("random rows", proof.predicted_random, proof.measured_random),
        view("difference", proof.predicted - proof.predicted_random, proof.difference),
    ]


def _change(effect: float) -> dict[str, Any]:
    """Write a change of the loss, with the sign that colours its row of a table: a lower loss is good."""
    return {"effect": signed(effect), "sign": sign_of(-effect)}
