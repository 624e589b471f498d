"""Reports on a curvature: their numbers beside dense matrices, their warnings, and where they are shown."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curvature_runs import rows_of, written_curvature
from torch import Tensor, nn
from trak_options import trak_config
from transformers import MixtralConfig, MixtralForCausalLM

from hf_trak import TrakAttributor
from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.curvature import Curvature, KroneckerValues
from hf_trak.curvature.report import QUANTILES, CurvatureReport
from hf_trak.errors import ConfigMismatchError, StoreError

DAMPING = 0.3


def spread(*shape: int, seed: int) -> Tensor:
    """Eigenvalues over several orders of magnitude."""
    return torch.exp(2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).double()


def rotation(size: int, seed: int) -> Tensor:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(matrix).Q


def curvature_of(
    eigenvalues: list[Tensor], counts: list[int], diagonal: Tensor | None = None, source: int | None = 0, **kind: Any
) -> Curvature:
    """A curvature of weights `w0`, `w1`, … and of a parameter `norm`."""
    kronecker, values, start = [], [], 0
    for index, (found, count) in enumerate(zip(eigenvalues, counts, strict=True)):
        rows, columns = found.shape
        kronecker.append(KroneckerBlock(f"w{index}", start, rows, columns, columns, source=source))
        bases = (rotation(rows, 2 * index), rotation(columns, 2 * index + 1))
        values.append(KroneckerValues(bases, found, count))
        start += rows * columns
    lone = [] if diagonal is None else [DiagonalBlock("norm", start, len(diagonal))]
    blocks = CurvatureBlocks(tuple(kronecker), tuple(lone), without_gradient=kind.pop("silent", ()))
    numbers = () if diagonal is None else (diagonal,)
    return Curvature(kind.get("kind", "ekfac"), blocks, tuple(values), numbers, 100, "digest")


def test_the_numbers_are_those_of_dense_matrices() -> None:
    curvature = curvature_of([spread(3, 4, seed=1), spread(5, 2, seed=2)], [100, 200], spread(6, seed=3))
    report = CurvatureReport.of(curvature, DAMPING)

    # P and (P + d)⁻¹ in full, from the products that scores are made with.
    unit = torch.eye(curvature.numel, dtype=torch.float64)
    inverse = curvature.precondition(unit, DAMPING)
    whole = torch.zeros_like(unit)
    ranges = {"w0": slice(0, 12), "w1": slice(12, 22), "norm": slice(22, 28)}
    for name, values in zip(("w0", "w1"), curvature.kronecker, strict=True):
        assert values.bases is not None
        basis = torch.kron(*values.bases)
        whole[ranges[name], ranges[name]] = basis @ torch.diag(values.eigenvalues.flatten()) @ basis.T
    whole[ranges["norm"], ranges["norm"]] = torch.diag(curvature.diagonal[0])

    # For independent g, g' of covariance P the block's part of a score has the mean square tr(A P A P), A = (P + d)⁻¹.
    product = inverse @ whole
    score = {name: float((product[part, part] @ product[part, part]).trace()) for name, part in ranges.items()}
    gradient = {name: float(whole[part, part].trace()) for name, part in ranges.items()}
    for block in report.blocks:
        part = ranges[block.name]
        assert block.effective_dimension == pytest.approx(float(product[part, part].trace()), rel=1e-9)
        assert block.score_share == pytest.approx(score[block.name] / sum(score.values()), rel=1e-9)
        assert block.gradient_share == pytest.approx(gradient[block.name] / sum(gradient.values()), rel=1e-9)
        assert block.total == pytest.approx(gradient[block.name], rel=1e-9)
        assert block.mean == pytest.approx(block.total / block.numel, rel=1e-12)
        assert block.damping == pytest.approx(DAMPING * block.mean, rel=1e-12)
        values = torch.linalg.eigvalsh(whole[part, part]).numpy()
        assert block.eigenvalues == pytest.approx(np.quantile(values, QUANTILES), rel=1e-9)
    shares = [block.score_share for block in report.blocks]
    assert shares == sorted(shares, reverse=True)
    assert {block.name: (block.kind, block.shape, block.positions) for block in report.blocks} == {
        "w0": ("kronecker", (3, 4), 100),
        "w1": ("kronecker", (5, 2), 200),
        "norm": ("diagonal", (6,), None),
    }
    assert report.numel == 28


def test_blocks_of_one_parameter_have_names_of_their_own_and_count_together() -> None:
    first, second = spread(2, 3, seed=1), spread(2, 3, seed=2)
    curvature = curvature_of([first, second, first, second], [100] * 4)
    names = ["conv", "conv", "a", "b"]
    blocks = [KroneckerBlock(name, 6 * index, 2, 3, 3, source=6 * index) for index, name in enumerate(names)]
    same = Curvature("ekfac", CurvatureBlocks(tuple(blocks), ()), curvature.kronecker, (), 100, "digest")
    report = CurvatureReport.of(same, DAMPING)
    assert {block.name for block in report.blocks} == {"conv[0]", "conv[1]", "a", "b"}
    larger = (first * 10, second * 10, first, second)
    values = tuple(KroneckerValues(one.bases, more, 100) for one, more in zip(same.kronecker, larger, strict=True))
    report = CurvatureReport.of(Curvature("ekfac", same.blocks, values, (), 100, "digest"), DAMPING)
    (warning,) = report.warnings
    assert warning.startswith("conv has 91% of the squared gradients")  # 10 of 11 parts; scores do not see the scale


def test_too_few_positions_are_named_and_enough_are_not() -> None:
    def warnings(counts: list[int], **options: Any) -> tuple[str, ...]:
        eigenvalues = [torch.ones(3, 40), torch.ones(40, 3), torch.ones(20, 6)]
        return CurvatureReport.of(curvature_of(eigenvalues, counts, **options), DAMPING).warnings

    assert warnings([400, 400, 200]) == ()
    (warning,) = warnings([400, 399, 20])
    assert warning.startswith("The sample is small for w1, w2: w2 has 20 positions, and 200 are needed")
    # a whole gradient has as many directions as its shorter side
    assert warnings([134, 134, 34], source=None) == () == warnings([134, 134, 34], kind="shampoo")
    for options in ({"source": None}, {"kind": "shampoo"}):
        (warning,) = warnings([134, 133, 34], **options)
        assert "small for w1: w1 has 133 positions, and 134 are needed" in warning


def test_parameters_without_gradient_and_blocks_of_zeros_are_named() -> None:
    eigenvalues = [torch.ones(3, 4), torch.zeros(3, 4), torch.ones(3, 4), torch.ones(3, 4)]
    report = CurvatureReport.of(curvature_of(eigenvalues, [40, 0, 40, 40], torch.zeros(6), silent=("norm",)), DAMPING)
    silent, empty = report.warnings
    assert silent.startswith("norm had no gradient in any of the 100 rows")
    assert empty.startswith("All gradients of w1 are zero in the sample")
    assert {block.name: block.score_share for block in report.blocks}["w1"] == 0.0
    nothing = CurvatureReport.of(curvature_of([torch.zeros(3, 4)], [0]), DAMPING)
    assert nothing.blocks[0].gradient_share == 0.0
    assert "nan" not in str(nothing)


def test_one_parameter_with_most_of_the_variance_is_named() -> None:
    parts = [torch.ones(3, 4)] * 3
    assert CurvatureReport.of(curvature_of([*parts], [40] * 3), DAMPING).warnings == ()
    (warning,) = CurvatureReport.of(curvature_of([3 * parts[0], *parts[1:]], [40] * 3), DAMPING).warnings
    assert warning.startswith("w0 has 60% of the squared gradients")
    (warning,) = CurvatureReport.of(curvature_of([torch.ones(9, 4) / 9, *parts[1:]], [90] * 3), DAMPING).warnings
    assert warning.startswith("w0 has 60% of the variance of scores")
    # of two parameters, one always has half
    assert CurvatureReport.of(curvature_of([3 * parts[0], parts[1]], [40] * 2), DAMPING).warnings == ()


# -- where it is shown ---------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Two layers, a norm, and a layer that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(pixel_values))))


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)
    return rows_of(pixel_values=inputs, labels=labels)


def attributor(directory: Path, count: int = 120, **options: Any) -> TrakAttributor:
    args = trak_config(output_dir=str(directory), use_cpu=True, proj_dim=64, **options)
    return TrakAttributor(Network().eval(), args, train_dataset=rows(count), task="image_classification")


def test_a_fit_logs_a_short_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_trak.curvature.report"):
        found = attributor(tmp_path, curvature_damping=0.2).fit_curvature().curvature_report()
    assert found == CurvatureReport.of(written_curvature(tmp_path), 0.2)
    messages = [(record.levelno, record.getMessage()) for record in caplog.records if "checkpoint 0" in record.message]
    texts = [(logging.INFO, found.summary()), *((logging.WARNING, warning) for warning in found.warnings)]
    assert messages == [(level, f"Curvature of checkpoint 0: {text}") for level, text in texts]
    assert any("unused.weight, unused.bias had no gradient" in warning for warning in found.warnings)


def test_a_report_is_text_and_json(tmp_path: Path) -> None:
    found = attributor(tmp_path).fit_curvature().curvature_report()
    text = str(found)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [block["name"] for block in content["blocks"]] == [block.name for block in found.blocks]
    assert content["parameters"] == sum(one.numel() for one in Network().parameters())
    for name, _ in Network().named_parameters():
        # the biases of the two layers are columns of their matrices
        assert (f"\n{name} " in text) == (name not in ("first.bias", "last.bias")), name
    assert "8 × 7" in text and "fitted to 120 rows" in text
    assert all(f"Warning: {warning}" in text for warning in found.warnings)
    lines = found.table()
    assert len({len(line) for line in lines}) == 1 and len(lines) == len(found.blocks) + 1
    assert len(found.table(2)) == 3


def test_bases_of_whole_gradients_are_named(tmp_path: Path) -> None:
    """Experts see positions of several rows at once, so that their gradients come whole; other layers do not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=20, num_key_value_heads=2, num_local_experts=3, **sizes))
    given = [{"input_ids": ids, "labels": ids} for ids in torch.randint(20, (12, 4))]
    args = trak_config(output_dir=str(tmp_path), use_cpu=True, proj_dim=64)
    found = TrakAttributor(model.eval(), args, train_dataset=given).fit_curvature().curvature_report()
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert sorted(found.whole) == sorted(experts) and experts
    assert all(name in found.summary() for name in experts) and "come whole" in found.summary()


def test_a_report_needs_a_curvature_of_this_kind_and_takes_any_sample(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'identity', which is fitted to nothing"):
        attributor(tmp_path, curvature="identity").fit_curvature().curvature_report()
    one = attributor(tmp_path, curvature_rows=50)
    one.fit_curvature()
    assert attributor(tmp_path).curvature_report().rows == 50
    with pytest.raises(ConfigMismatchError, match='kind: saved "ekfac", given "kfac"'):
        attributor(tmp_path, curvature="kfac").curvature_report()
    one.fit_curvature({3: None})
    assert one.curvature_report(3).to_dict() == one.curvature_report().to_dict()
    (tmp_path / "curvature/3/curvature.json").unlink()
    with pytest.raises(StoreError, match="no curvature of checkpoint 3"):
        one.curvature_report(3)
