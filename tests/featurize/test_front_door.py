"""The names and parameters that a user meets on `TrakAttributor`."""

import inspect

import hf_trak
from hf_trak import TrakAttributor

NAMES = {
    "args", "attribute", "build_search", "calibrate", "convert", "curvature_report", "estimate", "exclude", "extend",
    "featurize", "fidelity", "fit_curvature", "from_pretrained", "from_trainer", "group_scores", "model", "predict",
    "push_to_hub", "recommend", "report", "review", "save_pretrained", "select", "self_influence", "show", "sources",
    "task", "train_dataset", "trajectory", "verify", "verify_replay",
}  # fmt: skip


def test_the_public_names_are_those_of_users() -> None:
    assert {name for name in dir(TrakAttributor) if not name.startswith("_")} == NAMES  # and `features`, of instances


def test_the_front_door_has_few_parameters() -> None:
    functions = [getattr(TrakAttributor, name) for name in NAMES]
    counts = [len(set(inspect.signature(one).parameters) - {"self"}) for one in functions if callable(one)]
    assert sum(counts) + len(inspect.signature(TrakAttributor).parameters) <= 90


def test_the_methods_are_exported() -> None:
    assert {"Exact", "Index", "Replay", "Rerank", "Span"} <= set(dir(hf_trak))
