"""A store that may not be written to: what needs no writing works, and the rest says which file it would write."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_jobs

from hf_trak import TrakAttributor
from hf_trak.errors import StoreError

NOBODY = 65534
SIZES = store_jobs.Sizes(checkpoints=1)


def attributor(directory: Path) -> TrakAttributor:
    return store_jobs.make(directory, SIZES)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A store with scores of some targets and a temporary file of a dead process, as another user sees it."""
    directory = Path(tempfile.mkdtemp())
    (model,) = store_jobs.models(1)
    attributor(directory).featurize(model).attribute(store_jobs.rows(3, 2), top_k=2)
    left = directory / ".hf_trak-tmp-host-1-0123456789abcdef"
    left.write_bytes(b"left")
    os.utime(left, (0, 0))
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0  # to whom permissions say nothing
    try:
        if root:
            os.seteuid(NOBODY)
        yield directory
    finally:
        if root:
            os.seteuid(0)
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(directory)


def test_a_store_that_is_read_only(read_only: Path) -> None:
    own, (model,) = attributor(read_only), store_jobs.models(1)
    assert len(own.attribute(store_jobs.rows(3, 2), top_k=2, checkpoints=[model])["trak_scores"]) == 3
    for ask in (
        lambda: own.attribute(store_jobs.rows(3, 2), top_k=None, checkpoints=[model]),
        lambda: own.attribute(store_jobs.rows(3, 4), top_k=2, checkpoints=[model]),
        lambda: own.attribute(store_jobs.rows(3, 2), top_k=2, checkpoints=[model], method="exact"),
        lambda: own.fit_curvature(model),
    ):
        with pytest.raises(StoreError, match=rf"{read_only}.* cannot be written: .*Permission denied"):
            ask()
