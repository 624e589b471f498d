"""What `estimate` says of exact scores, against what really lies on disk."""

from pathlib import Path

import pytest
import torch
from torch import nn
from trak_options import trak_config

from hf_trak import TrakAttributor, TrakConfig, estimate
from hf_trak.curvature import fit
from hf_trak.featurize.exact import ExactScores

N, M = 150, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 192), nn.LayerNorm(192), nn.Linear(192, 12)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(pixel_values))))


def rows(n: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(n, 64, generator=generator)
    return [{"pixel_values": row, "labels": torch.tensor(i % 12)} for i, row in enumerate(pixels)]


def stored(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern) if path.is_file())


@pytest.mark.parametrize("curvature", ["ekfac", "diagonal"])
def test_bytes_on_disk(tmp_path, curvature, monkeypatch):
    torch.manual_seed(0)
    args = TrakConfig(str(tmp_path), curvature=curvature, use_cpu=True, budget="fast")
    own = TrakAttributor(Net(), args, rows(N, 0), task="image_classification")
    promised = own.estimate(M, method="exact").stages
    kept, cubes = [], []
    decompose = fit.eigenbasis

    def decomposed(total, *given):
        cubes.append(len(total) ** 3)
        return decompose(total, *given)

    monkeypatch.setattr(fit, "eigenbasis", decomposed)
    monkeypatch.setattr(fit.CurvatureFit, "_conclude", _counting(fit.CurvatureFit._conclude, kept))
    own.attribute(rows(M, 1), method="exact")
    # biases join their weights, whose sides are one longer for it
    assert promised["curvature"].disk == pytest.approx(stored(tmp_path, "curvature/0/*.safetensors"), rel=0.05)
    assert promised["curvature"].scratch == pytest.approx(kept[0], rel=0.1)
    assert promised["curvature"].cubes == pytest.approx(sum(cubes), rel=0.1) and bool(cubes) == (curvature == "ekfac")
    assert promised["exact targets"].disk == pytest.approx(
        stored(tmp_path, "experiments/*/*/*/preconditioned-*"), rel=0.05
    )
    assert promised["exact scores"].disk == pytest.approx(stored(tmp_path, "experiments/*/*/*/scores-*"), rel=0.15)
    assert not list(tmp_path.glob("curvature/0/progress"))


def _counting(conclude, kept):
    def counted(self, blocks):
        kept.append(stored(self.files.progress, "*.safetensors"))
        conclude(self, blocks)

    return counted


def test_targets_that_do_not_fit_take_several_passes(tmp_path):
    model = Net()
    parameters = sum(p.numel() for p in model.parameters())
    memory = 5 * 4 * parameters / 2**30
    args = trak_config(str(tmp_path), curvature="ekfac", use_cpu=True, curvature_memory=memory)
    assert estimate(model, N, args, eval_dataset=M, method="exact").stages["exact scores"].passes == 3 * N
    targets = rows(M, 1)
    several = TrakAttributor(model, args, rows(N, 0), task="image_classification")
    first = several.attribute(targets, top_k=None, method="exact")["trak_scores"]
    own = ExactScores(several.features)
    names = sorted({path.name.split("-")[1] for path in tmp_path.glob("experiments/*/*/*/scores-*")})
    assert names == ["000000", "000005", "000010"] and own.damping == 0.1
    args = TrakConfig(str(tmp_path / "one"), curvature="ekfac", use_cpu=True, budget="fast")
    second = TrakAttributor(model, args, rows(N, 0), task="image_classification").attribute(
        targets, top_k=None, method="exact"
    )["trak_scores"]
    # products of another number of targets are summed in another order: some roundings of the largest score
    torch.testing.assert_close(
        torch.tensor(first), torch.tensor(second), rtol=0, atol=1e-5 * torch.tensor(second).max()
    )


def test_it_is_said_only_where_it_is_asked_for(tmp_path):
    assert "exact scores" not in str(estimate(Net(), N, TrakConfig(str(tmp_path)), eval_dataset=M))
    hybrid = estimate(Net(), N, TrakConfig(str(tmp_path), curvature="hybrid"), eval_dataset=M, method="exact")
    assert hybrid.stages["exact scores"].passes == 2 * N
    assert any(line.startswith("exact scores ") and " 300" in line for line in str(hybrid).splitlines())
