"""Features stored in half precision: the same attributions of real digits, at half the disk."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from hf_trak.evaluation import linear_datamodeling_score


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """The benchmark of the linear datamodeling score: a network, its retrainings on random halves, its scores."""
    path = Path(__file__).parents[2] / "benchmarks" / "lds_digits.py"
    spec = importlib.util.spec_from_file_location("lds_digits", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lds_digits"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_storage_changes_scores_by_less_than_one_percent_and_lds_by_less_than_a_hundredth(digits: ModuleType) -> None:
    masks = torch.rand(40, digits.N_TRAIN).argsort(1) < digits.N_TRAIN // 2
    outputs = torch.stack([digits.margins(network) for network in digits.train("mlp", masks, 0, 8)]).numpy()
    whole = digits.train("mlp", torch.ones(1, digits.N_TRAIN, dtype=torch.bool), 9, 8)
    exact = digits.attribute(whole, proj_dim=512)
    quality = linear_datamodeling_score(exact, masks, outputs).mean()
    assert quality > 0.1  # the comparison below is of something
    for dtype in ("float16", "bfloat16"):
        stored = digits.attribute(whole, proj_dim=512, feature_dtype=dtype)
        change = np.linalg.norm(stored - exact) / np.linalg.norm(exact)
        assert 0 < change < 0.01, dtype
        assert abs(linear_datamodeling_score(stored, masks, outputs).mean() - quality) < 0.01, dtype
