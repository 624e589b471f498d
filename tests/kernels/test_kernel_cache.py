"""Compiled code on disk: what others have put there is never loaded, and work goes on without it."""

import hashlib
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import PYTHONPATH
from store_jobs import Job

from hf_trak.cli.main import main
from hf_trak.kernels import cache, cpu_functions
from hf_trak.store.atomic import leftovers

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

needs_compiler = pytest.mark.skipif(cpu_functions.compiler() is None, reason="no C compiler")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")

PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void planted(void) { fclose(fopen("%s", "w")); }
void sjlt_add(void) {}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(directory))
    return directory


@pytest.fixture
def planted(place: Path, tmp_path: Path) -> Path:
    """A library with its own digest that leaves a mark when it is loaded."""
    program, name = cpu_functions.compiler(), cpu_functions.name_of("sjlt")
    assert program is not None and name is not None
    (tmp_path / "planted.c").write_text(PLANTED % (tmp_path / "mark"))
    built = tmp_path / "planted.so"
    subprocess.run([program, "-shared", "-fPIC", "-o", str(built), str(tmp_path / "planted.c")], check=True)
    path = place / name
    path.write_bytes(hashlib.sha256(built.read_bytes()).hexdigest().encode() + built.read_bytes())
    path.chmod(0o600)
    return path


def loaded() -> bool:
    return cpu_functions.compiled("sjlt", False) is not None


def load(expected: bool) -> None:
    """Load what is in the cache, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {cache.DIRECTORY_VARIABLE: os.environ[cache.DIRECTORY_VARIABLE]}
        assert Job(Path(directory) / "report.json", loaded, environment=environment).wait() == {"value": expected}


@needs_compiler
def test_ones_own_file_is_loaded(planted: Path, tmp_path: Path) -> None:
    load(True)
    assert (tmp_path / "mark").exists(), "otherwise the following tests prove nothing"


@needs_compiler
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_loaded(planted: Path, tmp_path: Path, mode: int) -> None:
    planted.chmod(mode)
    load(False)
    assert not (tmp_path / "mark").exists()


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_is_not_used(
    planted: Path, tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    planted.parent.chmod(mode)
    load(False)
    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert cpu_functions.compiled("sjlt") is not None
    assert not (tmp_path / "mark").exists() and "others can write to it" in caplog.text
    assert list(planted.parent.iterdir()) == [planted]


@needs_compiler
@needs_root
@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_belongs_to_another_user_is_not_loaded(planted: Path, tmp_path: Path, what: str) -> None:
    """Root with the home directory of a user, as after `sudo -E`."""
    os.chown(planted if what == "file" else planted.parent, 54321, 54321)
    load(False)
    assert not (tmp_path / "mark").exists()


@needs_compiler
def test_links_and_pipes_are_not_read(planted: Path, tmp_path: Path) -> None:
    moved = planted.rename(tmp_path / "moved")
    planted.symlink_to(moved)
    load(False)
    planted.unlink()
    os.mkfifo(planted, 0o600)
    load(False)
    assert not (tmp_path / "mark").exists()


@needs_compiler
def test_what_was_checked_is_what_is_loaded(planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is exchanged after it was read has come too late."""
    evil = planted.read_bytes()
    planted.unlink()
    assert cpu_functions.compiled("sjlt") is not None
    read = cache.read

    def exchanged(name: str) -> bytes | None:
        found = read(name)
        planted.unlink()
        planted.write_bytes(evil[64:])
        return found

    monkeypatch.setattr(cache, "read", exchanged)
    assert cpu_functions.compiled("sjlt", compile_now=False) is not None
    assert not (tmp_path / "mark").exists()


def test_files_are_written_for_one_user_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(place / "new"))
    before = os.umask(0)
    try:
        cache.write("a.so", b"content")
    finally:
        os.umask(before)
    assert cache.read("a.so") == b"content" and cache.read("b.so") is None
    assert stat.S_IMODE((place / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "new" / "a.so").stat().st_mode) == 0o600


def killed_write() -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    cache.write("a.so", b"content")


def test_clean_removes_what_killed_processes_left(place: Path, tmp_path: Path) -> None:
    environment = {cache.DIRECTORY_VARIABLE: str(place)}
    assert Job(tmp_path / "report.json", killed_write, environment=environment).wait() is None
    (left,) = leftovers(place)
    assert left.removable
    assert main(["inspect", str(place), "--clean", "--json"]) == 0
    assert not list(place.iterdir())


HOMELESS = """
import os, pwd

def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = nobody
os.environ.pop("HOME", None)
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.kernels import cache, cpu_functions
from hf_trak.kernels.cpu_sparse import compiled_addition

assert cache.directory() is None
cpu_functions._WORTH_COMPILING = 0
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)).eval()
rows = Dataset.from_dict({"input_ids": [[i % 50, 7 * i % 50, 3, 4] for i in range(8)]})
rows = rows.map(lambda row: {"labels": row["input_ids"], "attention_mask": [1] * 4})
TrakAttributor(model, TrakConfig(output_dir="out", proj_dim=32), rows, task="causal_lm").featurize()
assert cpu_functions.compiler() is None or compiled_addition._function is not None
"""


@pytest.mark.slow
def test_a_user_without_a_home_featurizes(tmp_path: Path) -> None:
    """A container's user without an entry in the list of users has no HOME, and nothing is kept."""
    hidden = ("HOME", "XDG_CACHE_HOME", cache.DIRECTORY_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": PYTHONPATH, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "there is no home directory" in done.stderr
    assert not list(tmp_path.glob("~*"))
