"""The benchmark's cases of images: their rows, their losses, and the file of MNIST."""

import io
import json
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "quality"))

from quality_bench.cases import make_case, mnist
from quality_bench.job import Logits

DIGITS = ("digits-cnn", "digits-vit")


def write_archive(path: Path, counts: list[int]) -> None:
    """As many images of each digit; the first pixel of each is its number over ten."""
    with tarfile.open(path, "w:gz") as files:
        for digit, count in enumerate(counts):
            pixels = np.zeros((count, mnist.PIXELS))
            pixels[:, 0] = np.arange(count) / 10
            text = json.dumps({"data": pixels.ravel().tolist()}).encode()
            member = tarfile.TarInfo(f"package/src/digits/{digit}.json")
            member.size = len(text)
            files.addfile(member, io.BytesIO(text))


def test_images_keep_their_labels(tmp_path: Path) -> None:
    counts = [3, 1, 2, 1, 1, 1, 1, 1, 1, 2]
    write_archive(tmp_path / "digits.tgz", counts)
    pixels, labels = mnist.images(tmp_path / "digits.tgz")
    assert pixels.shape == (14, 784)
    assert labels.tolist() == [0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 9]
    np.testing.assert_allclose(pixels[:6, 0], [0, 0.1, 0.2, 0, 0, 0.1], rtol=1e-6)
    assert not pixels[:, 1:].any()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / mnist.ARCHIVE).write_bytes(b"another")
    with pytest.raises(ValueError, match=f"Expected {mnist.SHA256}"):
        mnist.archive(tmp_path)


def test_without_npm_the_file_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "downloads" / mnist.ARCHIVE))):
        mnist.archive(tmp_path / "downloads")


@pytest.mark.skipif(sys.platform == "win32", reason="the npm of this test is a shell script")
def test_a_failure_of_npm_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 7\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="status 7: no network"):
        mnist.archive(tmp_path / "downloads")
    assert not list((tmp_path / "downloads").iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="the npm of this test is a shell script")
def test_a_fetched_file_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last/mnist-1.1.0.tgz"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="SHA-256"):
        mnist.archive(tmp_path / "downloads")
    assert (tmp_path / "downloads" / mnist.ARCHIVE).read_text().startswith("pack mnist@1.1.0 ")


def test_training_rows_are_no_targets(tmp_path: Path) -> None:
    case = make_case("digits-cnn", tmp_path)
    images = [{tuple(row) for row in rows["pixel_values"][:].tolist()} for rows in (case.train, case.targets)]
    assert (len(case.train), len(case.targets)) == (1000, 60)
    assert not images[0] & images[1]
    assert set(case.labels(case.targets).tolist()) == set(range(10))


@pytest.mark.parametrize("name", DIGITS)
def test_the_loss_is_a_mean_over_labels_that_are_not_ignored(name: str, tmp_path: Path) -> None:
    case = make_case(name, tmp_path)
    model = case.make_model().eval()
    inputs, labels = case.inputs(case.train.select(range(6))), case.labels(case.train.select(range(6)))
    kept = torch.tensor([True, False, True, True, False, True])
    output = model(**inputs, labels=torch.where(kept, labels, -100))
    expected = -output.logits.log_softmax(-1)[torch.arange(6), labels][kept].mean()
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("name", DIGITS)
def test_models_are_mapped_over_rows(name: str, tmp_path: Path) -> None:
    case = make_case(name, tmp_path)
    inputs = case.inputs(case.train.select(range(4)))
    model = Logits(case.make_model(), list(inputs)).eval()
    weights = dict(model.named_parameters())

    def logits(pixels: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (pixels[None],))[0]

    mapped = torch.func.vmap(logits)(inputs["pixel_values"])
    torch.testing.assert_close(mapped, model(inputs["pixel_values"]))
    assert dict(model.model.named_modules())[case.head].out_features == 10
