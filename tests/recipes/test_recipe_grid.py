"""`image_grid` draws the right images in the right places, for images of any form."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from kit import grid
from kit.grid import image_grid
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image as PILImage

from hf_trak.scores.scored_dataset import attach_columns, fixed_size_list

# Twelve training images, each of one colour that nothing else in the picture has.
COLORS = [(20 * i + 5, 255 - 20 * i, (70 * i) % 256) for i in range(12)]
TARGET_COLORS = [(1, 2, 250), (250, 2, 1)]
HELPED = (0x00, 0x72, 0xB2)


def flat(color) -> PILImage.Image:
    return PILImage.new("RGB", (6, 6), color)


def rows(colors, labels) -> Dataset:
    features = Features({"image": Image(), "label": ClassLabel(names=["zero", "one", "two"])})
    return Dataset.from_dict({"image": [flat(color) for color in colors], "label": labels}, features=features)


@pytest.fixture
def train():
    return rows(COLORS, [i % 3 for i in range(len(COLORS))])


@pytest.fixture
def scored():
    columns = {
        "trak_indices": fixed_size_list(np.array([[3, 0, 7], [1, 2, 5]])),
        "trak_scores": fixed_size_list(np.array([[0.3, 0.2, 0.1], [3.0, 2.0, 1.0]], dtype=np.float32)),
        "trak_harmful_indices": fixed_size_list(np.array([[8, 4, 6], [9, 10, 11]])),
        "trak_harmful_scores": fixed_size_list(np.array([[-0.3, -0.2, 0.05], [-3, -2, -1]], dtype=np.float32)),
    }
    return attach_columns(rows(TARGET_COLORS, [0, 1]), Dataset(pa.table(columns)))


def place(picture: Path, color) -> tuple[float, float] | None:
    """Find the centre (x, y) of the pixels of one colour, or `None` if there are none."""
    pixels = np.asarray(PILImage.open(picture).convert("RGB")).astype(int)
    ys, xs = np.nonzero((np.abs(pixels - np.array(color)) <= 1).all(axis=-1))
    return (float(xs.mean()), float(ys.mean())) if len(xs) > 500 else None


def test_long_labels_do_not_overlap(train, scored, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(grid, "_save", lambda figure, path: figures.append(figure))
    names = ["three by hand", "WWWWWWWWWWWWWWWWWWWW", "it"]
    image_grid(scored, train, [0, 1], tmp_path / "grid.png", n=3, label_names=names)
    renderer = FigureCanvasAgg(figures[0])
    renderer.draw()
    titles = [axes.title for axes in figures[0].axes if axes.title.get_text()]
    boxes = [title.get_window_extent(renderer.get_renderer()) for title in titles]
    assert {title.get_text() for title in titles} == {"three by hand", "WWWWWWWWWWWWW…", "it"}
    assert not [1 for box, other in combinations(boxes, 2) if box.overlaps(other)]
    assert {title.get_fontsize() for title in titles if title.get_text() == "it"} == {10}


def test_images_stand_where_their_scores_put_them(train, scored, tmp_path):
    path = image_grid(scored, train, [0], tmp_path / "deep" / "grid.png", n=2, predictions=[1, 1])
    assert path == tmp_path / "deep" / "grid.png"
    order = [TARGET_COLORS[0], COLORS[3], COLORS[0], COLORS[8], COLORS[4]]
    xs = [place(path, color)[0] for color in order]
    assert xs == sorted(xs)
    for absent in (7, 6, 1, 2, 5, 9, 10, 11):
        assert place(path, COLORS[absent]) is None
    assert [file.name for file in path.parent.iterdir()] == ["grid.png"]


def test_targets_are_drawn_top_to_bottom_in_the_given_order(train, scored, tmp_path):
    path = image_grid(scored, train, [1, 0], tmp_path / "grid.png", n=3)
    assert place(path, TARGET_COLORS[1])[1] < place(path, TARGET_COLORS[0])[1]
    assert place(path, COLORS[11])[1] == pytest.approx(place(path, COLORS[1])[1], abs=2)
    assert place(path, COLORS[11])[1] < place(path, COLORS[8])[1]


def test_what_helped_is_not_drawn_among_the_rows_that_harmed(train, scored, tmp_path):
    def frames(n: int, color) -> int:
        path = image_grid(scored, train, [0], tmp_path / f"grid{n}.png", n=n)
        pixels = np.asarray(PILImage.open(path).convert("RGB")).astype(int)
        left, right = place(path, COLORS[4])[0], pixels.shape[1]
        beyond = pixels[:, int(left) + 80 : right]  # right of the second harmful row
        return int((np.abs(beyond - np.array(color)) <= 1).all(axis=-1).sum())

    # The third harmful row's score is +0.05: nothing harmed the target there.
    assert frames(3, HELPED) == 0


def test_a_transform_for_training_does_not_change_the_picture(train, scored, tmp_path):
    plain = image_grid(scored, train, [0, 1], tmp_path / "plain.png", n=2)
    hidden = train.with_transform(lambda batch: {"pixel_values": [torch.zeros(3) for _ in batch["image"]]})
    image_grid(scored, hidden, [0, 1], tmp_path / "hidden.png", n=2)
    first, second = (np.asarray(PILImage.open(file)) for file in (plain, tmp_path / "hidden.png"))
    assert (first == second).all()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "as_array",
    [
        lambda color: np.full((6, 6, 3), color, dtype=np.uint8),
        lambda color: torch.tensor(color, dtype=torch.float32)[:, None, None].expand(3, 6, 6) / 255,
        lambda color: np.full((6, 6, 3), color) / 255,
    ],
)
def test_arrays_and_tensors_of_any_layout(train, scored, tmp_path, as_array):
    as_list = [{"image": as_array(color), "label": 0} for color in COLORS]
    path = image_grid(scored, as_list, [0], tmp_path / "grid.png", n=2)
    assert place(path, COLORS[3])[0] < place(path, COLORS[8])[0]


def test_grey_images_of_other_ranges_are_stretched(train, scored, tmp_path):
    ramp = np.linspace(-3.0, 5.0, 36).reshape(6, 6)
    as_list = [{"image": ramp, "label": 0} for _ in COLORS]
    path = image_grid(scored, as_list, [0], tmp_path / "grid.png", n=1)
    grey = np.asarray(PILImage.open(path).convert("RGB"))
    levels = {int(value) for value in np.unique(grey[(grey == grey[..., :1]).all(axis=-1)])}
    assert {round(255 * step / 35) for step in (0, 10, 20, 35)} <= {level + d for level in levels for d in (-1, 0, 1)}


def test_shape_that_is_no_image(scored, tmp_path):
    as_list = [{"image": np.zeros((2, 5, 5)), "label": 0} for _ in COLORS]
    with pytest.raises(ValueError, match=r"shape \(2, 5, 5\). Expected"):
        image_grid(scored, as_list, [0], tmp_path / "grid.png")
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.slow
def test_labels_change_the_picture_and_can_be_left_out(train, scored, tmp_path):
    pictures = [
        image_grid(scored, train, [0], tmp_path / f"{name}.png", **options).read_bytes()
        for name, options in {
            "plain": {},
            "named": {"label_names": ["null", "eins", "zwei"]},
            "none": {"label_column": None},
            "right": {"predictions": [0, 0]},
            "wrong": {"predictions": [2, 0]},
            "titled": {"title": "Digits"},
        }.items()
    ]
    assert len(set(pictures)) == len(pictures)
    strings = train.cast_column("label", Value("string"))
    image_grid(scored.cast_column("label", Value("string")), strings, [0], tmp_path / "strings.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": []}, "`targets` is empty"),
        ({"targets": [0, 2]}, r"`targets` has \[2\]. Expected row numbers of `scored`, 0 … 1"),
        ({"n": 0}, "`n` is 0"),
        ({"predictions": [1]}, "`predictions` has 1 entries. Expected one per target, 2"),
        ({"image_column": "img"}, "`scored` has no column 'img'"),
        ({"label_column": "fine_label"}, "`scored` has no column 'fine_label'"),
    ],
)
def test_wrong_arguments(train, scored, tmp_path, change, message):
    arguments = {"targets": [0], **change}
    with pytest.raises(ValueError, match=message):
        image_grid(scored, train, path=tmp_path / "grid.png", **arguments)
    assert not (tmp_path / "grid.png").exists()


def test_scores_of_another_dataset_or_without_top_k(train, scored, tmp_path):
    with pytest.raises(ValueError, match=r"names training row 3; `train_dataset` has 2 rows"):
        image_grid(scored, train.select([0, 1]), [0], tmp_path / "grid.png")
    with pytest.raises(ValueError, match=r"\['trak_harmful_indices', 'trak_harmful_scores'\] are missing"):
        full = scored.remove_columns(["trak_harmful_indices", "trak_harmful_scores"])
        image_grid(full, train, [0], tmp_path / "grid.png")
    with pytest.raises(ValueError, match=r"`train_dataset` has no column 'image'"):
        image_grid(scored, train.rename_column("image", "img"), [0], tmp_path / "grid.png")


def test_without_matplotlib_the_error_names_the_extra(train, scored, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib pillow"):
        image_grid(scored, train, [0], tmp_path / "grid.png")


def test_importing_the_report_does_not_import_matplotlib():
    code = "import sys, hf_trak.report; assert not any(name.startswith('matplotlib') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
