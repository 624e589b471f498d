"""Identities go on recording the names that functions and classes of hf_trak had before modules moved."""

import functools
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import hf_trak
import hf_trak.utils
from hf_trak.identity import function_identity as code_digest
from hf_trak.identity import own_code, recorded_names
from hf_trak.identity.function_identity import function_identity
from hf_trak.identity.own_code import name_of

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "format-2" / "identities.json").read_text())
"""Written by the version before the move: the name recorded for each public import path; identities of
`functools.partial(vectorize, 3)`, of `[vectorize, TRAKer, hf_trak.utils, ImageTextCollator]`, and of what `SOURCE`
defines, the last two with Python 3.11."""

INTERNAL = {
    "hf_trak.data.language.mask_tokens": "hf_trak.language_data.mask_tokens",
    "hf_trak.data.language.tokenize_chat": "hf_trak.language_data.tokenize_chat",
    "hf_trak.data.rows.default_collator": "hf_trak.data.default_collator",
    "hf_trak.identity.row_digest.fingerprint_dataset": "hf_trak.row_digest.fingerprint_dataset",
    "hf_trak.scores.groups.RowGroups": "hf_trak.groups.RowGroups",
    "hf_trak.scores.ridge.RidgeSystem": "hf_trak.score_computers.ridge.RidgeSystem",
    "hf_trak.scores.selection.best_rows": "hf_trak.selection.best_rows",
    "hf_trak.scores.spans.label_weights": "hf_trak.spans.label_weights",
    "hf_trak.scores.topk.TopK": "hf_trak.score_computers.topk.TopK",
    "hf_trak.store.shard_set.ShardSet": "hf_trak.savers.shard_set.ShardSet",
    "hf_trak.store.store.FeatureStore": "hf_trak.savers.store.FeatureStore",
    "hf_trak.weights.checkpoints.read_state_dict": "hf_trak.checkpoints.read_state_dict",
}
"""Recorded names of what no package exports, by present import path."""

SOURCE = (
    "from hf_trak.utils import vectorize\nimport hf_trak\nimport hf_trak.utils\n"
    "from hf_trak import ImageTextCollator\n"
    "from hf_trak.modelout_functions import BatchedModelOutput, FunctionModelOutput\ndef f(out, batch):\n"
    "    return vectorize(out) + hf_trak.ImageTextCollator(batch) + hf_trak.utils.get_free_memory()\n"
    "class C(BatchedModelOutput):\n    def output(self, b): return ImageTextCollator\n"
    "    def out_to_loss_grad(self, *a): return f\n"
)
"""Code of a user that refers to hf_trak."""


def imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def users_module() -> Any:
    module = types.ModuleType("a_users_code")
    exec(SOURCE, module.__dict__)
    return module


@pytest.mark.parametrize("path", sorted({**GOLDEN["names"], **INTERNAL}))
def test_names_are_those_recorded_before(path: str) -> None:
    assert name_of(imported(path)) == {**GOLDEN["names"], **INTERNAL}[path]


def test_methods_and_modules_are_named_after_what_they_are_in() -> None:
    assert name_of(hf_trak.ImageTextCollator.__call__) == "hf_trak.image_text.ImageTextCollator.__call__"
    assert name_of(sys.modules["hf_trak.data.image_text"]) == "hf_trak.image_text"
    assert name_of(hf_trak.utils) == "hf_trak.utils"
    assert recorded_names.recorded_name("hf_trak.data.image_texts.f") == "hf_trak.data.image_texts.f"
    assert recorded_names.recorded_name("my.hf_trak.data.rows") == "my.hf_trak.data.rows"


def test_references_to_the_library_keep_their_digests() -> None:
    vectorize = hf_trak.utils.vectorize
    assert function_identity(functools.partial(vectorize, 3)) == GOLDEN["partial"]  # type: ignore[arg-type]
    values = [vectorize, hf_trak.TRAKer, hf_trak.utils, hf_trak.ImageTextCollator]
    assert function_identity(values) == GOLDEN["list"]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the digests contain bytecode of Python 3.11")
@pytest.mark.parametrize(("name", "recorded"), [("f", "function"), ("C", "class")])
def test_code_of_a_user_that_refers_to_the_library_keeps_its_digest(
    name: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_users_code", users := users_module())
    assert function_identity(getattr(users, name)) == GOLDEN[recorded]


def test_code_of_a_user_goes_by_recorded_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any version of Python: with present names, the digest is another."""
    function = users_module().f
    recorded = function_identity(function)
    for module in (own_code, code_digest):
        monkeypatch.setattr(module, "recorded_name", lambda name: name)
    assert function_identity(function)["code"] != recorded["code"]


def test_every_entry_names_something_that_exists() -> None:
    for present in recorded_names.RECORDED_NAMES:
        try:
            importlib.import_module(present)
        except ModuleNotFoundError:
            imported(present)
