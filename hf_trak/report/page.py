"""The report: one HTML file that needs no server and makes no requests.

The templates escape everything that comes from a dataset. As a second line of defence, the Content-Security-Policy of
the page forbids all requests, and all scripts and styles except the two of this package, which it names by digest.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_trak.report.content import visible
from hf_trak.report.run import AttributionRun
from hf_trak.report.views import RunViews, TargetView, number, signed
from hf_trak.runtime.arguments import named_arguments
from hf_trak.store.atomic import atomic_path
from hf_trak.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment

_BETWEEN_TAGS = re.compile(r">\n\s*(?=[<{])")

_LONGEST_FACT = 2000
_LONGEST_TITLE = 300

_FACT_NAMES = {
    "model_class": "Class of the model",
    "parameters": "Attributed parameters",
    "features": "Features per example (k)",
    "ridge": "Ridge λ",
    "train_rows": "Training rows",
    "train_fingerprint": "Fingerprint of the training rows",
    "lds": "Linear datamodeling score",
    "hf_trak_version": "hf_trak",
}


@named_arguments
@dataclass(frozen=True)
class ReportOptions:
    """Options of a report. Columns that are not given are inferred from the features and the first row.

    Args:
        title (`str`, *optional*):
            The heading. By default it is made from the name of the model.
        examples (`int`, *optional*, defaults to 5):
            Number of training rows shown from either end.
        max_targets (`int`, *optional*):
            Number of targets shown, from the first one on. By default all.
        image_column (`str`, *optional*):
            Name of the image column.
        text_columns (`Sequence[str]`, *optional*):
            Names of the text columns.
        label_column (`str`, *optional*):
            Name of the label column.
        label_names (`Sequence[str]`, *optional*):
            Names of integer labels.

    Raises:
        ValueError: `examples` or `max_targets` is below 1.
    """

    title: str | None = None
    examples: int = 5
    max_targets: int | None = None
    image_column: str | None = None
    text_columns: Sequence[str] | None = None
    label_column: str | None = None
    label_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("examples", "max_targets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}. Expected at least 1.")

    def columns(self) -> dict[str, Any]:
        """Return the options about columns, as arguments of `Columns.find`."""
        names = ("image_column", "text_columns", "label_column", "label_names")
        return {name: getattr(self, name) for name in names}


def write_report(run: AttributionRun, path: str | Path, options: ReportOptions | None = None) -> Path:
    """Write the report of a run.

    Args:
        run (`AttributionRun`):
            Scores and rows.
        path (`str` or `Path`):
            The HTML file. It is replaced atomically once the report is complete.
        options (`ReportOptions`, *optional*):
            What to show.

    Returns:
        `Path`: the file.

    Raises:
        ImportError: jinja2 or, for images, pillow is not installed.
        ValueError: a column does not exist, or an image column contains something else.
        StoreError: the run lacks a training row, or the file cannot be written.
    """
    options = options or ReportOptions()
    views = RunViews(run, options.examples, options.columns())
    count = len(run.scored) if options.max_targets is None else min(options.max_targets, len(run.scored))
    targets = [views.target(index) for index in range(count)]
    outliers = views.outliers()
    context = {
        "title": visible(options.title or f"What taught {model_name(run.facts)} this?"),
        "targets": targets,
        "left_out": len(run.scored) - count,
        "outliers": outliers,
        "summary": _summary(run, targets),
        "facts": facts_shown(run.facts),
        "pictures": views.book.pictures,
    }
    return write_page("report.html.jinja", path, context, with_script=True)


def write_page(template: str, path: str | Path, context: Mapping[str, Any], with_script: bool) -> Path:
    """Render a template into a file, which is replaced atomically once it is complete.

    Args:
        template: name of the template.
        path: the file.
        context: what the template shows.
        with_script: whether the page has the script of the report of targets.

    Raises:
        ImportError: jinja2 is not installed.
        StoreError: the file cannot be written.
    """
    path = Path(path)
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for part in environment().get_template(template).generate(**context, **_assets(with_script)):
            file.write(part)
    return path


def target_page(view: TargetView, pictures: Sequence[Any]) -> str:
    """Render the page of a single target, without a script, for a frame in a notebook.

    Raises:
        ImportError: jinja2 is not installed.
    """
    context = {"view": view, "pictures": pictures, "title": f"Target {view.target.row}"}
    return environment().get_template("target.html.jinja").render(**context, **_assets(with_script=False))


def facts_shown(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Format the facts of a run as pairs of name and value, without empty values."""
    shown = []
    for name, value in facts.items():
        if value is None or value == [] or value == {}:
            continue
        if isinstance(value, bool | str):
            text = str(value)
        elif isinstance(value, int):
            text = f"{value:,}"
        elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
            text = ", ".join(str(item) for item in value)
        else:
            text = _as_json(value)
        title = _FACT_NAMES.get(name, name[:_LONGEST_FACT].replace("_", " ").capitalize())
        shown.append((visible(title), visible(text[:_LONGEST_FACT])))
    return shown


def model_name(facts: Mapping[str, Any]) -> str:
    """Name the model of a run in a title."""
    name = facts.get("model")
    return name[:_LONGEST_TITLE] if isinstance(name, str) and name else "the model"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, TypeError, ValueError):
        return "(values that are no JSON, or nested too deeply)"


def _summary(run: AttributionRun, targets: Sequence[TargetView]) -> list[tuple[str, str]]:
    """Compute the figures at the top of the page, as pairs of a value and what it counts."""
    figures = [(f"{len(run.scored):,}", "targets"), (f"{run.n_train:,}", "training rows")]
    checkpoints = run.facts.get("checkpoints")
    if isinstance(checkpoints, list) and checkpoints:
        figures.append((f"{len(checkpoints)}", "checkpoint" if len(checkpoints) == 1 else "checkpoints"))
    judged = [view.target for view in targets if view.target.prediction is not None and view.target.label is not None]
    if judged:
        right = np.mean([not target.wrong for target in judged])
        figures.append((f"{right:.1%}", "of the targets predicted right"))
    pairs = [
        (view.target.label, scored.example.label)
        for view in targets
        for scored in view.helped
        if view.target.label is not None and scored.example.label is not None
    ]
    if pairs:
        figures.append(
            (f"{np.mean([a == b for a, b in pairs]):.1%}", "of the most helpful rows share the target’s label")
        )
    return figures


def _assets(with_script: bool) -> dict[str, Any]:
    """Load style and script, marked as safe, and make the policy that allows them and nothing else."""
    script = packaged_text("report.js") if with_script else ""
    return assets(packaged_text("report.css"), script) | {"version": __version__}


def assets(style: str, script: str = "") -> dict[str, Any]:
    """Mark a style and a script as safe, and make the policy that allows them and nothing else.

    Args:
        style: the style of a page.
        script: its script; an empty text for none.
    """
    from markupsafe import Markup

    policy = (
        f"default-src 'none'; img-src data:; media-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script) if script else 'none'}'; base-uri 'none'; form-action 'none'"
    )
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def packaged_text(name: str, directory: str = "report/templates") -> str:
    """Read a file that comes with this package.

    Args:
        name: name of the file.
        directory: its directory in the package.
    """
    return (files("hf_trak") / directory / name).read_text(encoding="utf-8")


@cache
def environment() -> "Environment":
    """Make the environment of the templates, which escapes everything.

    Raises:
        ImportError: jinja2 is not installed.
    """
    from jinja2 import DictLoader, Environment, StrictUndefined

    names = [f"{name}.html.jinja" for name in ("base", "report", "target", "training", "parts")]
    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Removing the line breaks between tags saves a third of the nodes of a page.
        loader=DictLoader({name: _BETWEEN_TAGS.sub(">", packaged_text(name)) for name in names}),
        finalize=_not_none,
        extensions=[],
    )
    made.filters |= {"signed": signed, "number": number}
    return made


def _not_none(value: Any) -> Any:
    """Refuse `None`, which reaches a template only by a mistake in this package."""
    if value is None:
        raise ValueError("A template was given `None` to show.")
    return value
