"""Curvatures of sharded models: every block has one owner, and a fit that was interrupted goes on in any division."""

import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_jobs
import torch
from sharded_jobs import attributor, eigenvalues, made, mesh_of_all, sharded
from test_sharded import launched, report_of

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.files import CurvatureFiles
from hf_trak.curvature.fit import CurvatureFit
from hf_trak.curvature.owner_maps import BlockOwners
from hf_trak.runtime.processes import Processes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]


def some_blocks() -> CurvatureBlocks:
    """Make three matrices, the first cut in two, and a stack of two."""
    cut = [KroneckerBlock("a", i * 8, 2, 4, 4, source=0, source_left=i * 2) for i in range(2)]
    others = [KroneckerBlock("b", 16, 8, 8, 8, source=16), KroneckerBlock("c", 80, 4, 4, 4, source=80)]
    stack = [KroneckerBlock("d", 96 + i * 16, 4, 4, 4) for i in range(2)]
    return CurvatureBlocks((*cut, *others, *stack), (DiagonalBlock("e", 128, 3),))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_block_has_one_owner_and_what_comes_together_the_same(count: int) -> None:
    blocks = some_blocks()
    owners = [BlockOwners(blocks, rank, count, None) for rank in range(count)]
    assert sorted(index for one in owners for index in one.mine) == list(range(len(blocks.kronecker)))
    assert all(one.of(index) == rank for rank, one in enumerate(owners) for index in one.mine)
    assert owners[0].of(0) == owners[0].of(1) and owners[0].of(4) == owners[0].of(5)
    assert sum(bool(one.mine) for one in owners) == min(count, 4)


def test_sums_of_a_part_are_there_when_all_shares_are(tmp_path: Path) -> None:
    files, blocks = CurvatureFiles(tmp_path, {"kind": "ekfac"}), some_blocks()
    files.prepare()
    shares = [files.sums_path("bases", blocks, 0, (index, 2)) for index in range(2)]
    files.write_sums(shares[1], {"counts": torch.zeros(1)})
    files.write_sums(files.sums_path("bases", blocks, 0, (0, 3)), {"counts": torch.zeros(1)})
    assert files.sums_paths("bases", blocks, 0) == []
    files.write_sums(shares[0], {"counts": torch.zeros(1)})
    assert files.sums_paths("bases", blocks, 0) == shares
    assert files.sums_paths("bases", blocks, 1) == []


def interrupted_job(directory: Path) -> dict[str, Any]:
    """A fit that ends after its first pass, and what it was in one process."""
    Processes(True)
    plain = CurvatureFit._decompose

    def fail(self: Any, *args: Any) -> None:
        raise ValueError("interrupted.")

    one = attributor(sharded(made("gpt2"), mesh_of_all()), "gpt2", directory / "store")
    CurvatureFit._decompose = fail  # type: ignore[method-assign]
    try:
        said = report_of(one.fit_curvature)
    finally:
        CurvatureFit._decompose = plain  # type: ignore[method-assign]
    progress = next((directory / "store").rglob("progress"))
    return {"said": said, "files": sorted(path.name for path in progress.glob("bases-*"))}


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in launched(tmp_path, "interrupted", 2, 240, __file__):
        assert found["said"] == "ValueError: interrupted."
        assert [name.rpartition("-")[2] for name in found["files"]] == ["0of2.safetensors", "1of2.safetensors"]
    passes = []
    plain = CurvatureFit._sum_bases
    monkeypatch.setattr(CurvatureFit, "_sum_bases", lambda *args: passes.append(1) or plain(*args))
    rest = eigenvalues(attributor(made("gpt2"), "gpt2", tmp_path / "store"))
    assert passes == []
    expected = eigenvalues(attributor(made("gpt2"), "gpt2", tmp_path / "whole"))
    assert len(passes) == 1
    assert float((rest - expected).norm() / expected.norm()) <= 1e-4


if __name__ == "__main__":
    sharded_jobs.run(interrupted_job, Path(sys.argv[2]))
