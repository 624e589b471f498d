"""Scored datasets on the Hub: typed columns, both orientations, with hf_trak and with plain `datasets`."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value, load_dataset
from hub_server import TOKEN, Hub, client, hub
from huggingface_hub import DatasetCard
from test_hub_index import make_store

from hf_trak import TrakAttributor, load_scores, push_scores
from hf_trak.errors import HubAccessError, RefusedIndexError
from hf_trak.hub import open_repo, push_index
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, attach_columns, fixed_size_list

__all__ = ["client", "hub"]  # fixtures

RNG = np.random.default_rng(0)


def rows(n: int) -> Dataset:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    return Dataset.from_dict(
        {"text": [f"row {i} <b>" for i in range(n)], "label": [i % 2 for i in range(n)]}, features
    )


def top_k(n: int = 5, k: int = 3) -> Dataset:
    indices, scores = RNG.integers(0, 50, (n, k)), RNG.normal(size=(n, k)).astype("float32")
    columns = dict(zip(TOP_K_COLUMNS, [indices, scores, indices[:, ::-1], scores[:, ::-1]], strict=True))
    table = {name: fixed_size_list(np.ascontiguousarray(values)) for name, values in columns.items()}
    return attach_columns(rows(n), Dataset(pa.table(table)))


def full(n: int, m: int) -> Dataset:
    return attach_columns(
        rows(n), Dataset(pa.table({"trak_scores": fixed_size_list(RNG.normal(size=(n, m)).astype("float32"))}))
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("orientation", ["target", "train"])
@pytest.mark.parametrize("kind", ["top", "full"])
def test_round_trip(hub: Hub, client: Path, orientation: str, kind: str) -> None:
    """Scores on the targets or on the training set keep their types and bits, and the other columns."""
    scored = top_k() if kind == "top" else full(5, 7)
    push_scores(scored, "tester/scores", per=orientation, token=TOKEN, private=True, model_name="me/model")
    loaded = load_scores("tester/scores", token=TOKEN)
    assert loaded.features == scored.features
    assert loaded.features["trak_scores"] == List(Value("float32"), length=3 if kind == "top" else 7)
    assert loaded.to_dict() == scored.to_dict()
    text = DatasetCard(hub.dataset("tester/scores")["README.md"].decode())
    assert set(text.data.tags) == {"trak", "data-attribution", "hf_trak"} and text.data["dataset_info"]
    assert f"one row per {'target' if orientation == 'target' else 'training example'}, 5 rows" in text.text
    assert "me/model" in text.text
    if kind == "top":
        assert ("rows of the training dataset that helped" in text.text) == (orientation == "target")
    plain = load_dataset("tester/scores", split="train", token=TOKEN)
    assert plain.to_dict() == scored.to_dict()
    assert {entry.token for entry in hub.log if "/resolve/" in entry.path} == {TOKEN}


@pytest.mark.slow
def test_index_and_scores_share_a_repo(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Each has its section in the shared card, and pushing the index again does not change the scores."""
    scored = top_k()
    store = make_store(tmp_path / "store", ids=(0,))
    push_index(store, "tester/both", token=TOKEN, private=False)
    push_scores(scored, "tester/both", config_name="scores", split="test", token=TOKEN, private=False)
    push_index(store, "tester/both", token=TOKEN, lds=0.25, private=False)
    text = hub.dataset("tester/both")["README.md"].decode()
    assert text.count("index: begin") == text.count("scores: begin") == 1 and "0.250" in text
    assert load_scores("tester/both", "scores").to_dict() == scored.to_dict()
    assert open_repo("tester/both").model_ids == [0]


def test_plain_push_is_enough(hub: Hub, client: Path, tmp_path: Path) -> None:
    scored = full(4, 6)
    scored.push_to_hub("tester/plain", token=TOKEN, private=False)
    assert load_scores("tester/plain").to_dict() == scored.to_dict()
    scored.save_to_disk(str(tmp_path / "saved"))
    assert load_scores(str(tmp_path / "saved")).to_dict() == scored.to_dict()


@pytest.mark.slow
def test_what_is_refused(hub: Hub, client: Path) -> None:
    for bad, reason in [
        (rows(3), "score columns"),
        (top_k().remove_columns("trak_indices"), "score columns"),
        (Dataset.from_dict({"trak_scores": [[1.0], [2.0]]}), "float32"),
        (top_k().rename_column("trak_scores", "x").rename_column("trak_harmful_scores", "trak_scores"), "columns"),
    ]:
        with pytest.raises(ValueError, match=reason):
            push_scores(bad, "tester/scores", token=TOKEN, private=False)
    assert hub.log == []
    with pytest.raises(ValueError, match="`per` is 'row'"):
        push_scores(top_k(), "tester/scores", per="row", token=TOKEN, private=False)  # type: ignore[arg-type]
    hub.put("dataset", "tester/public", {})
    with pytest.raises(ValueError, match="is public"):
        push_scores(top_k(), "tester/public", token=TOKEN, private=True)
    for number, bad in enumerate((rows(3), with_value(float("nan")), with_value(float("inf")))):
        bad.push_to_hub(f"tester/bad-{number}", token=TOKEN, private=False)
        with pytest.raises(RefusedIndexError, match=r"score columns|not finite"):
            load_scores(f"tester/bad-{number}")
    with pytest.raises(HubAccessError, match="does not exist"):
        load_scores("tester/nothing")
    with pytest.raises(HubAccessError, match="revision 'v9'"):
        load_scores("tester/bad-0", revision="v9")


def with_value(value: float) -> Dataset:
    scores = np.ones((2, 3), dtype="float32")
    scores[1, 2] = value
    return Dataset(pa.table({"trak_scores": fixed_size_list(scores)}))


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{where}.HF_HUB_OFFLINE", True)
    with pytest.raises(
        HubAccessError,
        match=r"'nothing/here' is not in the cache.*offline mode \(HF_HUB_OFFLINE\) is on.* no directory of this name",
    ):
        load_scores("nothing/here")
    with pytest.raises(HubAccessError, match=r"'nothing/here' at .* not in the cache, .*; there is no directory of"):
        TrakAttributor.from_pretrained("nothing/here")
