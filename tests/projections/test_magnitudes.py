"""Gradients of any magnitude, sizes of any number, inputs of the model's dtype: right, or refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from rounding import unit_roundoff
from torch import Tensor, nn
from trak_options import trak_config
from work import counted_calls

from hf_trak import TrakAttributor
from hf_trak.errors import StoreError
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.sealed import write_sealed
from hf_trak.store.store import FeatureStore

N, M, K = 12, 3, 5


def scores(directory: Path, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    config = {"train_size": N, "proj_dim": K, "feature_dtype": "float32", "shard_size": 6}
    store = FeatureStore.open(directory, config)
    store.register_checkpoint(0, "weights")
    features, targets = (torch.randn(rows, K, generator=generator) * scale for rows in (N, M))
    for index in range(2):
        store.train(0).write(index, features[6 * index : 6 * index + 6], torch.ones(6))
    processes = Processes(use_cpu=True)
    scorer = Scorer(store, processes, processes.device, 0.3)
    rows = scorer.precondition(0, lambda: targets, M)
    return torch.cat([block for _, _, block in scorer.blocks([0], [rows])])


@pytest.mark.parametrize("exponent", [-100, -73, -20, 20, 73, 100])
def test_scores_do_not_depend_on_the_magnitude_of_gradients(tmp_path: Path, exponent: int) -> None:
    """λ is relative, so X (XᵀX + λI)⁻¹ tᵀ stays as it is when X and t are scaled; by powers of two, to the bit."""
    expected = scores(tmp_path / "plain", 1.0)
    assert torch.equal(scores(tmp_path / "scaled", 2.0**exponent), expected)


def test_ordinary_targets_are_kept_as_they_are() -> None:
    matrix = torch.randn(M, K, dtype=torch.float64)
    assert ScaledRows.of(matrix).exponents is None
    scaled = ScaledRows.of(torch.cat([matrix[:2] * 1e-40, torch.zeros(1, K, dtype=torch.float64)]))
    assert scaled.exponents is not None
    back = torch.ldexp(scaled.values.double(), scaled.exponents.unsqueeze(1))
    # one rounding to float32
    torch.testing.assert_close(back[:2], matrix[:2] * 1e-40, rtol=unit_roundoff(), atol=0.0)
    assert torch.equal(back[2], torch.zeros(K, dtype=torch.float64))


def test_a_trillion_rows_are_refused_at_once(tmp_path: Path) -> None:
    content = {"train_size": 10**12, "proj_dim": 4, "feature_dtype": "float32", "shard_size": 1024}
    write_sealed(tmp_path / "trak_config.json", content)

    def refused() -> None:
        with pytest.raises(StoreError, match=r"trak_config\.json.*`train_size` 1000000000000 .* at most 1048576"):
            FeatureStore.load(tmp_path)

    assert counted_calls(refused)[1] < 20_000, "not one for every file"


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(pixel_values))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_model_gets_inputs_of_its_dtype(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    pixels = torch.randn(8, 6)
    rows = Dataset.from_dict({"pixel_values": pixels.tolist(), "labels": [0, 1, 2, 0, 1, 2, 0, 1]})
    model = Pixels()

    def features(**options: Any) -> Tensor:
        args = trak_config(
            output_dir=str(tmp_path / options.get("model_dtype", "float32")), proj_type="none", use_cpu=True,
            **options,
        )  # fmt: skip
        attributor = TrakAttributor(model, args, train_dataset=rows, task="image_classification").featurize()
        return torch.cat([shard.grads for shard in attributor.features.store.train(0)])

    expected, found = features(), features(model_dtype=dtype)
    assert model.head.weight.dtype == torch.float32
    error = (found - expected).norm() / expected.norm()
    # inputs, weights, products and the softmax are each rounded once or twice
    assert 0 < error < 8 * torch.finfo(getattr(torch, dtype)).eps
