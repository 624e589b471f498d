"""Reports of rows that are made to exhaust memory or time, or to break it: written anyway, with the reasons."""

import html
import io
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, Features, Image, Json, List, Value
from kit.grid import image_grid
from PIL import Image as PILImage
from places import PYTHONPATH
from test_report import Elements, with_scores

from hf_trak.errors import StoreError
from hf_trak.report import AttributionRun, ReportOptions, write_report
from hf_trak.report.content import Columns, EncodedImage, content_of, stored
from hf_trak.report.images import MOST_PIXELS, PictureBook, UnreadableImageError, bounded
from hf_trak.report.page import target_page
from hf_trak.report.run import with_scores_of
from hf_trak.report.views import RunViews


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, color: bool = False, rows: int | None = None) -> bytes:
    """Make a black PNG of one bit or of four bytes per pixel, cut off after `rows` rows."""
    compressor = zlib.compressobj(1 if color else 9)
    row = bytes(1 + (4 * width if color else (width + 7) // 8))
    data = b"".join(compressor.compress(row * 1000) for _ in range((rows or height) // 1000))
    data += compressor.compress(row * ((rows or height) % 1000)) + compressor.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8 if color else 1, 6 if color else 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def encoded(picture: PILImage.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def run_of(images: list[Any]) -> AttributionRun:
    """Make a run whose targets and training rows have the given images: bytes, or `{"bytes", "path"}`."""
    rows = [image if isinstance(image, dict) or image is None else {"bytes": image, "path": None} for image in images]
    features = Features({"image": Image(), "text": Value("string")})
    data = Dataset.from_dict({"image": rows, "text": [f"row {i}" for i in range(len(rows))]}, features=features)
    return AttributionRun(with_scores(data, torch.randn(len(rows), len(rows)), k=len(rows)), data)


def reasons(run: AttributionRun, path: Path) -> set[str]:
    """Collect the reasons that the report of a run gives for images that it does not show."""
    found = re.findall(r'<p class="unshown">Not shown: the image: (.*?)\.</p>', write_report(run, path).read_text())
    return set(map(html.unescape, found))


GOOD = encoded(PILImage.new("RGB", (8, 8), (9, 99, 199)), "PNG")


# -- images ----------------------------------------------------------------------------------------------------------

MEMORY = """
import sys
from pathlib import Path
import matplotlib.figure, PIL.Image
from kit.grid import image_grid
from hf_trak.report import AttributionRun, write_report
from hf_trak.report.page import environment

def memory(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) // 1024

PIL.Image.init()
environment().get_template("report.html.jinja")
run = AttributionRun.load(sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")  # forget the highest use so far
before = memory("VmRSS")
write_report(run, Path(sys.argv[1]) / "report.html")
image_grid(run.scored, run.train, [0], Path(sys.argv[1]) / "grid.png", label_column=None, n=1)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the highest use of memory is Linux's to tell")
def test_images_that_grow_when_they_are_decoded_take_little_memory(tmp_path: Path):
    """Images of 64 million pixels of 4 bytes are decoded one at a time. Without a bound, 169 million pixels of one bit
    took 2,300 MiB.
    """
    images = [png(13_000, 13_000), png(8000, 8000), png(8000, 8000, color=True), png(60_000_000, 1)]
    assert max(len(images[0]), len(images[1])) < 25_000
    run_of([*images, GOOD]).save(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    page = (tmp_path / "report.html").read_text()
    assert "13,000 × 13,000 pixels" in page and "60,000,000 × 1 pixels" in page and page.count("<image") == 5
    assert int(result.stdout) < 1.5 * 4 * MOST_PIXELS / 2**20


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (lambda: png(13_000, 13_000), "13,000 × 13,000 pixels"),
        (lambda: png(60_000_000, 1), "up to 131,072 on a side"),
        (lambda: png(20_000, 20_000), "would grow too large"),
        (lambda: png(65_000, 65_000, rows=1000)[:80], "would grow too large"),
        (encoded(PILImage.effect_noise((90, 90), 50), "PNG")[:3000], "cannot be decoded .OSError: .*truncated"),
        (GOOD[:20], "cannot be decoded|is no file of the formats"),
        (b"", "is no file of the formats"),
        (b"<svg onload=alert(1)>", "is no file of the formats"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n", "is no file of the formats"),
        (encoded(PILImage.new("RGB", (8, 8)), "ICO"), "is no file of the formats"),
        (lambda: encoded(PILImage.new("RGB", (6000, 6000)), "WEBP"), "6,000 × 6,000 pixels; up to 34 million"),
        ({"bytes": None, "path": "/no/such/file.png"}, "/no/such/file.png does not exist"),
        ({"bytes": None, "path": "zip://a.png::/no/such/file.zip"}, "does not exist|cannot be decoded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_place_of_an_image_that_cannot_be_shown_has_the_reason(tmp_path: Path, image: Any, reason: str):
    run = run_of([image() if callable(image) else image, GOOD])  # large ones are not made when tests are collected
    found = reasons(run, tmp_path / "report.html")
    assert len(found) == 1 and re.search(reason, next(iter(found))), found
    page = (tmp_path / "report.html").read_text()
    assert page.count("<image") == 1, "the other image is shown"
    assert not [tag for tag, _ in Elements(page).tags if tag == "svg onload"]
    image_grid(run.scored, run.train, [0, 1], tmp_path / "grid.png", label_column=None)
    assert (tmp_path / "grid.png").stat().st_size > 0


def test_images_that_are_decoded_already_have_the_same_bound():
    with pytest.raises(UnreadableImageError, match="9,000 × 9,000 pixels"):
        PictureBook().add(PILImage.new("1", (9000, 9000)))


def test_a_pipe_is_no_image(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.png")
    found = reasons(run_of([{"bytes": None, "path": str(tmp_path / "pipe.png")}]), tmp_path / "report.html")
    assert re.search(r"pipe.png does not exist", next(iter(found)))
    with pytest.raises(UnreadableImageError, match="neither its content nor its path"):
        bounded(EncodedImage(None, None))


def test_damaged_images_of_every_format_never_stop_a_report():
    rng = np.random.default_rng(0)
    picture = PILImage.fromarray(rng.integers(0, 255, (40, 30, 3), dtype=np.uint8))
    book, shown, refused = PictureBook(), 0, 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"):
        try:
            data = encoded(picture, kind)
        except (KeyError, OSError):  # a pillow without this format
            continue
        assert book.add(EncodedImage(data, None)).width == 30
        for _ in range(60):
            place = int(rng.integers(len(data)))
            changed = bytearray(data[: int(rng.integers(1, len(data)))] if rng.random() < 0.3 else data)
            changed[place % len(changed)] ^= int(rng.integers(1, 256))
            try:
                book.add(EncodedImage(bytes(changed), None))
                shown += 1
            except UnreadableImageError:
                refused += 1
    assert shown > 50 and refused > 50


def test_large_images_are_shown_small(tmp_path: Path):
    colors = np.zeros((1200, 2400, 3), dtype=np.uint8)
    colors[:, 1200:] = (200, 30, 60)
    picture = PILImage.fromarray(colors)
    files = [EncodedImage(encoded(picture, kind), None) for kind in ("JPEG", "PNG")]
    arrays = [colors, torch.from_numpy(colors).permute(2, 0, 1), colors / 255.0, colors.astype(np.int32)]
    for image in (*files, picture, *arrays):
        found = PictureBook().add(image)
        assert (found.width, found.height) == (128, 64)
        assert not isinstance(image, PILImage.Image) or image.size == (2400, 1200)
        pixels = np.asarray(bounded(image, 1 << 20)).astype(float)
        assert pixels.shape[0] * pixels.shape[1] <= 1 << 20
        bright = pixels.reshape(*pixels.shape[:2], 3)[..., 0]
        assert abs(bright[:, -100:].mean() / bright.max() - 1) < 0.02 and bright[:, :100].mean() < 0.02 * bright.max()


def test_images_are_shown_as_the_dataset_gives_them(tmp_path: Path):
    """Images are turned as the camera was held, have the mode of the column, and lose their colour profiles."""
    tall = PILImage.new("RGB", (200, 100), (255, 0, 0))
    exif = PILImage.Exif()
    exif[0x0112] = 6
    data = encoded(tall, "PNG", exif=exif, icc_profile=os.urandom(50_000))
    rows = Dataset.from_dict({"image": [{"bytes": data, "path": None}]}, features=Features({"image": Image(mode="L")}))
    image = stored(rows)[0]["image"]
    ours, theirs = bounded(image), rows[0]["image"]
    assert (ours.size, ours.mode) == (theirs.size, theirs.mode) == ((100, 200), "L")
    assert ours.tobytes() == theirs.tobytes()
    small = encoded(PILImage.new("RGB", (20, 10), (255, 0, 0)), "PNG", icc_profile=os.urandom(50_000))
    for with_profile in (image, EncodedImage(data, None), EncodedImage(small, None)):
        assert len(PictureBook().add(with_profile).uri) < 5000
    as_is = rows.cast_column("image", Image(decode=False))
    assert bounded(stored(as_is)[0]["image"]).size == (100, 200)


def test_an_image_column_that_holds_something_else_is_an_error(tmp_path: Path):
    rows = Dataset.from_dict({"image": [[1.0, 2.0], [3.0, 4.0]]})
    run = AttributionRun(with_scores(rows, torch.randn(2, 2), k=2), rows)
    with pytest.raises(ValueError, match=r"An image has the shape \(2,\)"):
        write_report(run, tmp_path / "report.html", ReportOptions(image_column="image"))
    assert not (tmp_path / "report.html").exists()


# -- values ----------------------------------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_texts_labels_and_facts_of_enormous_length_are_cut(tmp_path: Path):
    long = "x\x00" * 5_000_000
    rows = Dataset.from_dict({"text": [long, "b"], "label": [long, "c"], "y" * 100_000: ["d", "e"]})
    run = AttributionRun(
        with_scores(rows, torch.randn(2, 2), k=2), rows, facts={"model": long, "other": [long], "n" * 100_000: 1}
    )
    page = write_report(run, tmp_path / "report.html").read_text()
    assert len(page) < 200_000
    assert f"{len(long) - 1200:,} more characters" in page


@pytest.mark.slow
def test_values_that_are_nested_too_deeply_are_said_to_be(tmp_path: Path):
    rows = [{"text": nested(100_000), "label": 1}, {"text": "plain", "label": 2}]
    scored = with_scores(Dataset.from_dict({"text": ["a", "b"]}), torch.randn(2, 2), k=2)
    run = AttributionRun(scored, rows, facts={"deep": nested(100_000), "object": {"a": Path("/x")}})
    page = write_report(run, tmp_path / "report.html", ReportOptions(text_columns=["text"])).read_text()
    assert "(values nested too deeply to be shown)" in page and "plain" in page
    assert "(values that are no JSON, or nested too deeply)" in page and "/x" in page


def test_json_cells_are_shown_as_they_are_stored_where_they_cannot_be_decoded(tmp_path: Path):
    deep = "[" * 5000 + "]" * 5000
    features = Features({"text": Value("string"), "chat": List(Json()), "note": Json()})
    chat = [{"role": "user", "content": "hello"}]
    data = {"text": ["a", "b"], "chat": [chat, chat], "note": [chat, chat]}
    rows = Dataset.from_dict(data, features=features)
    row = stored(rows)[0]
    assert row["chat"] == chat and row["note"] == chat
    storage = pa.ExtensionArray.from_storage(pa.json_(), pa.array([deep, deep]))
    broken = Dataset(pa.table({"text": ["a", "b"], "note": storage}))
    assert stored(broken)[0]["note"] == deep
    run = AttributionRun(with_scores(broken, torch.randn(2, 2), k=2), broken)
    assert "<article" in write_report(run, tmp_path / "report.html").read_text()


@pytest.mark.parametrize("spans", [[{"start": 0}], [{"start": "a", "stop": 1, "score": 1.0}], [3], 3])
def test_spans_that_are_none_name_their_column(spans: Any):
    with pytest.raises(ValueError, match=r"The columns \['trak_spans'\] of a row cannot be read"):
        content_of({"text": "abc", "trak_spans": spans}, Columns(texts=("text",)))


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "report.html", tmp_path / "file" / "deep" / "report.html"):
        with pytest.raises(StoreError, match=r"file(/\w+)* cannot be written"):
            write_report(run_of([GOOD]), path)
    with pytest.raises(StoreError, match="cannot be written"):
        image_grid(run_of([GOOD]).scored, run_of([GOOD]).train, [0], tmp_path / "file" / "a.png", label_column=None)


def test_stale_score_columns_of_rows_are_not_taken_for_those_of_the_result():
    rows = [{"text": "a", "trak_scores": [9.0], "trak_indices": [9]}]
    scored = with_scores(Dataset.from_dict({"number": [0]}), torch.tensor([[1.0], [2.0]]), k=2)
    found = with_scores_of(rows, scored.remove_columns("number"))[0]
    assert found["text"] == "a" and found["trak_scores"] == [2.0, 1.0] and found["trak_indices"] == [1, 0]


def test_a_target_in_a_notebook_has_the_reason_too():
    views = RunViews(run_of([GOOD[:30], GOOD]))
    page = target_page(views.target(0), views.book.pictures)
    assert "Not shown: the image" in page and page.count("<image") == 1
