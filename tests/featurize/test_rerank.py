"""Retrieve, then rerank: a shortlist from the features, exact scores of the rows on it alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits, full_scores, make, trained_net
from torch.utils.data import Dataset as TorchDataset

from hf_trak import Exact, Index, Rerank, TrakAttributor
from hf_trak.attributor import last_result
from hf_trak.errors import ConfigMismatchError, HfTrakError, NonFiniteError
from hf_trak.report import AttributionRun, write_report
from hf_trak.report.views import RunViews
from hf_trak.scores.scored_dataset import RANK_COLUMNS, RERANK_COLUMNS, TOP_K_COLUMNS, IndexRanking

N, M, TOP = 150, 4, 5
OPTIONS = {"curvature": "ekfac", "shard_size": 32, "per_device_batch_size": 12, "curvature_rows": 60}


@pytest.fixture(scope="module")
def nets(one_thread) -> list[DigitNet]:
    return [trained_net(digits(0, N), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For the same bits in all calls, also of the fixtures below."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def attributor(nets, tmp_path_factory) -> TrakAttributor:
    """An index of two checkpoints, with their curvatures."""
    directory = tmp_path_factory.mktemp("store")
    return make(nets[0], directory, digits(0, N), **OPTIONS).featurize(nets).fit_curvature(nets)


@pytest.fixture(scope="module")
def exact(nets, tmp_path_factory) -> TrakAttributor:
    """The same in a directory of its own, so that no file of one call serves the other."""
    return make(nets[0], tmp_path_factory.mktemp("exact"), digits(0, N), **OPTIONS).fit_curvature(nets)


def targets() -> Dataset:
    return digits(1000, 1000 + M)


def column(scored: Dataset, name: str) -> np.ndarray:
    return np.stack(scored.with_format("numpy")[name][:])


def same_bits(found: Dataset, expected: Dataset) -> None:
    for name in TOP_K_COLUMNS:
        np.testing.assert_array_equal(column(found, name), column(expected, name))


def ranks_of(scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Ranks of rows `(m, k)` by scores `(n, m)`, 1 for the highest."""
    order = np.argsort(-scores, axis=0, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(1, len(scores) + 1)[:, None], axis=0)
    return np.take_along_axis(ranks.T, rows, axis=1)


@pytest.mark.slow
def test_all_rows_are_the_exact_pass_to_the_bit(attributor, exact, nets):
    found = attributor.attribute(targets(), top_k=TOP, method=Rerank(N))
    expected = exact.attribute(targets(), top_k=TOP, method="exact", checkpoints=nets)
    same_bits(found, expected)
    assert found["trak_stage"] == ["exact"] * M
    assert set(found.column_names) - set(expected.column_names) == set(RERANK_COLUMNS)


def test_ranks_are_those_of_the_index(attributor):
    found = attributor.attribute(targets(), top_k=TOP, method=Rerank(N))
    index = full_scores(attributor, targets())
    for sign, rows, ranks in zip((1, -1), (TOP_K_COLUMNS[0], TOP_K_COLUMNS[2]), RANK_COLUMNS, strict=True):
        np.testing.assert_array_equal(column(found, ranks), ranks_of(sign * index, column(found, rows)))


def shortlisted(attributor: TrakAttributor, count: int) -> set[int]:
    """The rows that rank highest, for any target at either end, by the sum of 1 / (60 + rank) in two lists: scores of
    the index, and inner products of its features."""
    index, products, weights = full_scores(attributor, targets()), 0.0, 0.0
    (experiment,) = {path.name for path in attributor.features.store.output_dir.glob("experiments/targets-*")}
    for model_id in attributor.features.store.model_ids:
        train = list(attributor.features.store.train(model_id))
        features, q = (torch.cat([getattr(shard, name) for shard in train]) for name in ("grads", "out_to_loss"))
        of_targets = torch.cat(
            [shard.grads for shard in attributor.features.store.saved_targets(experiment, model_id)]
        )
        products, weights = products + (features @ of_targets.T).numpy(), weights + q.numpy()[:, None]
    chosen: set[int] = set()
    for target in range(M):
        for sign in (1, -1):
            points: dict[int, float] = {}
            for scores in (index, products * weights):
                for place, row in enumerate(np.argsort(-sign * scores[:, target], kind="stable")[:count]):
                    points[int(row)] = points.get(int(row), 0.0) + 1 / (61 + place)
            chosen |= set(sorted(points, key=lambda row: (-points[row], row))[:count])
    return chosen


@pytest.mark.slow
def test_a_part_of_the_rows(attributor, exact, nets):
    """Rows on the shortlist of any target have their exact scores, and the best of these are returned."""
    found = attributor.attribute(targets(), top_k=TOP, method=Rerank(8))
    index = full_scores(attributor, targets())
    everything = full_scores(exact, targets(), method="exact", checkpoints=nets)
    shortlist = np.array(sorted(shortlisted(attributor, 8)))
    assert 16 < len(shortlist) < N
    best = shortlist[np.argsort(-everything[shortlist], axis=0, kind="stable")]
    np.testing.assert_array_equal(column(found, "trak_indices"), best[:TOP].T)
    np.testing.assert_array_equal(column(found, "trak_harmful_indices"), best[::-1][:TOP].T)
    scores = np.take_along_axis(everything.T, column(found, "trak_indices"), axis=1)
    np.testing.assert_allclose(column(found, "trak_scores"), scores, rtol=1e-3, atol=1e-5 * np.abs(everything).max())
    ranks = ranks_of(index, column(found, "trak_indices"))
    expected = [[int(rank) if rank <= 8 else None for rank in row] for row in ranks]
    assert found["trak_index_ranks"] == expected
    assert any(rank is None for row in expected for rank in row)  # a row of another target's shortlist


@pytest.mark.slow
def test_only_the_shortlist_is_read(nets, tmp_path):
    """Gradients of no other training row are computed."""

    class Counted(TorchDataset):
        def __init__(self) -> None:
            self.rows = digits(0, N).with_format("torch")
            self.read: set[int] = set()
            self.fingerprint = "digits"

        def __len__(self) -> int:
            return N

        def __getitem__(self, row: int) -> Any:
            self.read.add(row)
            return self.rows[row]

    rows = Counted()
    one = make(nets[0], tmp_path, rows, **OPTIONS).featurize().fit_curvature()
    rows.read.clear()
    found = one.attribute(targets(), top_k=2, method=Rerank(3))
    shortlist = shortlisted(one, 3)
    probed = {0, 1, 2, N // 3, N // 2, N - 1}  # collated again, to see that the collator is the same
    assert shortlist <= rows.read <= shortlist | probed
    assert set(column(found, "trak_indices").flat) <= shortlist


@pytest.mark.slow
def test_groups_and_means(attributor, exact, nets):
    for options in ({"group_by": "source"}, {"group_by": "all"}):
        found = attributor.attribute(targets(), top_k=TOP, method=Rerank(N), **options)
        expected = exact.attribute(targets(), top_k=TOP, method="exact", checkpoints=nets, **options)
        same_bits(found, expected)
        assert found["n_targets"] == expected["n_targets"]


def test_one_of_the_checkpoints(attributor, exact, nets):
    found = attributor.attribute(targets(), top_k=TOP, method=Rerank(N), checkpoints=[1])
    expected = exact.attribute(targets(), top_k=TOP, method="exact", checkpoints={1: nets[1]})
    same_bits(found, expected)


@pytest.mark.slow
def test_after_a_first_pass(nets, tmp_path, exact):
    options = {**OPTIONS, "proj_dim": 8192, "feature_dtype": "int2"}
    coded = make(nets[0], tmp_path, digits(0, N), **options).featurize(nets).fit_curvature(nets)
    found = coded.attribute(targets(), top_k=TOP, method=Rerank(N, index=Index(first_pass_bytes=512)))
    same_bits(found, exact.attribute(targets(), top_k=TOP, method="exact", checkpoints=nets))
    index = coded.attribute(targets(), top_k=10, method=Index(first_pass_bytes=512, candidates=30))
    small = coded.attribute(targets(), top_k=TOP, method=Rerank(10, index=Index(first_pass_bytes=512, candidates=30)))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("shortlist-*.safetensors")}
    assert len(kept) == 2, "of either call"
    same_bits(
        coded.attribute(targets(), top_k=TOP, method=Rerank(10, index=Index(first_pass_bytes=512, candidates=30))),
        small,
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("shortlist-*.safetensors")} == kept
    listed = set(IndexRanking.of(index).rows)
    assert set(column(small, "trak_indices").flat) <= listed
    with pytest.raises(ValueError, match="`candidates` is 9"):
        coded.attribute(targets(), top_k=TOP, method=Rerank(10, index=Index(first_pass_bytes=512, candidates=9)))


@pytest.mark.slow
def test_refined_targets(attributor, exact, nets):
    """All rows with refined targets are the exact pass with refined targets; a part of them comes with its stage."""
    refine = "cg,steps=2,rows=40"
    found = attributor.attribute(targets(), TOP, method=Rerank(N, refine=refine))
    same_bits(found, exact.attribute(targets(), TOP, method=Exact(refine=refine), checkpoints=nets))
    plain = attributor.attribute(targets(), method=Rerank(N), top_k=TOP)
    assert not np.array_equal(column(found, "trak_scores"), column(plain, "trak_scores"))
    assert found["trak_stage"] == ["refined"] * M
    part = attributor.attribute(targets(), TOP, method=Rerank(8, refine=refine))
    assert part["trak_stage"] == ["refined"] * M
    attributor.show(0)
    assert set(last_result(attributor).distributions.counts.sum(axis=1)) == {len(last_result(attributor).answer.rows)}


def test_every_stage_has_a_bar(nets, tmp_path, capsys, monkeypatch):
    one = make(nets[0], tmp_path, digits(0, 40), **OPTIONS).featurize().fit_curvature()
    monkeypatch.setattr("hf_trak.runtime.progress._bars_are_hidden", lambda: False)
    capsys.readouterr()
    one.attribute(targets(), top_k=2, method=Rerank(3), name="mine")
    shown = capsys.readouterr().err
    stages = (
        "mine, checkpoint 0",
        "mine, shortlist",
        "mine, preconditioned, checkpoint 0",
        "mine, reranking, checkpoint 0",
    )
    places = [shown.index(f"{stage}:") for stage in stages]
    assert places == sorted(places)
    assert f"{len(last_result(one).answer.rows)}/{len(last_result(one).answer.rows)}" in shown
    one.attribute(targets(), top_k=2, method=Rerank(3), name="mine")
    assert "rows/s" not in capsys.readouterr().err  # everything is kept


@pytest.mark.slow
def test_an_earlier_result_is_replaced(attributor):
    first = attributor.attribute(targets(), top_k=TOP, method=Rerank(8))
    second = attributor.attribute(first, top_k=3, method=Rerank(20))
    assert second.column_names == first.column_names
    assert column(second, "trak_index_ranks").shape == (M, 3)
    plain = attributor.attribute(second, top_k=3)
    assert not set(RERANK_COLUMNS) & set(plain.column_names)


def test_the_last_result_is_shown_with_its_own_scores(attributor):
    attributor.attribute(targets(), top_k=TOP, method=Rerank(8))
    attributor.show(1)
    counts = last_result(attributor).distributions.counts.sum(axis=1)
    assert set(counts) == {len(last_result(attributor).answer.rows)}


def test_what_does_not_go_together(attributor, nets, tmp_path):
    for options, message in (
        ({"rows": 4}, "`rows` of `Rerank` is 4, less than `top_k`, which is 5"),
        ({"rows": 0}, "`rows` is 0"),
        ({"rows": 10.0}, "`rows` is 10.0"),
        ({"rows": 10, "top_k": None}, "`top_k=None`"),
        ({"rows": 10, "per": "train"}, "`per='train'`"),
        ({"rows": 10, "index": Index(first_pass_bytes=512)}, "hf-trak convert"),
    ):
        with pytest.raises(ValueError, match=message):
            rest = {name: options.pop(name) for name in ("top_k", "per") if name in options}
            attributor.attribute(targets(), **{"top_k": TOP, **rest}, method=Rerank(**options))
    with pytest.raises(ValueError, match="best rows of each target alone"):
        attributor.attribute(targets(), top_k=TOP, method=Rerank(10), per_token=True)
    hybrid = make(nets[0], tmp_path, digits(0, N), **{**OPTIONS, "curvature": "hybrid"}).featurize()
    with pytest.raises(ValueError, match="'hybrid', whose scores come from one system over all training rows"):
        hybrid.attribute(targets(), top_k=TOP, method=Rerank(10))


def test_another_collator_is_refused(attributor, nets):
    def brighter(rows: list[dict[str, Any]]) -> dict[str, Any]:
        pixels = torch.tensor(np.array([row["pixel_values"] for row in rows]), dtype=torch.float32)
        return {"pixel_values": 2 * pixels, "labels": torch.tensor([row["labels"] for row in rows])}

    other = TrakAttributor(
        nets[0], attributor.args, train_dataset=digits(0, N), task="image_classification", data_collator=brighter
    )
    with pytest.raises(ConfigMismatchError, match="pixel_values: other values"):
        other.attribute(targets(), top_k=TOP, method=Rerank(10))


def test_random_rows_are_refused(nets, tmp_path):
    """Their draws belong to row numbers, which a shortlist does not have."""

    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        pixels = torch.tensor(np.array(batch["pixel_values"]), dtype=torch.float32)
        return {"pixel_values": pixels + 0.1 * torch.randn_like(pixels), "labels": batch["labels"]}

    one = make(nets[0], tmp_path, digits(0, 40).with_transform(noisy), **OPTIONS).featurize()
    with pytest.raises(HfTrakError, match="come at random"):
        one.attribute(targets(), top_k=2, method=Rerank(3))


@pytest.mark.slow
def test_a_row_that_is_not_finite_is_named(nets, tmp_path):
    """Errors count rows among those that are reranked, and say so."""

    rows_of_digits = list(digits(0, N).with_format("torch"))

    class Broken(TorchDataset):
        fingerprint, value = "broken", 0.0

        def __len__(self) -> int:
            return N

        def __getitem__(self, row: int) -> Any:
            found = rows_of_digits[row]
            bad = {"pixel_values": found["pixel_values"] + self.value} if row == self.row else {}
            return {"pixel_values": found["pixel_values"], "labels": found["labels"], **bad}

        row = -1

    rows = Broken()
    one = make(nets[0], tmp_path, rows, **OPTIONS).featurize().fit_curvature()
    one.attribute(targets(), top_k=3)
    listed = sorted(shortlisted(one, 3))
    place, row = next((p, r) for p, r in enumerate(listed) if r not in (0, 1, 2, N // 3, N // 2, N - 1))
    rows.row, rows.value = row, float("nan")
    with pytest.raises(NonFiniteError, match=f"train row {place} ") as caught:
        one.attribute(targets(), top_k=2, method=Rerank(3))
    assert any(f"among the {len(listed)} that are reranked" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_rerank_of_one_shortlist_is_kept(attributor, caplog):
    """The same call reads its scores from files; another shortlist has others."""
    attributor.attribute(targets(), top_k=TOP, method=Rerank(9), name="kept")
    before = _files(attributor)
    attributor.attribute(targets(), top_k=3, method=Rerank(9), name="kept")
    assert _files(attributor) == before
    attributor.attribute(targets(), top_k=3, method=Rerank(6), name="kept")
    assert len(_files(attributor)) > len(before)


def _files(attributor: TrakAttributor) -> dict[Path, int]:
    found = Path(attributor.args.output_dir, "experiments", "kept").rglob("scores-*")
    return {path: path.stat().st_mtime_ns for path in found}


def test_a_report_shows_both_ranks(attributor, tmp_path):
    found = attributor.attribute(targets(), top_k=TOP, method=Rerank(8))
    run = AttributionRun.collect(attributor.features, found)
    run.save(tmp_path / "run")
    views = RunViews(AttributionRun.load(tmp_path / "run"))
    ranks = {
        row: "behind the shortlist" if rank is None else str(rank)
        for row, rank in zip(found[0]["trak_indices"], found[0]["trak_index_ranks"], strict=True)
    }
    assert {item.example.row: item.rank for item in views.target(0).helped} == ranks
    assert [text.column for text in views.target(0).target.texts] == ["source"]  # the stage is no text of a row
    page = tmp_path / "report.html"
    write_report(AttributionRun.load(tmp_path / "run"), page)
    assert f"index rank {next(iter(ranks.values()))}</span>" in page.read_text()
    plain = RunViews(AttributionRun.collect(attributor.features, attributor.attribute(targets(), top_k=TOP)))
    assert {item.rank for item in plain.target(0).helped} == {None}
