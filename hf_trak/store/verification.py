"""One verifier for everything that hf_trak writes: `hf-trak inspect --check`.

Every file says what it is: sealed JSON has a checksum, and a shard has a checksum and an identity. [`verify`] walks
through a directory. Files that a record describes (a store's configuration, a curvature, a run) are checked against
that record by a function of the package that writes it, and all others by themselves.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.atomic import leftovers
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.sealed import MANIFEST_FILE, Finding, judged, read_sealed
from hf_trak.store.shards import check_file
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import GRAM_FILE, FeatureStore

RecordCheck = Callable[[Path], Iterable[Finding]]

"""`(directory) -> findings` of the files that the record of this directory describes."""

_FEATURIZE = "`featurize` with the same arguments computes it."
_FEATURIZE_AGAIN = "Featurize the same checkpoint under this id again; finished shards stay."
_ATTRIBUTE = "`attribute` with the same targets computes it."

REMEDIES = {
    "*/checkpoint-*": f"Delete it; then: {_FEATURIZE}",
    "*/experiments/*": "Delete it; the same call of `attribute` computes it again.",
    "*/curvature/*": "Delete it; the same call of `attribute` or `fit_curvature` computes it again.",
    "*/train_rows.safetensors": "Delete it; publishing the index again computes it.",
    "*/calibration.json": "Delete it; `calibrate` computes it again.",
    "*/batch_size.json": "Delete it; the next run writes it anew.",
    "*/featurize.json": "Delete it; the next run writes it anew.",
}
"""By pattern of the path, what to do about a damaged file that no record describes."""


def verify(directory: Path, records: Mapping[str, RecordCheck]) -> Iterator[Finding]:
    """Check every file that hf_trak wrote to a directory.

    Args:
        directory: the directory.
        records: by the pattern of records below the directory, such as `"scores/*/run.json"`, what checks the
            directory of one. [`verify_store`] is that for `"**/trak_config.json"`.

    Returns:
        An iterator of one finding for each file, missing ones included.

    Raises:
        IncompleteStoreError: hf_trak wrote nothing here.
    """
    found = [(check, path.parent) for pattern, check in records.items() for path in sorted(directory.glob(pattern))]
    if not found:
        raise IncompleteStoreError(
            f"{str(directory)!r} holds nothing that hf_trak wrote. Expected the output directory of a run, an index, "
            "a report run, a `save_dir` of TRAKer, retrainings, or a bank. Name one of those."
        )
    return _verified(directory, dict.fromkeys(found))


def _verified(directory: Path, checks: Iterable[tuple[RecordCheck, Path]]) -> Iterator[Finding]:
    seen: set[Path] = set()
    for check, described in checks:
        for finding in check(described):
            if finding.path not in seen:
                yield finding
            seen.add(finding.path)
    others = {*directory.rglob("*.json"), *directory.rglob("*.safetensors")} - seen
    for path in sorted(others - {*directory.glob("ensemble/*/*/*")}):  # those are the trainer's
        name = f"/{path.relative_to(directory).as_posix()}"
        remedy = next((text for pattern, text in REMEDIES.items() if fnmatch.fnmatch(name, pattern)), None)
        if remedy is not None:
            yield alone(path, remedy)
    for one in leftovers(directory):
        if one.path not in seen:
            yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak inspect --clean` removes it.")


def alone(path: Path, remedy: str) -> Finding:
    """Check a file by its own checksum. The arguments are those of [`judged`]."""
    return judged(path, lambda: (read_sealed if path.suffix == ".json" else check_file)(path), remedy)


def verify_store(directory: Path) -> Iterator[Finding]:
    """Check what the configuration of a store describes: its checkpoints and the targets of its experiments.

    Args:
        directory: directory of the store.

    Returns:
        An iterator of one finding for each file, missing ones included.
    """
    path = directory / FeatureStore.CONFIG_FILE
    finding = judged(path, lambda: FeatureStore.load(directory), "Restore it, or featurize into another directory.")
    yield finding
    if finding.state != "intact":
        return  # without the configuration nothing else can be judged
    store = FeatureStore.load(directory)
    if "revision_of" in store.config:
        return  # it looks at the features of the original store
    names = {path.name.removesuffix(".json").removeprefix("checkpoint-") for path in directory.glob("checkpoint-*")}
    checkpoints = sorted(int(name) for name in names if name.isdecimal() and len(name) < 19)
    featurized = any(directory.glob("checkpoint-*/train-*")) or not _has_answers(directory)
    published = None
    if (manifest := directory / MANIFEST_FILE).exists():
        finding = judged(manifest, lambda: read_sealed(manifest), "Copy the index again.")
        yield finding
        if finding.state != "intact":
            return
        published = frozenset(read_sealed(manifest).get("files", ()))
    for model_id in checkpoints:
        yield from _checkpoint(store, model_id, featurized, published)
    for place in sorted(path for path in directory.glob("experiments/*") if path.is_dir()):
        if featurized or (place / "experiment.json").exists():
            yield from _experiment(store, place, checkpoints)


def _has_answers(directory: Path) -> bool:
    """Tell whether a store has answers from whole gradients, which take no features: none are missing then."""
    return any(any(directory.glob(f"experiments/*/{kind}-*")) for kind in ("exact", "replay"))


def _checkpoint(
    store: FeatureStore, model_id: int, featurized: bool, published: frozenset[str] | None
) -> Iterator[Finding]:
    """Check a checkpoint of a store, or of a copy of a published index with the files that its manifest lists."""
    directory = store.checkpoint_dir(model_id)
    record, member = directory / "checkpoint.json", store.output_dir / f"{directory.name}.json"
    listed = judged(member, lambda: read_sealed(member), f"Delete it, if it is there. {_FEATURIZE_AGAIN}")
    if member.exists() or published is None:
        yield listed
    if listed.state == "damaged":
        yield alone(record, _FEATURIZE_AGAIN)
        return
    known = judged(record, lambda: store.checkpoint_info(model_id), f"Restore it, or delete it. {_FEATURIZE_AGAIN}")
    yield known
    if known.state != "intact" or not featurized:
        return
    shards = list(store.train(model_id).findings(_FEATURIZE))
    yield from shards
    if (directory / REFERENCES_FILE).exists():
        # the features were computed with these references, and would not fit newly computed ones
        remedy = "Restore it, or featurize this checkpoint anew."
        yield judged(directory / REFERENCES_FILE, lambda: read_references(store, model_id), remedy)
    whole = all(one.state == "intact" for one in shards)
    solvers = list(SolverFiles(store, model_id).findings(whole))
    yield from solvers
    gram = directory / GRAM_FILE
    if gram.exists() and not whole:  # its identity covers the rows that it sums over
        yield Finding(gram, "unchecked", "features that it was computed from are damaged or missing", _FEATURIZE)
    elif gram.exists():
        yield judged(gram, lambda: store.read_gram(model_id), f"Delete it; then: {_FEATURIZE}")
    elif not solvers and (published is None or gram.relative_to(store.output_dir).as_posix() in published):
        yield Finding(gram, "missing", "XᵀX of this checkpoint is not computed", _FEATURIZE)


def _experiment(store: FeatureStore, directory: Path, checkpoints: list[int]) -> Iterator[Finding]:
    path, name = directory / "experiment.json", directory.name
    finding = judged(path, lambda: store.experiment_info(name), f"Delete the directory; then: {_ATTRIBUTE}")
    yield finding
    if finding.state != "intact":
        return
    for model_id in checkpoints:
        place = directory / f"checkpoint-{model_id}"
        if place.is_dir():
            try:
                yield from store.saved_targets(name, model_id).findings(_ATTRIBUTE)
            except StoreError as error:
                yield Finding(place, "unchecked", str(error))
