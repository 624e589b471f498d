"""What is changed between publishing an index and asking it elsewhere is noticed, or said."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_server import TOKEN, Hub, client, hub
from test_changes import M, N, Setup, collate, correct, model, other_row, other_weights, rows, weighted

from hf_trak import TrakAttributor
from hf_trak.errors import HfTrakError
from hf_trak.identity import model_identity
from hf_trak.modelout_functions import FunctionModelOutput

__all__ = ["client", "hub"]  # fixtures

BASE = Setup()
FUNCTION = Setup(task=functools.partial(FunctionModelOutput, correct))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    yield
    logging.getLogger("hf_trak").setLevel(logging.NOTSET)


def published(setup: Setup, tmp_path: Path) -> np.ndarray:
    """The scores before publishing."""
    attributor = setup.attributor(tmp_path / "made").featurize()
    attributor.push_to_hub("me/index", token=TOKEN, private=False)
    return np.stack(
        attributor.attribute(rows(50, M), top_k=None, method="index").with_format("numpy")["trak_scores"][:]
    )


def asked(tmp_path: Path, network: torch.nn.Module | None = None, **options: Any) -> np.ndarray:
    """The scores elsewhere."""
    given = {"data_collator": collate, "output_dir": str(tmp_path / "mine"), "use_cpu": True}
    attributor = TrakAttributor.from_pretrained("me/index", network or model(), token=TOKEN, **{**given, **options})
    return np.stack(
        attributor.attribute(rows(50, M), top_k=None, method="index").with_format("numpy")["trak_scores"][:]
    )


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_the_same_inputs_give_the_same_scores(hub: Hub, client: Path, tmp_path: Path) -> None:
    expected = published(BASE, tmp_path)
    assert_close(asked(tmp_path), expected)
    assert_close(asked(tmp_path, train_dataset=rows(0, N)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "network, word",
    [
        (functools.partial(model, layer_norm_eps=0.1), "layer_norm_eps"),
        (functools.partial(model, hidden_act="relu"), "hidden_act"),
        (functools.partial(model, num_attention_heads=4), "num_attention_heads"),
        (other_weights, "weights"),
    ],
)
def test_another_model(hub: Hub, client: Path, tmp_path: Path, network: Any, word: str) -> None:
    published(BASE, tmp_path)
    with pytest.raises(HfTrakError, match=word):
        asked(tmp_path, network())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options, word",
    [
        ({"train_dataset": other_row()}, "train_fingerprint"),
        ({"train_dataset": rows(0, N), "data_collator": functools.partial(collate, keep=4)}, "input_ids"),
        ({"task": "loss"}, "task"),
    ],
)
def test_other_rows_collators_and_tasks(
    hub: Hub, client: Path, tmp_path: Path, options: dict[str, Any], word: str
) -> None:
    published(BASE, tmp_path)
    with pytest.raises(HfTrakError, match=word):
        asked(tmp_path, **options)


@pytest.mark.slow
def test_another_function(hub: Hub, client: Path, tmp_path: Path) -> None:
    expected = published(FUNCTION, tmp_path)
    assert_close(asked(tmp_path, task=FunctionModelOutput(correct)), expected)
    with pytest.raises(HfTrakError, match="task"):
        asked(tmp_path, task=FunctionModelOutput(functools.partial(weighted, weight=2.0)))


@pytest.mark.slow
def test_other_versions_are_said_where_settings_differ_with_them(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version may have other defaults: no reason to refuse an index, and none to be silent."""
    published(BASE, tmp_path)
    versions = model_identity.versions()
    monkeypatch.setattr(model_identity, "versions", lambda: {**versions, "transformers": "99.0"})
    logging.getLogger("hf_trak").setLevel(logging.WARNING)
    with caplog.at_level(logging.WARNING, logger="hf_trak"):
        asked(tmp_path, model(layer_norm_eps=1e-11))
    (said,) = {one.getMessage() for one in caplog.records if "other versions of packages" in one.getMessage()}
    assert "layer_norm_eps" in said and "transformers: saved" in said and "99.0" in said


@pytest.mark.slow
def test_a_collator_without_training_rows_cannot_be_compared(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Listed in `docs/what_is_noticed.md`: an index holds no row that could be collated here."""
    expected = published(BASE, tmp_path)
    found = asked(tmp_path, data_collator=functools.partial(collate, keep=4))
    assert not np.allclose(found, expected)
