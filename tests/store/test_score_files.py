"""All scores in an Arrow file with one row per target: every score is in its place, and no half-written file stays."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from datasets import List, Value
from torch import Tensor

from hf_trak.runtime.processes import Processes
from hf_trak.scores import score_files
from hf_trak.scores.score_files import ScoreFiles


def blocks_of(scores: Tensor, *stops: int) -> Iterator[tuple[int, int, Tensor]]:
    """Cut scores `(n, m)` at the given training rows."""
    for start, stop in zip((0, *stops), (*stops, len(scores)), strict=True):
        yield start, stop, scores[start:stop]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "m", "group"),
    [(1, 1, 1), (7, 5, 2), (3, 2500, 2500), (40, 2100, 1300), (40, 2100, 1), (130, 3, 100)],
    ids=["one", "groups", "one group of several batches", "groups of several batches", "rows alone", "one group"],
)
def test_every_score_is_in_its_place(
    n: int, m: int, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` writes batches of 1,000 rows, whatever is in memory at a time."""
    monkeypatch.setattr(score_files, "_GROUP_BYTES", 4 * n * group)
    scores = torch.randn(n, m)
    cuts = [stop for stop in (1, 3, 4, 100) if stop < n]
    files = ScoreFiles(tmp_path / "scores", "per-target-x", Processes(True), n, m)
    found = files.columns(blocks_of(scores, *cuts), None, "target")
    assert torch.equal(torch.tensor(found["trak_scores"][:]), scores.T)
    assert found.features["trak_scores"] == List(Value("float32"), length=n)
    assert [path.name for path in (tmp_path / "scores").iterdir()] == ["per-target-x.arrow"]


def test_cut_otherwise_the_bytes_are_the_same(tmp_path: Path) -> None:
    scores = torch.randn(50, 9)
    for name, cuts in (("a", ()), ("b", (1, 17, 49))):
        ScoreFiles(tmp_path, name, Processes(True), 50, 9).columns(blocks_of(scores, *cuts), None, "target")
    assert (tmp_path / "a.arrow").read_bytes() == (tmp_path / "b.arrow").read_bytes()


def test_an_error_between_blocks_leaves_what_was_there(tmp_path: Path) -> None:
    scores = torch.randn(6, 2)
    ScoreFiles(tmp_path, "x", Processes(True), 6, 2).columns(blocks_of(scores, 3), None, "target")
    before = (tmp_path / "x.arrow").read_bytes()

    def failing() -> Iterator[tuple[int, int, Tensor]]:
        yield 0, 3, scores[:3] + 1
        raise KeyError("a damaged shard")

    with pytest.raises(KeyError):
        ScoreFiles(tmp_path, "x", Processes(True), 6, 2).columns(failing(), None, "target")
    assert [path.name for path in tmp_path.iterdir()] == ["x.arrow"]
    assert (tmp_path / "x.arrow").read_bytes() == before
