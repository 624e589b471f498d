"""Runs that are killed while being saved, replaced, damaged or old: loading gives a whole run or names the file."""

import json
import os
import pickle
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import disable_progress_bars, enable_progress_bars, load_from_disk
from report_runs import (
    N_TRAIN,
    build,
    contents,
    kill_at_random,
    kill_at_steps,
    save_format_1,
    save_many,
    whole,
)
from store_jobs import Job

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report import AttributionRun, verify_run
from hf_trak.report import run_record as run_reading
from hf_trak.report import run_record as run_writing
from hf_trak.report.run_record import run_leftovers
from hf_trak.store.atomic import Leftover, host_name, leftovers


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


def job(tmp_path: Path, function: Callable[..., object], *arguments: object) -> object:
    report = Job(tmp_path / "report.json", function, *arguments).wait(300)
    assert report is not None and "value" in report, report
    return report["value"]


def all_leftovers(directory: Path) -> list[Leftover]:
    return [*leftovers(directory), *run_leftovers(directory)]


def clean(directory: Path) -> None:
    """Remove leftovers as `hf-trak clean --remove` does."""
    for one in all_leftovers(directory):
        assert one.removable and one.remove()


def names(directory: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in directory.iterdir())


# -- kills ------------------------------------------------------------------------------------------------------------


BEFORE = pytest.mark.parametrize("before", ["nothing", "run", "format 1"])
"""Contents of the directory before the save that is killed."""


@BEFORE
def test_a_killed_save_leaves_a_whole_run_or_none(tmp_path: Path, before: str):
    assert check_killed_saves(tmp_path, before, 10) > 12


@pytest.mark.exhaustive
@BEFORE
def test_a_save_killed_at_any_step_leaves_a_whole_run_or_none(tmp_path: Path, before: str):
    assert check_killed_saves(tmp_path, before, 1) > 40


def check_killed_saves(tmp_path: Path, before: str, stride: int) -> int:
    steps = job(tmp_path, kill_at_steps, before, 1, stride, str(tmp_path / "runs"))
    seen = set()
    for place in sorted((tmp_path / "runs").iterdir()):
        number = None
        try:
            number = whole(AttributionRun.load(place))
        except IncompleteStoreError as error:
            assert before == "nothing" and str(place) in str(error)
        seen.add(number)
        if number is not None:
            assert len(texts_of(place)) <= 1
        # The same save again goes through, and leaves nothing but the run before it.
        build(1).save(place)
        assert whole(AttributionRun.load(place)) == 1
        assert load_from_disk(place / "scored")[:] == build(1).scored[:]
        clean(place)
        assert names(place) == ["parts", "run.json", "scored", "train"]
        assert {finding.state for finding in verify_run(place)} == {"intact"}
    assert seen == ({None, 1} if before == "nothing" else {0, 1})
    assert isinstance(steps, int)
    return steps


def texts_of(directory: Path) -> set[str]:
    """Numbers of the runs whose texts `datasets` reads without hf_trak; none if it finds no files."""
    try:
        return {row["text"].split(" row")[0] for row in load_from_disk(directory / "scored")}
    except FileNotFoundError:
        return set()


def test_saves_killed_at_random_moments_leave_a_whole_run(tmp_path: Path):
    found = job(tmp_path, kill_at_random, 16, 0, str(tmp_path / "run"))
    check_random_kills(found, tmp_path / "run")


@pytest.mark.exhaustive
def test_many_saves_killed_at_random_moments_leave_a_whole_run(tmp_path: Path):
    for seed in range(1, 9):
        found = job(tmp_path, kill_at_random, 50, seed, str(tmp_path / f"run {seed}"))
        check_random_kills(found, tmp_path / f"run {seed}")


def check_random_kills(found: object, directory: Path) -> None:
    assert isinstance(found, list)
    complete = [number for number in found if number is not None]
    assert len(set(complete)) >= 3  # kills came before, in and after saves
    assert complete == sorted(complete)
    assert None not in found[found.index(complete[0]) :], "a complete run was lost"
    build(7).save(directory)
    clean(directory)
    assert names(directory) == ["parts", "run.json", "scored", "train"]
    assert whole(AttributionRun.load(directory)) == 7


def test_a_failed_save_leaves_the_run_before_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build(0).save(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_trak.report.run_record.save_file", fails)
    with pytest.raises(KeyboardInterrupt):
        build(1).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert whole(AttributionRun.load(tmp_path)) == 0


# -- several at once --------------------------------------------------------------------------------------------------


def test_saves_of_several_processes_into_one_directory(tmp_path: Path):
    directory = tmp_path / "run"
    build(0).save(directory)
    jobs = [Job(tmp_path / f"{i}.json", save_many, 1000 * (i + 1), 50, str(directory)) for i in range(4)]
    seen, views = set(), 0
    while any(process.process.exitcode is None for process in jobs):
        seen.add(whole(AttributionRun.load(directory)))
        texts = texts_of(directory)  # none if it was replaced twice while it was read
        assert len(texts) <= 1
        views += len(texts)
    assert [process.wait() for process in jobs] == [{"value": 50}] * 4
    assert len(seen) > 10 and views > 10
    last = whole(AttributionRun.load(directory))
    assert last in (1049, 2049, 3049, 4049)
    assert load_from_disk(directory / "scored")[:] == build(last).scored[:]
    assert len(list(directory.glob("parts-*"))) <= 5  # the last one, the one before it, and at most one per process
    clean(directory)
    assert names(directory) == ["parts", "run.json", "scored", "train"]


def test_a_run_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build(0).save(tmp_path)
    check_file, left = run_reading.check_file, [1, 2, 3]

    def replaced_meanwhile(*arguments: Any) -> None:
        if left:
            build(left.pop(0)).save(tmp_path)
        check_file(*arguments)

    monkeypatch.setattr(run_reading, "check_file", replaced_meanwhile)
    assert whole(AttributionRun.load(tmp_path)) == 2  # its files are still there when the last one is saved
    assert not left


def test_views_show_the_run_that_was_saved_while_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    view_of, left = run_writing.view_of, [2]

    def replaced_meanwhile(*arguments: Any) -> dict[str, bytes]:
        shown = view_of(*arguments)
        if left:
            build(left.pop()).save(tmp_path)
        return shown

    monkeypatch.setattr(run_writing, "view_of", replaced_meanwhile)
    build(1).save(tmp_path)
    assert whole(AttributionRun.load(tmp_path)) == 2
    for name in ("scored", "train"):
        assert load_from_disk(tmp_path / name)[0]["text"].startswith("run 2 ")


def test_a_save_in_progress_is_left_alone(tmp_path: Path):
    key = "0123456789abcdef"
    parts = tmp_path / f"parts-{key}"
    for writer, kept in (
        (f"{host_name()}-{os.getpid()}", True),
        ("another.host-1", True),  # whether it lives cannot be seen
        (f"{host_name()}-{dead_process()}", True),  # in the last hour: it may live in another container
        (None, False),
    ):
        build(0).save(tmp_path)
        parts.mkdir()
        lease = tmp_path / f".hf_trak-tmp-{writer}-{key}"
        if writer is not None:
            lease.mkdir()
        build(1).save(tmp_path)
        assert parts.exists() == lease.exists() == kept, writer
        removable = [one.path for one in all_leftovers(tmp_path) if one.removable]
        dead = str(writer).startswith(host_name()) and not str(writer).endswith(str(os.getpid()))
        assert (parts in removable) == (lease in removable) == dead
        if kept:
            hours_ago = time.time() - 3 * 86400
            os.utime(lease, (hours_ago, hours_ago))
            build(2).save(tmp_path)
            assert parts.exists() == lease.exists() == (not dead)
            removable = [one.path for one in all_leftovers(tmp_path) if one.removable]
            assert (parts in removable) == (lease in removable) == (writer == "another.host-1")
            shutil.rmtree(parts, ignore_errors=True)
            shutil.rmtree(lease, ignore_errors=True)
    parts.mkdir()
    (tmp_path / "run.json").write_text("{")
    assert run_leftovers(tmp_path) == [], "nobody knows what the damaged file named"


def dead_process() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_datasets_in_memory_outlive_the_next_save(tmp_path: Path):
    build(0).save(tmp_path)
    run = AttributionRun.load(tmp_path)
    expected = contents(run)
    build(1).save(tmp_path)
    assert pickle.loads(pickle.dumps(run.scored))[:] == expected["scored"]
    mapped = run.scored.map(lambda row: {"again": row["text"]}, num_proc=2)
    assert mapped["again"][:] == expected["scored"]["text"]
    build(2).save(tmp_path)
    assert contents(run) == expected  # the files are gone, but open
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickle.dumps(run.scored))  # never the rows of another run


def test_a_run_is_saved_over_itself(tmp_path: Path):
    build(0).save(tmp_path)
    for _ in range(3):
        AttributionRun.load(tmp_path).save(tmp_path)
    assert whole(AttributionRun.load(tmp_path)) == 0


# -- damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build(0).save(tmp_path / "run")
    return tmp_path / "run"


def all_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def check_damaged(directory: Path, *files: Path) -> bool:
    """Check that loading names one of the files or gives the run as it was. Returns `True` in the former case."""
    try:
        run = AttributionRun.load(directory)
    except StoreError as error:
        assert any(str(file) in str(error) for file in files), f"{error} names none of {files}"
        return True
    assert whole(run) == 0
    return False


def test_a_changed_byte_is_noticed(saved: Path):
    rng = np.random.default_rng(0)
    noticed = 0
    for path in all_files(saved):
        data = path.read_bytes()
        record = path.name == "run.json"
        for place in range(len(data)) if record else rng.integers(len(data), size=40).tolist():
            changed = bytearray(data)
            changed[place] ^= int(rng.integers(1, 256))
            path.write_bytes(changed)
            found = check_damaged(saved, path)
            assert found or record or path.parent.parent == saved, f"{path} at {place}"  # blanks, and views
            noticed += found
        path.write_bytes(data)
    assert noticed > 1000
    assert not check_damaged(saved)


def test_a_file_that_is_cut_emptied_or_longer_is_noticed(saved: Path):
    for path in all_files(saved):
        data = path.read_bytes()
        for changed in (b"", data[: len(data) // 2], data[:-1], data + b"\0", data + data, data[:-1] + b"}"):
            path.write_bytes(changed)
            found = check_damaged(saved, path)
            # the last byte of `run.json` is a line end; views are not read
            assert found or changed == data or path.name == "run.json" or path.parent.parent == saved
        path.unlink()
        assert check_damaged(saved, path, saved) or path.parent.parent == saved
        path.write_bytes(data)
    assert whole(AttributionRun.load(saved)) == 0


def test_files_that_are_exchanged_are_noticed(saved: Path, tmp_path: Path):
    other = tmp_path / "other"
    build(1).save(other)
    (parts,), (others,) = saved.glob("parts-*"), other.glob("parts-*")
    files = all_files(parts)
    for first in files:
        for second in [*files, *all_files(others)]:
            data = first.read_bytes()
            if second.read_bytes() == data:
                continue
            shutil.copyfile(second, first)
            assert check_damaged(saved, first)
            first.write_bytes(data)
    for name in ("scored", "train"):  # directories
        (parts / name).rename(tmp_path / "aside")
        shutil.copytree(others / name, parts / name)
        assert check_damaged(saved, *all_files(parts / name))
        shutil.rmtree(parts / name)
        assert check_damaged(saved, *(parts / name / file.name for file in all_files(tmp_path / "aside")))
        (tmp_path / "aside").rename(parts / name)
    shutil.copyfile(other / "run.json", saved / "run.json")
    assert check_damaged(saved, *(saved / others.name / file.relative_to(others) for file in all_files(others)))


def test_parts_of_another_run_under_this_ones_name_are_noticed(saved: Path, tmp_path: Path):
    other = tmp_path / "other"
    build(1).save(other)
    (parts,), (others,) = saved.glob("parts-*"), other.glob("parts-*")
    shutil.rmtree(parts)
    with pytest.raises(IncompleteStoreError, match="is missing"):
        AttributionRun.load(saved)
    shutil.copytree(others, parts)
    assert check_damaged(saved, *all_files(parts))


def test_a_run_that_has_lost_its_record_is_no_pair_of_datasets(saved: Path):
    (saved / "run.json").unlink()
    with pytest.raises(IncompleteStoreError, match=r"lacks run.json.*interrupted"):
        AttributionRun.load(saved)
    for name in ("scored", "train"):  # not even if the datasets are put where two datasets would be
        shutil.rmtree(saved / name)
        shutil.copytree(next(saved.glob(f"parts-*/{name}")), saved / name)
    with pytest.raises(IncompleteStoreError, match=r"lacks run.json.*interrupted"):
        AttributionRun.load(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parts", None), ("parts", "../other"), ("parts", "parts-1"), ("previous", 3), ("files", []), ("facts", None),
        ("files", {"../train/x": {"bytes": 1, "xxh3_128": "0"}}), ("files", {"scored/a": {"bytes": "1"}}),
        ("files", {"/etc/passwd": {"bytes": 1, "xxh3_128": "0"}}), ("files", {"scored/..": {}}),
    ],
)  # fmt: skip
def test_a_record_with_other_values_is_refused_whatever_its_checksum(saved: Path, name: str, value: object):
    from hf_trak.store.sealed import sealed_bytes, unsealed

    content = {**unsealed(json.loads((saved / "run.json").read_text())), name: value}
    (saved / "run.json").write_bytes(sealed_bytes(content))
    with pytest.raises(StoreError, match=r"run\.json does not say"):
        AttributionRun.load(saved)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "1e999", '{"format_version": 2, "facts": NaN}', "[" * 100_000, '{"a":' * 100_000, "\xff", "",
     '{"format_version": true}', '{"format_version": 2, "a": ' + "9" * 5000 + "}", '{"format_version": 1}'],
)  # fmt: skip
def test_a_record_that_is_no_record(saved: Path, text: str):
    (saved / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"run\.json "):
        AttributionRun.load(saved)


def test_a_record_of_enormous_size_is_not_read(saved: Path):
    with (saved / "run.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="Expected at most 16,777,216"):
        AttributionRun.load(saved)


def test_training_rows_that_are_given_are_shown_and_kept_ones_are_not_read(saved: Path):
    for path in saved.glob("parts-*/train/*"):
        path.write_bytes(b"")
    run = AttributionRun.load(saved, build(0).train)
    assert whole(run) == 0
    with pytest.raises(ValueError, match=rf"has 5 rows; the run is about {N_TRAIN}"):
        AttributionRun.load(saved, build(0).train.select(range(5)))


# -- parts that do not fit --------------------------------------------------------------------------------------------


def replaced(column: str, change: Callable[[list], object]) -> AttributionRun:
    """Make run 0 with another value in the second target."""
    run = build(0)
    values = run.scored[column][:]
    change(values[1])
    scored = run.scored.remove_columns([column]).add_column(column, values)
    return AttributionRun(scored, run.train, None, run.self_influence, run.distributions, run.facts)


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("trak_scores", lambda v: v.__setitem__(0, float("nan")), "target 1: the score nan is not finite"),
        ("trak_scores", lambda v: v.__setitem__(0, float("inf")), "target 1: the score inf is not finite"),
        ("trak_scores", lambda v: v.reverse(), r"out of order; scores go from the highest"),
        ("trak_harmful_scores", lambda v: v.reverse(), r"out of order; scores go from the lowest"),
        ("trak_indices", lambda v: v.__setitem__(2, 40), "target 1: .* names the training row 40; there are"),
        ("trak_harmful_indices", lambda v: v.__setitem__(0, -1), "target 1: .* names the training row -1"),
        ("trak_indices", lambda v: v.__setitem__(1, v[0]), r"names the training row \d+ twice"),
        ("trak_indices", lambda v: v.pop(), "`trak_indices` and `trak_scores` have different lengths"),
    ],
)  # fmt: skip
def test_scores_that_cannot_be_right(tmp_path: Path, column: str, change: Callable[[list], object], message: str):
    run = replaced(column, change)
    with pytest.raises(ValueError, match=message):
        run.save(tmp_path / "new")
    save_format_1(run, tmp_path / "old")
    with pytest.raises(StoreError, match=rf"old/scored does not fit.*{message}"):
        AttributionRun.load(tmp_path / "old")
    run.scored.save_to_disk(tmp_path / "two" / "scored")
    run.train.save_to_disk(tmp_path / "two" / "train")
    with pytest.raises(StoreError, match=rf"two/scored does not fit.*{message}"):
        AttributionRun.load(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train_rows", lambda t: t.flip(0), "`train_rows` is not ascending"),
        ("train_rows", lambda t: t[:-1], r"names \d+ training rows; the run has \d+"),
        ("train_rows", lambda t: t + 30, "names the training row"),
        ("train_rows", lambda t: t.float(), "`train_rows` has dtype float32"),
        ("self_influence", lambda t: t[:-1], "disagree about the number of training rows"),
        ("self_influence", lambda t: t * float("nan"), "`self_influence` has values that are not finite"),
        ("counts", lambda t: t[:-1], "`counts` is about 2 targets; there are 3"),
        ("counts", lambda t: t + 1, "disagree about the number"),
        ("counts", lambda t: -t, "does not count the same"),
        ("counts", lambda t: t[:, :-1], "has 41 bins; expected 42"),
        ("width", lambda t: t * 0, "`width` or `std`"),
        ("positive", lambda t: t + 2, "`positive` is no fraction between 0 and 1"),
        ("mean", None, "of the distributions it has only .*; expected"),
        ("train_rows", None, "disagree about the number of training rows"),
    ],
)  # fmt: skip
def test_statistics_that_cannot_be_right(tmp_path: Path, name: str, change: Callable | None, message: str):
    from safetensors.torch import load_file, save_file

    save_format_1(build(0), tmp_path)
    tensors = load_file(tmp_path / "statistics.safetensors")
    value = tensors.pop(name)
    if change is not None:
        tensors[name] = change(value).contiguous()
    save_file(tensors, tmp_path / "statistics.safetensors")
    with pytest.raises(StoreError, match=message):
        AttributionRun.load(tmp_path)
    save_file({**tensors, "train_rowz": value.clone()}, tmp_path / "statistics.safetensors")
    with pytest.raises(StoreError, match=r"statistics.safetensors does not fit.*\['train_rowz'\]"):
        AttributionRun.load(tmp_path)


# -- runs of other formats --------------------------------------------------------------------------------------------


def test_a_run_of_the_version_before_is_read_and_said_to_have_no_checksums(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_format_1(build(0), tmp_path)
    for _ in range(2):
        assert whole(AttributionRun.load(tmp_path)) == 0
    messages = [record.message for record in caplog.records]
    assert len(messages) == 1 and "without checksums" in messages[0] and "Attribute again" in messages[0]
    AttributionRun.load(tmp_path).save(tmp_path)
    assert whole(AttributionRun.load(tmp_path)) == 0
    assert names(tmp_path) == ["parts", "run.json", "scored", "train"]
    assert {finding.state for finding in verify_run(tmp_path)} == {"intact"}


def test_two_datasets_have_no_checksums_and_need_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    build(0).scored.save_to_disk(tmp_path / "scored")
    build(0).train.save_to_disk(tmp_path / "train")
    run = AttributionRun.load(tmp_path)
    assert run.scored[:] == build(0).scored[:] and run.n_train == N_TRAIN
    assert not caplog.records
    build(0).train.select(range(20)).save_to_disk(tmp_path / "few")
    shutil.rmtree(tmp_path / "train")
    (tmp_path / "few").rename(tmp_path / "train")
    with pytest.raises(StoreError, match=r"names the training row .*; there are 20"):
        AttributionRun.load(tmp_path)


@pytest.mark.parametrize("left", ["statistics.safetensors", ".hf_trak-tmp-host-1-0123456789abcdef", ".scored.old"])
def test_a_save_of_the_version_before_that_was_killed_is_no_pair_of_datasets(tmp_path: Path, left: str):
    save_format_1(build(0), tmp_path)
    (tmp_path / "run.json").unlink()
    if left != "statistics.safetensors":
        (tmp_path / "statistics.safetensors").rename(tmp_path / left)
    with pytest.raises(IncompleteStoreError, match=r"lacks run.json.*interrupted"):
        AttributionRun.load(tmp_path)


@pytest.mark.parametrize("layout", ["format 1", "two datasets"])
def test_damaged_files_without_checksums_give_errors_that_name_them(tmp_path: Path, layout: str):
    """Changed values cannot be noticed, but no error other than `StoreError` is raised."""
    save_format_1(build(0), tmp_path)
    if layout == "two datasets":
        for name in ("run.json", "statistics.safetensors"):
            (tmp_path / name).unlink()
        shutil.rmtree(tmp_path / "train")
        build(0).train.save_to_disk(tmp_path / "train")
    rng = np.random.default_rng(1)
    refused = 0
    for path in all_files(tmp_path):
        data = path.read_bytes()
        changes = [b"", data[: len(data) // 2], b"{}", b"[]", b"null", b"\xff" * len(data)]
        for place in rng.integers(len(data), size=25).tolist():
            changes.append(data[:place] + bytes([int(rng.integers(256))]) + data[place + 1 :])
        for changed in changes:
            path.write_bytes(changed)
            try:
                run = AttributionRun.load(tmp_path)
                for row in [*run.scored, *run.train]:  # every value can be read
                    assert row
            except StoreError as error:
                assert str(tmp_path) in str(error)
                refused += 1
        path.unlink()
        with pytest.raises(StoreError, match=str(tmp_path)):
            AttributionRun.load(tmp_path)
        path.write_bytes(data)
    assert refused > 50


# -- what is found by a check of every byte ---------------------------------------------------------------------------


def states(directory: Path) -> dict[str, str]:
    return dict(findings(directory))


def findings(directory: Path) -> Iterator[tuple[str, str]]:
    for finding in verify_run(directory):
        assert finding.state == "intact" or (finding.detail and finding.remedy)
        yield str(finding.path.relative_to(directory)), finding.state


def test_every_file_has_a_finding(saved: Path):
    assert set(states(saved)) == {str(path.relative_to(saved)) for path in all_files(saved)}
    assert set(states(saved).values()) == {"intact"}
    for path in all_files(saved):
        name, data = str(path.relative_to(saved)), path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        found = states(saved)
        assert found[name] == "damaged", name
        if name == "run.json":
            assert {state for key, state in found.items() if key != name} == {"unchecked"}
        path.unlink()
        assert states(saved)[name] == "missing"
        path.write_bytes(data)
    assert set(states(saved).values()) == {"intact"}


def test_leftovers_and_files_without_checksums_are_found(tmp_path: Path):
    build(0).save(tmp_path / "run")
    (old,) = (tmp_path / "run").glob("parts-*")
    build(1).save(tmp_path / "run")
    found = states(tmp_path / "run")
    left = {name for name, state in found.items() if state == "leftover"}
    assert left == {old.name}
    clean(tmp_path / "run")
    assert not old.exists()
    assert "leftover" not in states(tmp_path / "run").values()
    save_format_1(build(0), tmp_path / "old")
    assert set(states(tmp_path / "old").values()) == {"unchecked"}
    (tmp_path / "old" / "train" / "state.json").write_text("{}")
    assert states(tmp_path / "old")["."] == "damaged"
    assert dict(findings(tmp_path / "nothing")) == {".": "damaged"}


# -- errors of the system ---------------------------------------------------------------------------------------------


def with_file_limit(limit: int, directory: str) -> None:
    """Save a run while no file may grow beyond `limit` bytes, as under a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        AttributionRun(build(1).scored, None, None, np.arange(5000.0)).save(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("limit", "file"),
    [(0, r"parts-\w+/scored/data-00000-of-00001.arrow"), (3000, r"parts-\w+/statistics.safetensors")],
)
def test_a_file_that_cannot_be_written_is_named_with_the_space_that_is_free(tmp_path: Path, limit: int, file: str):
    build(0).save(tmp_path / "run")
    report = Job(tmp_path / "report.json", with_file_limit, limit, str(tmp_path / "run")).wait()
    assert report is not None and "error" in report, report
    assert re.search(
        rf"StoreError: .*/run/\.hf_trak-tmp-[^/]+/{file} cannot be written: .*File too large", report["error"]
    ), report
    assert "MiB are free there" in report["error"] and "run the same command again" in report["error"]
    assert whole(AttributionRun.load(tmp_path / "run")) == 0
    assert len(list((tmp_path / "run").glob("parts-*"))) == 1


def test_a_directory_that_is_a_file(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StoreError, match="run cannot be written"):
        build(0).save(tmp_path / "run")
    with pytest.raises(IncompleteStoreError, match="holds no run"):
        AttributionRun.load(tmp_path / "run")


def test_facts_that_are_no_json_become_text_or_are_refused(tmp_path: Path):
    facts = {"b": Path("/x"), "a": float("nan"), "c": {"z": 1, "y": [float("inf"), 2**70]}, "train_rows": N_TRAIN}
    run = build(0)
    AttributionRun(run.scored, run.train, None, None, None, facts).save(tmp_path)
    loaded = AttributionRun.load(tmp_path).facts
    assert loaded == {"b": "/x", "a": "NaN", "c": {"z": 1, "y": ["Infinity", 2**70]}, "train_rows": N_TRAIN}
    assert list(loaded) == ["train_rows", "b", "a", "c"] and list(loaded["c"]) == ["z", "y"]  # the order of the page
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    circle: list = []
    circle.append(circle)
    for bad in (deep, circle, {(1, 2): 3}):
        with pytest.raises(ValueError, match="The fact 'bad' cannot be saved as JSON"):
            AttributionRun(run.scored, run.train, facts={"bad": bad}).save(tmp_path)
    assert AttributionRun.load(tmp_path).facts == loaded
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 50, 25):  # what is saved can be read
        try:
            AttributionRun(run.scored, run.train, facts={"deep": json.loads("[" * depth + "]" * depth)}).save(tmp_path)
        except (ValueError, RecursionError):
            break
        AttributionRun.load(tmp_path)
