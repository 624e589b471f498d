"""Directories of `TRAKer` that are damaged or mixed up give right scores, or an error that names the file."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damage
import numpy as np
import pytest
import torch
from torch import Tensor
from traker_runs import IDS, TARGETS, featurize, findings, half, make, read, run, score, weights

from hf_trak.errors import HfTrakError, IncompleteStoreError, StoreError
from hf_trak.traker.savers.check import check_run


class Whole:
    """A directory, and what comes out of it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.directory = scratch, scratch / "whole"
        traker = half(self.directory)
        self.two = {name: traker.finalize_scores(name, IDS[:2]) for name in TARGETS}
        self.three = run(scratch / "other")
        assert len({*map(str, (self.two["a"], self.two["b"], self.three))}) == 3

    def cases(self) -> Iterator[damage.Damage]:
        yield from damage.flips(self.directory, 260)
        for name in ("metadata.json", "0/id_metadata.json", "experiments.json"):
            for byte in range(0, (self.directory / name).stat().st_size, 7):
                yield damage.flip(Path(name), byte, byte % 8)
        yield from damage.cuts(self.directory)
        yield from damage.deletions(self.directory)
        yield from damage.swaps(self.directory)
        yield damage.swapped(Path("0"), Path("1"))
        others: dict[str, dict[str, Any]] = {
            "other weights": {"weights_of": 3},
            "half precision": {"use_half_precision": True},
            "another λ": {"lambda_reg": 0.5},
        }
        for label, changes in others.items():
            half(self.scratch / label, **changes)
            yield from damage.taken_from(self.scratch / label, self.directory, label)
        half(self.scratch / "rows", shift=1)
        for case in damage.taken_from(self.scratch / "rows", self.directory, "other rows"):
            # TRAKer never sees the rows: unfinished gradients and targets of others are like its own
            if not any(part in str(case.files[0]) for part in ("2/", "a_", "b_", "experiments")):
                yield case


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


def outcome(case: damage.Damage, directory: Path, call: Any, expected: Tensor, strict: bool) -> str:
    """What a call makes of damage: right scores, or an error with the name of a file that was touched."""
    try:
        found = call()
    except HfTrakError as error:
        files = [directory / file for file in case.files]
        files += [file.parent for file in files if not file.exists()]
        named = any(str(file) in str(error) for file in files)
        # rows whose marks are gone are rows that were not computed yet
        incomplete = isinstance(error, IncompleteStoreError) and not strict
        assert named or incomplete, f"{case}: {type(error).__name__}: {error}"
        return "refused"
    assert torch.equal(found, expected), f"{case}: wrong scores without a word"
    return "right"


def check(whole: Whole, cases: list[damage.Damage], copy: Path) -> dict[str, int]:
    """Do every damage to a copy, and call what one calls; counts outcomes of the whole script."""
    seen = {"right": 0, "refused": 0}
    for case in cases:
        shutil.copytree(whole.directory, copy)
        case.act(copy)
        found = [one for one in findings(copy) if one.state not in ("intact", "unchecked")]
        named = any(str(copy / file) in f"{one.path} {one.detail}" for one in found for file in case.files)
        # of intact files that do not fit, the check cannot know which one is in the wrong place; and the rows that an
        # unfinished array lacks may have any value
        assert named or (found and (case.foreign or case.files[0].parts[0] == "2")), case
        again = lambda: make(copy).finalize_scores("a", IDS[:2])  # noqa: E731
        outcome(case, copy, again, whole.two["a"], strict=False)
        outcome(case, copy, lambda: read(copy, "b"), whole.two["b"], strict=False)
        seen[outcome(case, copy, lambda: run(copy), whole.three, strict=True)] += 1
        shutil.rmtree(copy)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("count", [80, pytest.param(160, marks=pytest.mark.slow)])
def test_nothing_damaged_is_silent(whole: Whole, tmp_path: Path, count: int) -> None:
    cases = list(whole.cases())
    directories = [case for case in cases if (whole.directory / case.files[0]).is_dir()]
    chosen = np.random.default_rng(1).choice(len(cases), count, replace=False)
    seen = check(whole, [cases[i] for i in chosen] + directories, tmp_path / "copy")
    assert min(seen.values()) >= count / 16, seen


@pytest.mark.exhaustive
def test_nothing_damaged_is_silent_all(whole: Whole, tmp_path: Path) -> None:
    cases = list(whole.cases())
    assert len(cases) >= 500
    check(whole, cases, tmp_path / "copy")


# -- rows that were written past the saver ----------------------------------------------------------------------------


def test_rows_written_past_the_saver_count_and_are_said_to_be_unchecked(tmp_path: Path, caplog: Any) -> None:
    """As scripts do that fill `current_store` themselves."""
    expected = run(tmp_path / "whole")
    whole = make(tmp_path / "whole").saver
    traker = make(tmp_path / "past")
    for model_id in IDS:
        whole.load_current_store(model_id)
        traker.load_checkpoint(weights(model_id), model_id)
        for key in ("grads", "out_to_loss", "is_featurized"):
            traker.saver.current_store[key][:] = whole.current_store[key]
    traker = make(tmp_path / "past")  # another process, for example
    with caplog.at_level(logging.WARNING, "hf_trak"):
        traker.finalize_features()
        score(traker, "a", IDS)
        assert torch.equal(traker.finalize_scores("a"), expected)
    told = [record.getMessage() for record in caplog.records if "past the saver" in record.getMessage()]
    assert len(told) == 2 * len(IDS) and "grads.mmap: 10 of 10 rows are unchecked" in told[0]
    states = {one.path.name: one.state for one in check_run(tmp_path / "past")}
    assert states["grads.mmap"] == states["out_to_loss.mmap"] == "unchecked" and states["features.mmap"] == "intact"


def test_rows_that_were_changed_past_the_saver_need_new_checksums(tmp_path: Path) -> None:
    traker = make(tmp_path)
    featurize(traker, 0)
    traker.saver.current_store["grads"][3] *= 2
    with pytest.raises(StoreError, match=r"grads\.mmap is damaged: 1 of 10 rows \(first: \[3\]\).*update_checksums"):
        traker.finalize_features()
    traker.saver.update_checksums("grads", [3])
    traker.finalize_features()
    assert {one.state for one in check_run(tmp_path)} == {"intact"}


def test_a_mark_without_a_row_does_not_count(tmp_path: Path, caplog: Any) -> None:
    traker = make(tmp_path)
    featurize(traker, 0, stop=6)
    traker.saver.current_store["is_featurized"][8] = 1
    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert np.flatnonzero(traker.saver.featurized()).tolist() == [0, 1, 2, 3, 4, 5]
    assert "no checksums of 1 rows that are marked" in caplog.text
    (finding,) = [one for one in check_run(tmp_path) if one.state == "damaged"]
    assert finding.path.name == "_is_featurized.mmap" and "[8]" in finding.detail


def test_a_file_that_is_changed_behind_its_time_stamp_is_read_again(tmp_path: Path) -> None:
    """Size and time of the last modification can be set back."""
    traker = half(tmp_path)
    path = tmp_path / "0" / "features.mmap"
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(200)
        file.write(b"\x55")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreError, match=r"features\.mmap is damaged"):
        traker.finalize_scores("a", IDS[:2])


def test_features_that_another_process_finalizes_anew(tmp_path: Path) -> None:
    """With another λ, while this one goes on: it says so, instead of taking them for its own."""
    first = half(tmp_path)
    make(tmp_path, lambda_reg=0.5).finalize_features(IDS[:2])
    with pytest.raises(IncompleteStoreError, match=r"finalized with .*0\.5.*0\.05"):
        first.finalize_scores("a", IDS[:2])


# -- writes that fail -------------------------------------------------------------------------------------------------


def test_no_space_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is being written when the disk is full: the file, how much is free, and what to do."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    half(tmp_path / "half")
    expected = run(tmp_path / "whole")
    calls = ["hf_trak.store.atomic.os.replace", "numpy.memmap.flush", "hf_trak.traker.savers.row_files.allocate"]
    for number, call in enumerate(calls):
        shutil.copytree(tmp_path / "half", tmp_path / str(number))
        with monkeypatch.context() as patch:
            patch.setattr(call, full)
            with pytest.raises(StoreError, match=r"No space left.*MiB are free.*run the same command again") as error:
                run(tmp_path / str(number))
                make(tmp_path / f"new {number}").load_checkpoint(weights(0), 0)
        assert str(tmp_path) in str(error.value)
        assert torch.equal(run(tmp_path / str(number)), expected)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    with pytest.raises(StoreError, match=r"file/run.*cannot be written"):
        make(tmp_path / "file" / "run")
