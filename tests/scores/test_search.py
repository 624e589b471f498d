"""Interactive search with FAISS finds what the exact scan finds."""

from pathlib import Path

import numpy as np
import pytest
from digit_models import DigitNet, digits, make, trained_net

from hf_trak import TrakAttributor
from hf_trak.cli.main import main
from hf_trak.errors import StoreError
from hf_trak.hub import with_training_rows
from hf_trak.scores.search import GradientSearch, verify_search

faiss = pytest.importorskip("faiss")

N = 61


@pytest.fixture(scope="module")
def nets() -> list[DigitNet]:
    return [trained_net(digits(0, N), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module", params=["float32", "int2"])
def attributor(nets, tmp_path_factory, request) -> TrakAttributor:
    directory = tmp_path_factory.mktemp("store")
    return make(nets[0], directory, digits(0, N), proj_dim=300, feature_dtype=request.param).featurize(nets)


def column(scored, name: str) -> np.ndarray:
    return np.stack(scored.with_format("numpy")[name][:])


def test_an_exact_index_equals_the_scan(attributor):
    targets = digits(200, 207)
    expected = attributor.attribute(targets, top_k=5)
    found = attributor.build_search("Flat").search(targets, top_k=5)
    for name in ("trak_indices", "trak_harmful_indices"):
        np.testing.assert_array_equal(column(found, name), column(expected, name))
    for name in ("trak_scores", "trak_harmful_scores"):
        np.testing.assert_allclose(column(found, name), column(expected, name), rtol=1e-4)
    assert found.column_names == expected.column_names
    assert found.features["trak_indices"] == expected.features["trak_indices"]


def test_a_quantized_index_finds_most(attributor):
    targets = digits(200, 220)
    expected = column(attributor.attribute(targets, top_k=5), "trak_indices")
    found = column(attributor.build_search("SQ8").search(targets, top_k=5), "trak_indices")
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in zip(expected, found, strict=True)]) > 0.9


@pytest.mark.few(1)
def test_a_saved_index_belongs_to_its_features(attributor, nets, tmp_path):
    first = attributor.build_search("Flat", directory=tmp_path / "search")
    again = attributor.build_search("Flat", directory=tmp_path / "search")
    targets = digits(200, 203)
    for name in ("trak_indices", "trak_scores"):
        np.testing.assert_array_equal(column(first.search(targets), name), column(again.search(targets), name))
    other = make(nets[0], tmp_path / "other", digits(0, N), seed=1).featurize(nets)
    with pytest.raises(StoreError, match="Build it again"):
        other.build_search("Flat", directory=tmp_path / "search")
    with pytest.raises(StoreError, match="Build it again"):
        attributor.build_search("SQ8", directory=tmp_path / "search")


def test_damage_to_a_saved_index_is_found(attributor, tmp_path):
    attributor.build_search("Flat", directory=tmp_path)
    assert [one.state for one in verify_search(tmp_path)] == ["intact"]
    path = tmp_path / "vectors.faiss"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    (found,) = verify_search(tmp_path)
    assert found.state == "damaged" and str(path) in found.detail
    with pytest.raises(StoreError, match=r"vectors\.faiss is damaged: its checksum"):
        attributor.build_search("Flat", directory=tmp_path)


def test_an_index_of_lists_looks_at_an_eighth_of_them(attributor, tmp_path):
    targets = digits(200, 240)
    expected = column(attributor.attribute(targets, top_k=3), "trak_indices")

    def recall(found) -> float:
        pairs = zip(expected, column(found, "trak_indices"), strict=True)
        return float(np.mean([len(set(one) & set(other)) / 3 for one, other in pairs]))

    attributor.build_search("IVF16,Flat", directory=tmp_path)
    index = attributor.build_search("IVF16,Flat", directory=tmp_path)  # as it was saved
    lists = faiss.extract_index_ivf(index.vectors.index.faiss_index)
    assert lists.nprobe == 2
    as_is = recall(index.search(targets, top_k=3))
    lists.nprobe = 16
    assert recall(index.search(targets, top_k=3)) > 0.99
    lists.nprobe = 1
    assert recall(index.search(targets, top_k=3)) < as_is
    few = index.search(targets, top_k=N // 2)
    for ending in ("", "harmful_"):
        missing = column(few, f"trak_{ending}indices") == -1
        assert missing.any() and np.array_equal(np.isnan(column(few, f"trak_{ending}scores")), missing)
    with pytest.raises(ValueError, match="has the row -1"):
        with_training_rows(few, attributor.train_dataset)


def test_an_exported_index_is_read_and_no_other(attributor, nets, tmp_path, monkeypatch, capsys):
    source, to = str(attributor.args.output_dir), tmp_path / "search"
    assert main(["export", source, "--to", str(to), "--format", "faiss", "--factory", "Flat"]) == 0
    other = make(nets[0], tmp_path / "other", digits(0, N), seed=1).featurize(nets)
    monkeypatch.setattr(GradientSearch, "build", None)  # nothing is built again
    targets = digits(200, 203)
    found = attributor.build_search("Flat", directory=to).search(targets, top_k=4)
    np.testing.assert_array_equal(
        column(found, "trak_indices"), column(attributor.attribute(targets, top_k=4), "trak_indices")
    )
    with pytest.raises(StoreError, match="Build it again"):
        other.build_search("Flat", directory=to)
    more = [source, "--to", str(tmp_path / "new"), "--format", "faiss", "--columns", "labels"]
    assert main(["export", *more]) == 1
    assert "an index has no columns" in capsys.readouterr().err


def test_kinds_that_faiss_does_not_know(attributor):
    with pytest.raises(ValueError, match="FAISS says"):
        attributor.build_search("Nonsense77")
    with pytest.raises(ValueError, match="top_k"):
        attributor.build_search("Flat").search(digits(200, 203), top_k=0)


def test_one_checkpoint_of_several(attributor):
    targets = digits(200, 203)
    expected = attributor.attribute(targets, top_k=4, checkpoints=[1])
    found = attributor.build_search("Flat", checkpoints=[1]).search(targets, top_k=4)
    np.testing.assert_array_equal(column(found, "trak_indices"), column(expected, "trak_indices"))
    with pytest.raises(ValueError, match=r"the model ids \[1\]; the vectors are means over \[0, 1\]"):
        attributor.build_search("Flat").search(targets, checkpoints=[1])


def test_without_faiss(attributor, monkeypatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install faiss-cpu"):
        attributor.build_search()
