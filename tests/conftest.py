"""Shared fixtures: nothing here reaches a network; models are built from configs and trained in seconds."""

import atexit
import gc
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of two workers on two cores wait for each other
if sys.dont_write_bytecode and not os.path.exists(importlib.util.find_spec("datasets").cached):
    # Where images forbid to write bytecode and installers write none, all processes would compile all libraries.
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp(prefix="hf_trak-bytecode-")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)

import pytest
import torch
from places import PYTHONPATH


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all but the first cases of a test that is marked with `few` to the slow ones."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("few")) is not None:
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Look for no garbage while modules are imported, which takes a fifth of that time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what was imported out of every search for garbage."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let modules be taken down as without tests."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _quick_disk() -> Iterator[None]:
    """Do not wait for disks: no test cuts the power, and what a killed process has written is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logging_goes_on() -> Iterator[None]:
    """Undo what silences the tests that come after: `logging.disable` of benchmarks, levels that fixtures set."""
    logging.getLogger("hf_trak").setLevel(logging.NOTSET)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def jobs_with_one_thread() -> Iterator[None]:
    """Jobs in processes of their own find the modules of the tests, and work with one thread each.

    The server that jobs are forked from takes its environment over when the first job starts: modules whose tests
    start jobs ask for this fixture with `pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", PYTHONPATH)
        yield
