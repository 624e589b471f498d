"""The benchmark of the kernels, as far as it runs without a GPU: its steps do what their names say."""

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rounding import assert_within, product_bound, random_walk_bound

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_steps

    return gpu_steps


def test_fused_and_unfused_project_the_same(steps, monkeypatch):
    left, right = torch.randn(3, 2, 20), torch.randn(3, 2, 300)
    projector = steps.make_projector("sjlt", 6000, 64, 0, CPU)
    fused, unfused = torch.zeros(3, 64), torch.zeros(3, 64)
    torch.ops.hf_trak.sjlt_accumulate_outer(fused, left, right, 0, 0, 0, 1)
    monkeypatch.setattr(steps, "BLOCK_BYTES", 3 * 300 * 4 * 7)  # three slices of up to seven rows
    steps.form_and_project(projector, unfused, left, right)
    # 6,000 / 64 sums of two products for each output, give or take a third
    norms = torch.einsum("bti,btj->bij", left, right).flatten(1).norm(dim=1, keepdim=True) / math.sqrt(48)
    assert_within(unfused, fused, random_walk_bound(2 + 6000 // 48, norms, sums=3 * 64, computations=2))


def test_scoring_steps_give_the_same_scores(steps):
    features, targets = torch.randn(50, 8), torch.randn(5, 8)
    expected = steps.plain_copies(features, targets, 7)
    found = steps.product_through_device(features, targets, CPU, 7)
    assert found.dtype == expected.dtype == torch.float32
    assert_within(found, expected, 2 * product_bound(features, targets.T))  # 8 products


def test_whole_models_are_featurized(steps, monkeypatch):
    model = torch.nn.Linear(6, 3)
    case = (model, torch.randn(4, 6), lambda output, batch: output.float().sum(1))
    monkeypatch.setattr(steps, "resnet18", lambda: case)
    monkeypatch.setattr(steps, "gpt2", lambda: case)
    groups = list(steps.featurize_steps(16, CPU))
    assert [name for name, _, _ in groups] == ["ResNet-18 B=4", "GPT-2 B=4"]
    for _, table, samples in groups:
        assert samples == 4
        for step in table.values():
            step()
        assert model.weight.grad is not None, "the training step takes gradients"


def test_no_script_has_the_name_of_a_package_that_transformers_looks_for():
    """A script in the directory of the one that runs is found before an installed package."""
    assert not {path.stem for path in BENCHMARKS.glob("*.py")} & {"kernels", "accelerate", "peft", "datasets", "timm"}


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_kernels

    assert gpu_kernels.parse_arguments([]).parts == list(gpu_kernels.PARTS)
    found = sys.modules.get("kernels")  # without a file if it is the directory of these tests
    places = [] if found is None else [found.__file__ or "", *getattr(found, "__path__", ())]
    assert not any(place.startswith(str(BENCHMARKS)) for place in places)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        gpu_kernels.main([])


def test_both_kernels_of_hopper_are_measured(monkeypatch):
    """Dense methods on a GPU that is played: one row by its own instructions, one without them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_kernels

    seen = []
    projector = SimpleNamespace(accumulate=lambda *_: seen.append(os.environ.get("HF_TRAK_WGMMA")))
    monkeypatch.setattr(gpu_kernels, "checked_instruction", lambda *_: "wgmma")
    monkeypatch.setattr(gpu_kernels, "RademacherProjector", lambda *_, **__: projector)
    monkeypatch.delenv("HF_TRAK_WGMMA", raising=False)
    arguments = gpu_kernels.parse_arguments(
        ["--grad-dim", "64", "--proj-dim", "8", "--batch-sizes", "2", "--no-normal"]
    )
    table = gpu_kernels.dense_methods(arguments, CPU)
    for name in ("rademacher bfloat16 B=2, wgmma", "rademacher bfloat16 B=2, mma"):
        run, operations = table[name]
        run()
        assert operations == 2 * 2 * 64 * 8
    assert seen == [None, "0"] and "HF_TRAK_WGMMA" not in os.environ


def test_the_way_of_torch_projects_by_random_signs(monkeypatch):
    """Its part of a sum has the parity of the number of ones, and the size of a random walk."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_kernels

    torch.manual_seed(0)
    out = torch.zeros(2, 300)
    gpu_kernels.materialize_and_multiply(out, torch.ones(2, 101, dtype=torch.bfloat16))()
    assert (out.long() % 2 == 1).all()
    assert 7 < float(out.std()) < 14 and float(out.mean().abs()) < 3


def test_rotations_are_measured_by_the_kernel_and_by_torch(monkeypatch):
    """The operator and torch operators rotate the same rows, one after the other; rotations keep norms."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_kernels

    rows, given = torch.randn(10, 64), []
    monkeypatch.setattr(gpu_kernels.torch, "randn", lambda *shape, device: given.append(shape) or rows)
    arguments = gpu_kernels.parse_arguments(["--rotation-dims", "64", "--rotation-numbers", "640"])
    table = gpu_kernels.rotation_methods(arguments, CPU)
    assert list(table) == ["rotation k=64, 1 passes", "torch: rotation k=64"] and given == [(10, 64)]
    for run, amount in table.values():
        before = rows.clone()
        run()
        assert amount == 2 * before.nbytes
        assert not torch.equal(rows, before)
        torch.testing.assert_close(rows.norm(dim=1), before.norm(dim=1))


def test_models_are_measured_and_counted(monkeypatch, capsys):
    """All columns of the first day, of two small models that are played by a CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_models

    def case(width):
        model = torch.nn.Linear(6, width)
        return lambda: (model, torch.randn(4, 6), lambda output, batch: output.float().sum(1))

    monkeypatch.setattr(gpu_models, "MODELS", {"three": case(3), "five": case(5)})
    found = dict(gpu_models.table(16, 3, CPU))
    assert list(found) == ["three", "five"]
    for figures in found.values():
        assert all(value >= 0 and math.isfinite(value) for value in figures.values())
        assert figures["gradients ÷ plain"] > 0 and figures["features ÷ plain"] > 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["three", "five"]
    steps, size, total, operations = gpu_models.steps_of(case(3), 16, CPU)
    assert (size, total) == (4, 6 * 3 + 3)
    assert operations == 2 * 4 * 6 * 3 * 2  # forward, and the gradient of the weight: nothing is asked of the rows
    assert list(steps) == ["plain", "gradients", "features"]


@pytest.mark.slow
def test_the_first_day_needs_a_gpu_and_tells_which_tests_failed(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_first_day

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees none"):
        gpu_first_day.main([])
    (tmp_path / "test_one.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(gpu_first_day, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_first_day, "TESTS", ("-q", "-rfE", "test_one.py"))
    assert gpu_first_day.run_tests(tmp_path / "log").startswith("1 failed, 1 passed")
    assert "FAILED test_one.py::test_two" in capsys.readouterr().out
    for place in gpu_first_day.PLACES:
        assert (BENCHMARKS.parent / place).exists()
