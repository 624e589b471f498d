"""Runs that are killed while being saved, replaced or damaged: loading gives a whole run or names the file."""

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
from threading import Thread
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
    save_many,
    save_unchecked,
    whole,
)
from safetensors.numpy import load_file
from store_jobs import Job

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report import AttributionRun, run_record, verify_run
from hf_trak.store import atomic
from hf_trak.store.atomic import host_name, leftovers


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


def job(tmp_path: Path, function: Callable[..., object], *arguments: object) -> object:
    report = Job(tmp_path / "report.json", function, *arguments).wait(300)
    assert report is not None and "value" in report, report
    return report["value"]


def clean(directory: Path) -> None:
    """Remove leftovers as `hf-trak inspect --clean` does."""
    for one in leftovers(directory):
        assert one.removable and one.remove()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- kills ------------------------------------------------------------------------------------------------------------


BEFORE = pytest.mark.parametrize("before", ["nothing", "run"])
"""Contents of the directory before the save that is killed."""


@pytest.mark.slow
@BEFORE
def test_a_killed_save_leaves_a_whole_run_or_none(tmp_path: Path, before: str):
    assert check_killed_saves(tmp_path, before, 4) > 12


@pytest.mark.exhaustive
@BEFORE
def test_a_save_killed_at_any_step_leaves_a_whole_run_or_none(tmp_path: Path, before: str):
    assert check_killed_saves(tmp_path, before, 1) >= 40


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
        assert texts_of(place) == (set() if number is None else {f"run {number}"})
        # The same save again goes through, and leaves nothing but the run before it.
        build(1).save(place)
        assert whole(AttributionRun.load(place)) == 1
        assert load_from_disk(place / "run" / "scored")[:] == build(1).scored[:]
        clean(place)
        assert names(place) == ["run"]
        assert names(place / "run") == ["run.json", "scored", "statistics.safetensors", "train"]
        assert {finding.state for finding in verify_run(place)} == {"intact"}
    assert seen == ({None, 1} if before == "nothing" else {0, 1})
    assert isinstance(steps, int)
    return steps


def texts_of(directory: Path) -> set[str]:
    """Numbers of the runs whose texts `datasets` reads without hf_trak; none if it finds no files."""
    try:
        return {row["text"].split(" row")[0] for row in load_from_disk(directory / "run" / "scored")}
    except FileNotFoundError:
        return set()


@pytest.mark.slow
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
    assert names(directory) == ["run"]
    assert whole(AttributionRun.load(directory)) == 7


def test_a_failed_save_leaves_the_run_before_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build(0).save(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_trak.report.run_record.safetensors.numpy.save", fails)
    with pytest.raises(KeyboardInterrupt):
        build(1).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert whole(AttributionRun.load(tmp_path)) == 0


# -- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    assert load_from_disk(directory / "run" / "scored")[:] == build(last).scored[:]
    clean(directory)
    assert names(directory) == ["run"]


@pytest.mark.few(2)
@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "moved"])
@pytest.mark.parametrize("step", ["_check_file", "load_file", "_dataset"])
def test_a_run_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, exchange: bool
):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchanged", lambda *_: False)
    build(0).save(tmp_path)
    original, left = getattr(run_record, step), [1, 2, 3]

    def replaced_meanwhile(*arguments: Any) -> Any:
        if left:
            build(left.pop(0)).save(tmp_path)
        return original(*arguments)

    monkeypatch.setattr(run_record, step, replaced_meanwhile)
    assert whole(AttributionRun.load(tmp_path)) == 3
    assert not left


def test_a_save_moves_what_it_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On systems that cannot exchange directories, readers wait for the instant in which neither run is there."""
    monkeypatch.setattr(atomic, "_exchanged", lambda *_: False)
    build(0).save(tmp_path)
    moved, absent = atomic._moved, []

    def slowly(directory: Path, place: Path) -> bool:
        if not place.exists():
            absent.append(Thread(target=lambda: (time.sleep(0.1), moved(directory, place))))
            absent[0].start()
            found.append(whole(AttributionRun.load(tmp_path)))
            absent[0].join()
            return True
        return moved(directory, place)

    found: list[int] = []
    monkeypatch.setattr(atomic, "_moved", slowly)
    build(1).save(tmp_path)
    assert found == [1] and names(tmp_path) == ["run"]


def test_files_of_others_stay(tmp_path: Path):
    (tmp_path / "report.html").write_text("report")
    for number in (0, 1):
        build(number).save(tmp_path)
    assert names(tmp_path) == ["report.html", "run"]


def test_a_save_in_progress_is_left_alone(tmp_path: Path):
    """Temporary directories are removed by a later save only if their writer is dead, and has been for an hour."""
    key = "0123456789abcdef"
    for writer, removable, hours in (
        (f"{host_name()}-{os.getpid()}", False, 72),
        ("another.host-1", False, 1),  # whether it lives cannot be seen
        (f"{host_name()}-{dead_process()}", True, 0.5),  # in the last hour: it may live in another container
    ):
        place = tmp_path / f".hf_trak-tmp-{writer}-{key}"
        (place / "written").mkdir(parents=True)
        os.utime(place / "written", (time.time() - 3600 * hours,) * 2)
        os.utime(place, (time.time() - 3600 * hours,) * 2)
        build(0).save(tmp_path)
        assert [(one.path, one.removable) for one in leftovers(tmp_path)] == [(place, removable)]
        shutil.rmtree(place)
    place = tmp_path / f".hf_trak-tmp-{host_name()}-{dead_process()}-{key}"
    place.mkdir()
    os.utime(place, (time.time() - 3 * 86400,) * 2)
    build(1).save(tmp_path)
    assert not place.exists()


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
    assert pickle.loads(pickle.dumps(run.scored))[:] == expected["scored"]
    mapped = run.scored.map(lambda row: {"again": row["text"]}, num_proc=2, load_from_cache_file=False)
    assert mapped["again"][:] == expected["scored"]["text"]
    pickled = pickle.dumps(run.scored)
    build(1).save(tmp_path)
    assert contents(run) == expected  # the files are gone, but open
    with pytest.raises(FileNotFoundError):
        pickle.loads(pickled)  # never the rows of another run


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


@pytest.mark.slow
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
    root, others = saved / "run", other / "run"
    files = [path for path in all_files(root) if path.name != "run.json"]
    for first in files:
        for second in [*files, *all_files(others)]:
            data = first.read_bytes()
            if second.read_bytes() == data:
                continue
            shutil.copyfile(second, first)
            assert check_damaged(saved, first)
            first.write_bytes(data)
    for name in ("scored", "train"):  # directories
        (root / name).rename(tmp_path / "aside")
        missing = [root / name / file.name for file in all_files(tmp_path / "aside")]
        shutil.copytree(others / name, root / name)
        assert check_damaged(saved, *all_files(root / name), *missing)
        shutil.rmtree(root / name)
        assert check_damaged(saved, *missing)
        (tmp_path / "aside").rename(root / name)
    shutil.copyfile(others / "run.json", root / "run.json")
    assert check_damaged(saved, *(root / file.relative_to(others) for file in all_files(others)))


def test_a_run_that_has_lost_its_record_is_none(saved: Path):
    (saved / "run" / "run.json").unlink()
    with pytest.raises(IncompleteStoreError, match=r"run.json is missing"):
        AttributionRun.load(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save", None), ("files", []), ("files", {"scored/a": 3}), ("facts", None), ("facts", []),
        ("files", {"../train/x": [1, "0"]}), ("files", {"scored/a": ["1", "0"]}), ("files", {"scored/a": [True, "0"]}),
        ("files", {"/etc/passwd": [1, "0"]}), ("files", {"scored/..": [1, "0"]}), ("files", {"run.json": [1, "0"]}),
    ],
)  # fmt: skip
def test_a_record_with_other_values_is_refused_whatever_its_checksum(saved: Path, name: str, value: object):
    from hf_trak.store.sealed import sealed_bytes

    content = {**json.loads((saved / "run" / "run.json").read_text()), name: value}
    (saved / "run" / "run.json").write_bytes(sealed_bytes(content))
    with pytest.raises(StoreError, match=r"run\.json does not say"):
        AttributionRun.load(saved)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "1e999", '{"format_version": 1, "facts": NaN}', "[" * 100_000, '{"a":' * 100_000, "\xff", "",
     '{"format_version": true}', '{"format_version": 1, "a": ' + "9" * 5000 + "}", '{"format_version": 1}', "{}",
     '{"format_version": 2}'],
)  # fmt: skip
def test_a_record_that_is_no_record(saved: Path, text: str):
    (saved / "run" / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"run\.json "):
        AttributionRun.load(saved)


def test_a_record_of_enormous_size_is_not_read(saved: Path):
    with (saved / "run" / "run.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="Expected at most 16,777,216"):
        AttributionRun.load(saved)


def test_training_rows_that_are_given_are_shown_and_kept_ones_are_not_read(saved: Path):
    for path in saved.glob("run/train/*"):
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
        ("trak_indices", lambda v: v.__setitem__(2, 40), "target 1: .* names the training row 40; there are"),
        ("trak_harmful_indices", lambda v: v.__setitem__(0, -1), "target 1: .* names the training row -1"),
        ("trak_indices", lambda v: v.pop(), "`trak_indices` and `trak_scores` have different lengths"),
    ],
)  # fmt: skip
def test_scores_that_cannot_be_right(tmp_path: Path, column: str, change: Callable[[list], object], message: str):
    run = replaced(column, change)
    with pytest.raises(ValueError, match=message):
        run.save(tmp_path / "new")
    save_unchecked(run, tmp_path)
    with pytest.raises(StoreError, match=rf"run/scored does not fit.*{message}"):
        AttributionRun.load(tmp_path)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train_rows", lambda t: t[::-1], "`train_rows` is not ascending"),
        ("train_rows", lambda t: t[:-1], r"names \d+ training rows; the run has \d+"),
        ("train_rows", lambda t: t + 30, "names the training row"),
        ("train_rows", lambda t: t.astype(np.float32), "`train_rows` has dtype float32"),
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
    build(0).save(tmp_path)
    value = load_file(tmp_path / "run" / "statistics.safetensors")[name]
    save_unchecked(build(0), tmp_path, **{name: None if change is None else change(value)})
    with pytest.raises(StoreError, match=message):
        AttributionRun.load(tmp_path)
    save_unchecked(build(0), tmp_path, train_rowz=value)
    with pytest.raises(StoreError, match=r"statistics.safetensors does not fit.*\['train_rowz'\]"):
        AttributionRun.load(tmp_path)


# -- what is found by a check of every byte ---------------------------------------------------------------------------


def states(directory: Path) -> dict[str, str]:
    found = {}
    for finding in verify_run(directory):
        assert finding.state == "intact" or (finding.detail and finding.remedy)
        found[str(finding.path.relative_to(directory))] = finding.state
    return found


def test_every_file_has_a_finding(saved: Path):
    assert set(states(saved)) == {str(path.relative_to(saved)) for path in all_files(saved)}
    assert set(states(saved).values()) == {"intact"}
    for path in all_files(saved):
        name, data = str(path.relative_to(saved)), path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        found = states(saved)
        assert found[name] == "damaged", name
        assert len(found) == (1 if path.name == "run.json" else len(all_files(saved)))
        path.unlink()
        assert states(saved)[name] == "missing"
        path.write_bytes(data)
    assert set(states(saved).values()) == {"intact"}


def test_files_that_are_not_of_the_run_and_parts_that_do_not_fit_are_found(saved: Path):
    (saved / "run" / "scored" / "cache-1.arrow").write_text("")
    assert {name for name, state in states(saved).items() if state != "intact"} == {"run/scored/cache-1.arrow"}
    assert states(saved)["run/scored/cache-1.arrow"] == "leftover"
    save_unchecked(build(0), saved, train_rows=None)
    assert states(saved)["run"] == "damaged"


# -- errors of the system ---------------------------------------------------------------------------------------------


def with_file_limit(limit: int, directory: str) -> None:
    """Save a run while no file may grow beyond `limit` bytes, as under a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        AttributionRun(build(1).scored, None, None, np.arange(5000.0)).save(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [3000, 0])
def test_a_run_that_cannot_be_written_is_named_with_the_space_that_is_free(tmp_path: Path, limit: int):
    build(0).save(tmp_path / "run")
    report = Job(tmp_path / "report.json", with_file_limit, limit, str(tmp_path / "run")).wait()
    assert report is not None and "error" in report, report
    assert re.search(r"StoreError: .*/run/run cannot be written: .*File too large", report["error"]), report
    assert "MiB are free there" in report["error"] and "run the same command again" in report["error"]
    assert whole(AttributionRun.load(tmp_path / "run")) == 0
    assert names(tmp_path / "run") == ["run"]


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
