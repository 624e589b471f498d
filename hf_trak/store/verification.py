"""Verification of a feature store: every file is read and compared with its checksum (`hf-trak verify-store`)."""

from collections.abc import Iterator
from pathlib import Path

from hf_trak.errors import HfTrakError, IncompleteStoreError, StoreError
from hf_trak.store.atomic import leftovers
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.references import read_references
from hf_trak.store.sealed import is_sealed, read_sealed
from hf_trak.store.shards import Finding, check_file
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import GRAM_FILE, FeatureStore

_FEATURIZE = "`featurize` with the same arguments computes it."
_ATTRIBUTE = "`attribute` with the same targets computes it."
_EXACTLY = "the same call with `exact=True` or `rerank` computes it again."
_EXACT = (
    "experiments/*/exact-*/**/*.safetensors",
    "experiments/*/shortlist-*.safetensors",
    "curvature/*/*-*/*.safetensors",
    "train_rows.safetensors",
)
"""Where preconditioned targets and exact scores are, shortlists, self-influence and whitened features of the hybrid,
and digests of training rows."""


def verify_store(output_dir: Path) -> Iterator[Finding]:
    """Check a store, file by file.

    Args:
        output_dir: its directory.

    Returns:
        An iterator of one finding per file of the store, missing ones included. Reports of runs, files of results and
        revisions are not checked.

    Raises:
        IncompleteStoreError: there is no store in this directory.
    """
    path = output_dir / FeatureStore.CONFIG_FILE
    try:
        store = FeatureStore.load(output_dir)
    except IncompleteStoreError:
        raise
    except StoreError as error:
        # without the configuration nothing else can be judged
        yield Finding(path, "damaged", str(error), "Restore it from a copy, or featurize into another directory.")
        return
    yield _json(path, "")
    checkpoints = _checkpoint_ids(output_dir)
    for model_id in checkpoints:
        yield from _checkpoint(store, model_id)
    for experiment in sorted(path.name for path in output_dir.glob("experiments/*") if path.is_dir()):
        yield from _experiment(store, experiment, checkpoints)
    for pattern in _EXACT:
        yield from _by_themselves(sorted(output_dir.glob(pattern)))
    for name in ("batch_size.json", "featurize.json"):
        if (output_dir / name).exists():
            yield _json(output_dir / name, "Delete it; the next run writes it anew.")
    for one in leftovers(output_dir):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak clean` removes it.")


def _by_themselves(paths: list[Path]) -> Iterator[Finding]:
    """Check files that say of themselves what they hold, and that are computed again where they are missing."""
    for path in paths:
        try:
            check_file(path)
        except StoreError as error:
            yield Finding(path, "damaged", str(error), f"Delete it; then: {_EXACTLY}")
        else:
            yield Finding(path, "intact")


def _checkpoint_ids(output_dir: Path) -> list[int]:
    """List the ids of the checkpoints that have any file, registered or not."""
    names = {path.name.removesuffix(".json").removeprefix("checkpoint-") for path in output_dir.glob("checkpoint-*")}
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 19)


def _checkpoint(store: FeatureStore, model_id: int) -> Iterator[Finding]:
    directory = store.checkpoint_dir(model_id)
    record, member = directory / "checkpoint.json", store.output_dir / f"{directory.name}.json"
    again = "Featurize the same checkpoint under this id again; finished shards stay."
    if not record.exists():
        yield Finding(
            record,
            "missing",
            "without it, nothing says which weights the features of this checkpoint belong to",
            again,
        )
        return
    if member.exists():
        found = _json(member, f"Delete it. {again}")
        yield found
        if found.state == "damaged":
            yield _json(record, again)
            return
    try:
        store.checkpoint_info(model_id)
    except StoreError as error:
        yield Finding(record, "damaged", str(error), f"Restore it, or delete it. {again}")
        return
    yield _json(record, again)
    if store.version > 1 and not member.exists():
        yield Finding(member, "missing", "without it, the loss of this checkpoint would go unnoticed", again)
    shards = list(store.train(model_id).findings(_FEATURIZE))
    yield from shards
    if store.config.get("api") != "TRAKer":  # whose stores hold no XᵀX
        whole = all(one.state in ("intact", "unchecked") for one in shards)
        solvers = list(SolverFiles(store, model_id).findings(whole))
        yield from solvers
        if not solvers or (directory / GRAM_FILE).exists():
            yield _gram(store, model_id, whole)
    if (directory / REFERENCES_FILE).exists():
        yield _references(store, model_id)


def _gram(store: FeatureStore, model_id: int, whole: bool) -> Finding:
    path = store.checkpoint_dir(model_id) / GRAM_FILE
    if not path.exists():
        return Finding(path, "missing", "XᵀX of this checkpoint is not computed", _FEATURIZE)
    if not whole:  # its identity covers the rows that it sums over, some of which are missing
        return Finding(path, "unchecked", "features that it was computed from are damaged or missing", _FEATURIZE)
    try:
        store.read_gram(model_id)
    except HfTrakError as error:
        return Finding(path, "damaged", str(error), f"Delete it; then: {_FEATURIZE}")
    return Finding(path, "intact")


def _references(store: FeatureStore, model_id: int) -> Finding:
    path = store.checkpoint_dir(model_id) / REFERENCES_FILE
    try:
        read_references(store, model_id)
    except StoreError as error:
        # the features were computed with these references, and would not fit newly computed ones
        return Finding(path, "damaged", str(error), "Restore it, or featurize this checkpoint anew.")
    return Finding(path, "intact")


def _experiment(store: FeatureStore, experiment: str, checkpoints: list[int]) -> Iterator[Finding]:
    directory = store.experiment_dir(experiment)
    path = directory / "experiment.json"
    if not path.exists():
        yield Finding(path, "missing", "the target features cannot be used without it", "Delete the directory.")
        return
    try:
        store.experiment_info(experiment)
    except StoreError as error:
        yield Finding(path, "damaged", str(error), f"Delete the directory; then: {_ATTRIBUTE}")
        return
    yield _json(path, _ATTRIBUTE)
    for model_id in checkpoints:
        if (directory / f"checkpoint-{model_id}").is_dir():
            try:
                shards = store.saved_targets(experiment, model_id)
            except StoreError as error:
                yield Finding(directory / f"checkpoint-{model_id}", "unchecked", str(error))
                continue
            yield from shards.findings(_ATTRIBUTE)


def _json(path: Path, remedy: str) -> Finding:
    try:
        content = read_sealed(path)
    except (StoreError, OSError) as error:
        return Finding(path, "damaged", str(error), remedy)
    return Finding(path, "intact") if is_sealed(content) else Finding(path, "unchecked", "it has no checksum")
