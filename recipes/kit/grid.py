"""A picture of attributions: each target image next to the training images that helped and harmed it most."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import ClassLabel, Dataset

from hf_trak.report.content import stored
from hf_trak.report.images import UnreadableImageError, as_pixels, bounded
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.store.atomic import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and vermilion can be told apart with every common colour vision deficiency.
_HELPED, _HARMED, _NEUTRAL, _INK, _FAINT = "#0072B2", "#D55E00", "#9AA0A6", "#202124", "#6B7075"
_CELL_INCHES = 1.05
_ROW_INCHES = 1.55
_HEADER_INCHES = 0.62
_FOOTER_INCHES = 0.36
_FOOTER_LINE_INCHES = 0.14
_FOOTER_CHARACTERS_PER_INCH = 16
_GAP = 0.34  # in cells, between the target, the helpful and the harmful images
_SMOOTH_FROM = 64  # pixels; smaller images are shown pixel by pixel
_LONGEST_LABEL = 14
_MOST_PIXELS = 4 << 20  # pixels of an image that are drawn, far more than are printed
_NOTE = (
    "Under each training image: its row and its score. Positive: training on it raised the model output for the "
    "target's label; negative: it lowered it. Bold: a label other than the target's."
)
_CAPTION: dict[str, Any] = {"fontsize": 7.5, "labelpad": 3, "linespacing": 1.25}


def image_grid(
    scored: Dataset,
    train_dataset: Any,
    targets: Sequence[int],
    path: str | os.PathLike[str],
    *,
    image_column: str = "image",
    label_column: str | None = "label",
    n: int = 5,
    label_names: Sequence[str] | None = None,
    predictions: Sequence[int] | None = None,
    title: str | None = None,
) -> Path:
    """Draw one row per target: the target, its n most helpful and its n most harmful training images.

    Frames are blue if the score is positive (training on the image raised the model output of the target), and
    vermilion if it is negative. Row number and score are written under each training image. An image that cannot be
    decoded, or has too many pixels, is replaced by the reason.

    Args:
        scored (`datasets.Dataset`):
            The result of `TrakAttributor.attribute(..., top_k=...)`, one row per target.
        train_dataset (`Dataset`):
            The training rows that the indices in `scored` refer to.
        targets (`Sequence[int]`):
            Rows of `scored` to draw, from top to bottom.
        path (`str` or `os.PathLike`):
            The file. Its suffix determines the format. It is replaced atomically once the picture is complete.
        image_column (`str`, *optional*, defaults to `"image"`):
            Name of the image column in both datasets: `datasets.Image`, or arrays (H, W), (H, W, C) or (C, H, W).
        label_column (`str` or `None`, *optional*, defaults to `"label"`):
            Name of the label column in both datasets. `None` draws no labels.
        n (`int`, *optional*, defaults to 5):
            Number of images on either side, or fewer if `scored` has fewer, or fewer of its scores have the sign.
        label_names (`Sequence[str]`, *optional*):
            Names of integer labels. By default those of the `datasets.ClassLabel` column, if it is one.
        predictions (`Sequence[int]`, *optional*):
            Predicted label of each row of `scored`. Wrong predictions are written in vermilion.
        title (`str`, *optional*):
            A heading.

    Returns:
        `Path`: the file.

    Raises:
        ImportError: matplotlib is not installed (extra `report`).
        StoreError: the picture cannot be written.
        ValueError: a column, target or index does not exist, or the number of predictions is not that of `scored`.
    """
    _check(scored, train_dataset, targets, image_column, label_column, n, predictions)
    figure_class = _figure_class()
    rows, train_rows = stored(scored), stored(train_dataset)  # without transforms, which may turn images into tensors
    n = min(n, len(rows[int(targets[0])][TOP_K_COLUMNS[0]]))
    if label_names is None and label_column is not None and isinstance(scored.features[label_column], ClassLabel):
        label_names = scored.features[label_column].names

    def label_of(row: dict[str, Any]) -> str | None:
        return None if label_column is None else _name(row[label_column], label_names)

    figure, axes = _layout(figure_class, len(targets), n, title)
    for cells, target in zip(axes, targets, strict=True):
        row = rows[int(target)]
        truth = label_of(row)
        prediction = None if predictions is None else _name(predictions[int(target)], label_names)
        _draw_target(cells[0], row[image_column], int(target), truth, prediction)
        for side, (indices, scores) in enumerate((TOP_K_COLUMNS[:2], TOP_K_COLUMNS[2:])):
            for cell, index, score in zip(
                cells[1 + side * n : 1 + (side + 1) * n], row[indices][:n], row[scores][:n], strict=True
            ):
                if not 0 <= index < len(train_dataset):
                    raise ValueError(
                        f"Row {int(target)} of `scored` names training row {index}; `train_dataset` has "
                        f"{len(train_dataset)} rows. Expected the dataset that was attributed."
                    )
                if score == 0 or (score > 0) != (side == 0):  # what helped is not under "Harmed most"
                    cell.set_axis_off()
                    continue
                train_row = train_rows[index]
                _draw_example(cell, train_row[image_column], index, score, label_of(train_row), truth)
    return _save(figure, Path(path))


def _check(
    scored: Dataset,
    train_dataset: Any,
    targets: Sequence[int],
    image_column: str,
    label_column: str | None,
    n: int,
    predictions: Sequence[int] | None,
) -> None:
    if missing := [name for name in TOP_K_COLUMNS if name not in scored.column_names]:
        raise ValueError(
            f"`scored` has the columns {scored.column_names}; {missing} are missing. Expected the result of "
            "`attribute(..., top_k=...)` with a number as `top_k`."
        )
    for which, dataset in (("scored", scored), ("train_dataset", train_dataset)):
        # The first row tells the columns of a training set that is no `datasets.Dataset`.
        columns = getattr(dataset, "column_names", None) or list(dataset[0])
        for name in (image_column, label_column):
            if name is not None and name not in columns:
                raise ValueError(
                    f"`{which}` has no column {name!r}. Expected one of {columns}. Set `image_column` or "
                    "`label_column`."
                )
    if len(targets) == 0:
        raise ValueError("`targets` is empty. Expected at least one row number of `scored`.")
    if outside := [int(target) for target in targets if not 0 <= target < len(scored)]:
        raise ValueError(f"`targets` has {outside}. Expected row numbers of `scored`, 0 … {len(scored) - 1}.")
    if n < 1:
        raise ValueError(f"`n` is {n}. Expected at least 1.")
    if predictions is not None and len(predictions) != len(scored):
        raise ValueError(f"`predictions` has {len(predictions)} entries. Expected one per target, {len(scored)}.")


def _figure_class() -> type["Figure"]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`image_grid` draws with matplotlib, which is not installed. Install it with "
            "`pip install matplotlib pillow`."
        ) from error
    return Figure


def _name(label: Any, names: Sequence[str] | None) -> str:
    if isinstance(label, str) or names is None:
        return str(label)
    return str(names[int(label)])


def _short(label: str) -> str:
    label = label.split(",")[0]
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def _layout(figure_class: type["Figure"], rows: int, n: int, title: str | None) -> tuple["Figure", list[list["Axes"]]]:
    """Make the figure and, for each row, the axes of the target, the n helpful and the n harmful images.

    The figure is made without pyplot, so that it needs no window and no display, and changes no global state.
    """
    # Sizes in inches: from top to bottom a header, the rows, and a footer with the note.
    widths = [1.1, _GAP, *[1.0] * n, _GAP, *[1.0] * n]
    header = _HEADER_INCHES + (0.35 if title else 0.0)
    width = (sum(widths) + 0.6) * _CELL_INCHES
    note = textwrap.wrap(_NOTE, int(width * _FOOTER_CHARACTERS_PER_INCH))
    footer = _FOOTER_INCHES + len(note) * _FOOTER_LINE_INCHES
    height = header + rows * _ROW_INCHES + footer
    figure = figure_class(figsize=(width, height), dpi=150, facecolor="white")
    left, right = 0.3 * _CELL_INCHES / width, 1 - 0.3 * _CELL_INCHES / width
    # One cell for the target and n on either side, with gaps between the three.
    grid = figure.add_gridspec(
        rows,
        len(widths),
        width_ratios=widths,
        left=left,
        right=right,
        top=1 - header / height,
        bottom=(footer + 0.2) / height,
        wspace=0.12,
        hspace=0.62,
    )
    columns = [0, *range(2, 2 + n), *range(3 + n, 3 + 2 * n)]
    axes = [[figure.add_subplot(grid[row, column]) for column in columns] for row in range(rows)]

    def heading(first: "Axes", last: "Axes", text: str, color: str) -> None:
        start, stop = first.get_position().x0, last.get_position().x1
        figure.text(
            (start + stop) / 2, 1 - (header - 0.32) / height, text, ha="center", va="bottom", fontsize=11, color=color,
            fontweight="bold",
        )  # fmt: skip

    heading(axes[0][0], axes[0][0], "Target", _INK)
    heading(axes[0][1], axes[0][n], "Helped most", _HELPED)
    heading(axes[0][n + 1], axes[0][2 * n], "Harmed most", _HARMED)
    if title:
        figure.text(left, 1 - 0.14 / height, title, ha="left", va="top", fontsize=13, color=_INK)
    figure.text(left, 0.12 / height, "\n".join(note), va="bottom", fontsize=7.5, color=_FAINT)
    return figure, axes


def _draw_target(axes: "Axes", image: Any, row: int, label: str | None, prediction: str | None) -> None:
    """Draw a target with its label above, and its row and prediction below."""
    _draw(axes, image, _INK, 1.0)
    if label is not None:
        _title(axes, _short(label), 11, "bold")
    wrong = prediction is not None and prediction != label
    caption = f"row {row}" if prediction is None else f"row {row}\npredicted {_short(prediction)}"
    weight = "bold" if wrong else "normal"
    axes.set_xlabel(caption, color=_HARMED if wrong else _FAINT, fontweight=weight, **_CAPTION)


def _draw_example(axes: "Axes", image: Any, row: int, score: float, label: str | None, truth: str | None) -> None:
    """Draw a training image with its label above (bold if it is not `truth`, the target's), and its score below."""
    _draw(axes, image, _HELPED if score > 0 else _HARMED if score < 0 else _NEUTRAL, 2.2)
    if label is not None:
        weight = "normal" if label == truth else "bold"
        _title(axes, _short(label), 10, weight)
    axes.set_xlabel(f"row {row}\n{score:+.3g}".replace("-", "−"), color=_FAINT, **_CAPTION)


def _title(axes: "Axes", text: str, size: float, weight: str) -> None:
    """Write a label above its image, in letters so small that it is no wider."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    room = axes.get_position(original=True).width * axes.get_figure().get_figwidth() * 72
    taken = TextPath((0, 0), text, size=size, prop=FontProperties(weight=weight)).get_extents().width
    axes.set_title(text, fontsize=size * min(1.0, room / max(taken, 1.0)), color=_INK, pad=4, fontweight=weight)


def _draw(axes: "Axes", image: Any, color: str, line_width: float) -> None:
    """Draw an image in a frame, or the reason why it cannot be shown."""
    try:
        pixels = as_pixels(bounded(image, _MOST_PIXELS))
    except UnreadableImageError as error:
        reason = textwrap.fill(f"Not shown: {error}.", 18)
        axes.text(
            0.5, 0.5, reason, ha="center", va="center", fontsize=5, color=_FAINT, transform=axes.transAxes,
            parse_math=False,
        )  # fmt: skip
    else:
        smooth = max(pixels.shape[:2]) >= _SMOOTH_FROM
        axes.imshow(pixels, cmap="gray", interpolation="antialiased" if smooth else "nearest", vmin=0.0, vmax=1.0)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(color)
        spine.set_linewidth(line_width)


def _save(figure: "Figure", path: Path) -> Path:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png")
    return path
