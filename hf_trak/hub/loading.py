"""From a published index to an attributor that scores new targets, without the training data.

[`load_attributor`] opens the index, builds the model and the task that it records, checks that everything that
defines features is the same, and finds the weights of every checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from huggingface_hub import constants
from torch.utils.data import default_collate as torch_collate
from transformers import default_data_collator

from hf_trak.config import CurvatureConfig, TrakConfig
from hf_trak.data.model_inputs import check_rows
from hf_trak.data.rows import Collator, default_collator
from hf_trak.errors import CheckpointMismatchError, ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.featurize.definition import COMPARISONS, recorded_arguments, sources_of, whitening_arguments
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.hub.access import access_errors, hub_api
from hf_trak.hub.files import LocalFiles, refused
from hf_trak.hub.index_files import TRAIN_ROWS_FILE, check_bounds, check_calibration
from hf_trak.hub.index_store import IndexStore, open_index, open_repo
from hf_trak.hub.manifest import RUN_OPTIONS, IndexManifest, TrainSource
from hf_trak.hub.models import HubCheckpoint, load_model
from hf_trak.hub.names import checked_repo, checked_revision, shown
from hf_trak.hub.remote_rows import RemoteRows
from hf_trak.hub.safe_loading import load_dataset
from hf_trak.identity.own_code import name_of
from hf_trak.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from hf_trak.modelout_functions.function import task_identity
from hf_trak.runtime.checks import is_int
from hf_trak.store.references import FILE_NAME as REFERENCES_FILE
from hf_trak.store.sealed import MANIFEST_FILE
from hf_trak.store.store import FeatureStore
from hf_trak.store.table_files import SUFFIXES, is_address, tables_in
from hf_trak.store.table_files import shown as shown_path
from hf_trak.store.table_store import Tables, TableStore
from hf_trak.weights.checkpoints import Checkpoint, fingerprint_state_dict


class AbsentRows:
    """Placeholder for training rows that are not available: it knows their number, not their content."""

    absent = True
    """Tells the featurizer that no row can be computed again and compared with stored features."""

    def __init__(self, count: int, name: str, remote: RemoteRows | None = None) -> None:
        """
        Args:
            count: number of rows.
            name: name of the index, for messages.
            remote: the rows in the dataset repo that the index names. Some of them can be fetched.
        """
        self.count = count
        self.name = name
        self.remote = remote

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NoReturn:
        raise IncompleteStoreError(
            f"Training row {index} of the index {self.name} is needed, and the training dataset is not available. "
            "Expected it for exact scores, and for tasks that use training rows, such as CLIP. Pass "
            "`train_dataset=` to `from_pretrained`."
        )


def target_collator(processing_class: Any) -> Collator:
    """Return a collator that looks at the rows of the targets, since there are no training rows to choose one by."""

    def collate(batch: list[Any]) -> Any:
        check_rows(batch, default_data_collator)
        return torch_collate(batch) if isinstance(batch[0], tuple | list) else default_data_collator(batch)

    return collate if processing_class is None else default_collator(_EmptyMappings(), processing_class)


class _EmptyMappings:
    """Rows that are mappings, like those of a `datasets.Dataset`, for the choice of a collator."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


F = TypeVar("F", bound=FeaturizedModel)


_MOST_DRAWS = 10_000
"""Maximum number of draws of a random row."""


@dataclass(frozen=True)
class _OpenedIndex:
    """An index to load, and the access to the Hub for its model, weights and rows.

    Attributes:
        store: the feature store.
        manifest: the manifest of a published index; `None` for the output directory of a run, and for tables.
        name: name of the index in messages.
        token: as in `huggingface_hub`.
        local_files_only: use only what is in the Hub's cache.
    """

    store: FeatureStore
    manifest: IndexManifest | None
    name: str
    token: str | bool | None
    local_files_only: bool

    @property
    def foreign(self) -> bool:
        """Tell whether others may have written what the index says: all but the output directory of a run."""
        return self.manifest is not None or isinstance(self.store, TableStore)


def load_attributor(
    cls: Callable[..., F],
    repo_or_path: str,
    model: torch.nn.Module | str | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    train_dataset: Any = None,
    data_collator: Collator | None = None,
    processing_class: Any = None,
    task: Any = None,
    checkpoints: Any = None,
    **options: Any,
) -> F:
    """Load a published index as [`TrakAttributor.from_pretrained`] does; see there for the arguments.

    Args:
        cls: makes the result.

    Raises:
        HubAccessError: a repo, revision or file does not exist or cannot be reached.
        RefusedIndexError: the index is damaged or hostile, or of another format.
        IncompleteStoreError: a directory holds neither an index nor a run.
        ConfigMismatchError: model, task or training dataset are not those of the index.
        CheckpointMismatchError: the model has none of the weights that the index was made with.
        ValueError: the index names no model, or an option cannot be chosen.
        TypeError: `repo_or_path` is neither a text nor a path, or is empty.
    """
    if unknown := sorted(set(options) - set(RUN_OPTIONS)):
        raise ValueError(
            f"{unknown} cannot be chosen for an index that exists. Expected some of {list(RUN_OPTIONS)}. Leave the "
            "other settings out: they define the features and are read from the index."
        )
    store = _open_store(repo_or_path, revision, token, local_files_only, options.pop("output_dir", None))
    manifest, name = None, shown_path(repo_or_path)
    if isinstance(store, IndexStore):
        manifest, name = store.manifest, store.files.name
    index = _OpenedIndex(store, manifest, name, token, local_files_only)

    # The model and the task are those that the index records, unless they are given.
    if model is None or isinstance(model, str):
        model = _model(index, model)
    task = _task(index) if task is None else task

    # Without training rows, what the index records of them is enough to score targets.
    if train_dataset is None:
        train_dataset = AbsentRows(store.config["train_size"], name, _recorded_rows(index))
    elif isinstance(train_dataset, RemoteRows):
        _expect(index, train_dataset)
    elif isinstance(train_dataset, str):
        train_dataset = _train_dataset(index, train_dataset)
    recorded_rows: dict[str, Any] | None = None
    if isinstance(train_dataset, AbsentRows | RemoteRows):
        data_collator = data_collator or target_collator(processing_class)
        recorded_rows = {key: store.config[key] for key in ("train_fingerprint", "collation") if key in store.config}

    args = _arguments(index, model, options)
    parts = (model, args, train_dataset, data_collator, processing_class, task)
    attributor = cls(*parts, store=store, recorded_rows=recorded_rows)
    _check_same(index, attributor)
    _check_references(index, attributor)
    _assign_checkpoints(index, attributor, checkpoints)
    return attributor


def _open_store(
    repo_or_path: str, revision: str | None, token: str | bool | None, local_files_only: bool, output_dir: str | None
) -> FeatureStore:
    """Open the output directory of a run, tables, the copy of an index, or a repo."""
    if not isinstance(repo_or_path, str | Path) or not str(repo_or_path):
        raise TypeError(
            f"`repo_or_path` is {repo_or_path!r}. Expected the directory of an index, or the name of a repo, "
            "'user/name'. Name one."
        )
    repo_or_path = str(repo_or_path)
    path = Path(repo_or_path)
    if _are_tables(repo_or_path):
        return _open_tables(repo_or_path, output_dir)
    if path.is_dir():
        if not (path / MANIFEST_FILE).exists():
            if output_dir is not None and Path(output_dir).resolve() != path.resolve():
                raise ValueError(
                    f"`output_dir` is {output_dir!r}, but {repo_or_path!r} is the output directory of a run and keeps "
                    "its results. Leave `output_dir` out."
                )
            if not (path / FeatureStore.CONFIG_FILE).exists():
                raise IncompleteStoreError(
                    f"{repo_or_path!r} holds no index: neither {MANIFEST_FILE} nor {FeatureStore.CONFIG_FILE} is "
                    "there. Expected a directory that `save_pretrained` or `pull_index` wrote, or the `output_dir` of "
                    "`featurize`. Name that; the directory of a model is passed as `model=`."
                )
            return FeatureStore.load(path)
        files = LocalFiles(path)
        work = files.work_dir if output_dir is None else Path(output_dir)
        if work.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"`output_dir` is {output_dir!r}, inside the copy {repo_or_path!r} of an index, which is only read. "
                "Expected another directory for features of targets and for scores. Leave `output_dir` out to keep "
                "them beside the Hub's cache."
            )
        return open_index(files, work)
    if path.exists():
        raise ValueError(
            f"{repo_or_path!r} is a file. Expected the directory of an index, or a repo. Pass the directory that the "
            "file is in."
        )
    return open_repo(repo_or_path, output_dir, revision, token, local_files_only)


def _are_tables(name: str) -> bool:
    """Tell whether an index is given as tables: an address, a Parquet file, a Lance table, or a directory of such."""
    path = Path(name)
    if is_address(name) or (path.exists() and path.suffix in SUFFIXES):
        return True
    records = (MANIFEST_FILE, FeatureStore.CONFIG_FILE)
    return bool(tables_in(path)) and not any((path / record).exists() for record in records)


def _open_tables(name: str, output_dir: str | None) -> TableStore:
    """Open tables as a store. By default, results are kept in a directory that their content names."""
    tables = Tables.find([name])
    try:
        check_bounds(tables.config)
        if (calibration := tables.chosen.get("calibration")) is not None:
            check_calibration(calibration)
    except (ValueError, StoreError) as error:
        raise refused(tables.name, str(error)) from error
    usual = Path(constants.HF_HOME) / "hf_trak" / f"tables-{tables.digest}"
    return TableStore.over(tables, usual if output_dir is None else output_dir)


def _model(index: _OpenedIndex, given: str | None) -> torch.nn.Module:
    """Load the model that the user names, or else the one that the index records."""
    config, manifest = index.store.config, index.manifest
    class_name = config.get("model_class")
    recorded, revision = config.get("model_name"), config.get("model_revision")
    if given is None:
        if recorded is None and manifest is not None:
            first = next((entry.source for entry in manifest.checkpoints.values() if entry.source), None)
            recorded, revision = (first.repo_id, first.revision) if first else (None, None)
        if recorded is None:
            raise ValueError(
                f"The index {index.name} does not say where its model is. Expected `model=`: the model that the index "
                f"was made with (a {class_name}), as a module, a directory or a repo."
            )
        if index.foreign:
            try:
                checked_repo(recorded, "`model_name`")
                if revision is not None:
                    checked_revision(revision, "`model_revision`")
            except ValueError as error:
                if manifest is None:
                    raise ValueError(f"{index.name} names a model that is no repo: {error} Pass `model=`.") from error
                raise refused(f"{FeatureStore.CONFIG_FILE} of {index.name}", str(error)) from error
    return load_model(
        str(recorded if given is None else given),
        revision if given in (None, recorded) else None,
        str(class_name),
        None if manifest is None else manifest.weights_dtype,
        index.token,
        index.local_files_only,
        repo_only=given is None and index.foreign,
    )


def _task(index: _OpenedIndex) -> AbstractModelOutput:
    """Build the recorded task, if it is one of the library's. Nothing is imported by the recorded name."""
    recorded = index.store.config.get("task")
    described = recorded if isinstance(recorded, dict) else {}
    settings = described.get("settings")
    for kind in TASK_TO_MODELOUT.values():
        if not isinstance(settings, dict) or name_of(kind) != described.get("class"):
            continue
        for arguments in ({}, settings):
            try:
                task = kind(**arguments)
            except (TypeError, ValueError):
                continue
            if task_identity(task) == recorded:
                return task
    raise ValueError(
        f"The index {index.name} was made with the task {recorded!r:.300}, which cannot be built from its "
        "description. Pass the same one as `task=`: a function (model_output, batch) -> tensor (B,), or an "
        "`AbstractModelOutput`."
    )


def _train_dataset(index: _OpenedIndex, name: str) -> Any:
    """Load the training rows from a repo: if it is the recorded one, its recorded configuration, split and commit."""
    recorded = None if index.manifest is None else index.manifest.train_dataset
    source = recorded if recorded is not None and recorded.name == name else TrainSource(name)
    with access_errors(name, source.revision):
        if not constants.HF_HUB_OFFLINE:
            hub_api(index.token).dataset_info(name)  # fails with a clear error if the repo cannot be reached
        return load_dataset(
            name, source.config, split=source.split or "train", revision=source.revision, token=index.token
        )


def _recorded_rows(index: _OpenedIndex) -> RemoteRows | None:
    """Return the rows of the dataset repo that an index names, if the index has digests to compare them with."""
    if index.manifest is None or TRAIN_ROWS_FILE not in index.manifest.files:
        return None
    source = index.manifest.train_dataset
    if source is None or index.local_files_only:
        return None
    rows = RemoteRows(source.name, source.config, source.split or "train", source.revision, token=index.token)
    _expect(index, rows)
    return rows


def _expect(index: _OpenedIndex, rows: RemoteRows) -> None:
    """Tell rows of a dataset repo what they are compared with."""
    recorded = None if index.manifest is None else index.manifest.train_dataset
    if recorded is not None and (recorded.name, recorded.split) != (rows.repo_id, rows.split):
        recorded = None
    if recorded is not None and rows.revision is None:
        rows.revision = recorded.revision
        rows.config = rows.config or recorded.config
    store = index.store
    contents = store.train_rows if isinstance(store, IndexStore) else lambda: None
    rows.expect(store.config["train_size"], contents, None if recorded is None else recorded.revision)


def _arguments(index: _OpenedIndex, model: torch.nn.Module, options: Mapping[str, Any]) -> TrakConfig:
    """Put together the settings that the index records, those that define its features, and the caller's options."""
    config = index.store.config
    settings = {} if index.manifest is None else index.manifest.settings
    if isinstance(index.store, TableStore):
        settings = {name: one for name, one in index.store.tables.chosen.items() if name == "lambda_relative"}
    recorded = {
        **settings.get("curvature", {}), **whitening_arguments(config), "whitened": "whitening" in config
    }  # fmt: skip
    fields = {
        **recorded_arguments(config),
        "num_draws": _draws(index),
        "grad_wrt": _attributed(index, model),
        "output_dir": str(index.store.output_dir),
    }
    try:
        curvature = _curvature(recorded, options.get("curvature", {}))
        return TrakConfig(**{**settings, **fields, **options, "curvature": curvature})
    except ValueError as error:
        raise ConfigMismatchError(
            f"The configuration of the index {index.name} does not work with this version of hf_trak: {error}"
        ) from error


def _curvature(recorded: Mapping[str, Any], given: Any) -> Any:
    """Put together what an index records of its curvature and what the caller wants."""
    if isinstance(given, str):
        return {**recorded, "kind": given}
    if isinstance(given, CurvatureConfig):  # whitening is a matter of the index unless it is asked for
        return replace(given, whitened=given.whitened or recorded["whitened"])
    return {**recorded, **given} if isinstance(given, Mapping) else given


def _draws(index: _OpenedIndex) -> int:
    """Return how often each random row of the index was drawn; 1 where rows are always the same.

    Raises:
        ConfigMismatchError: the index records no such number, or one that would keep targets busy for ever.
    """
    collation = index.store.config.get("collation")
    draws = collation.get("draws", 1) if isinstance(collation, dict) else 1
    if not is_int(draws, 1, _MOST_DRAWS):
        raise ConfigMismatchError(
            f"The index {index.name} records {draws!r:.100} draws of each random row. Expected a number from 1 to "
            f"{_MOST_DRAWS:,}. Do not use it."
        )
    return draws


def _attributed(index: _OpenedIndex, model: torch.nn.Module) -> list[str] | None:
    """Return the names of the attributed parameters; `None` if they are those that hf_trak attributes by default.

    Raises:
        ConfigMismatchError: the model does not have a parameter of each recorded name and shape.
    """
    config = index.store.config
    recorded = config.get("parameters")
    if ParameterLayout.from_model(model).to_list() == recorded:
        return None
    shapes = {name: list(value.shape) for name, value in model.named_parameters()}
    entries = recorded if isinstance(recorded, list) else []
    pairs = [entry[:2] for entry in entries if isinstance(entry, list) and len(entry) == 3]
    wrong = [entry for entry in pairs if not isinstance(entry[0], str) or shapes.get(entry[0]) != entry[1]]
    if wrong or not pairs or len(pairs) != len(entries):
        raise ConfigMismatchError(
            f"The index {index.name} attributes {len(entries)} parameters of a {config.get('model_class')}; "
            f"{len(wrong)} of them are not those of the given {type(model).__name__} (first: {wrong[:2]!r:.200}). "
            "Expected the model that the index was made with."
        )
    return [str(entry[0]) for entry in pairs]


def _check_same(index: _OpenedIndex, attributor: FeaturizedModel) -> None:
    """Compare everything that defines features with the record of the index."""
    store = index.store
    given = attributor.store_config()
    try:
        changes = store.changes(given, COMPARISONS)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if not index.foreign:
            raise
        reason = f"{type(error).__name__}: {shown(str(error))}"
        raise refused(
            f"{store.CONFIG_FILE} of {index.name}",
            f"its description of model, task or rows is not one that hf_trak writes ({reason})",
        ) from error
    if changes:
        raise ConfigMismatchError(
            f"The index {index.name} was made with another configuration than that of the given model, task and "
            "training dataset:\n  " + "\n  ".join(changes) + "\nPass those that it was made with; leave out "
            "`train_dataset` if it is not available."
        )


def _check_references(index: _OpenedIndex, attributor: FeaturizedModel) -> None:
    """Refuse tables, and a published index, without the references that their task computed from training rows."""
    if not index.foreign or not attributor.task.reference_rows(index.store.config["train_size"]):
        return
    if index.manifest is None:
        raise refused(index.name, "its task needs references, which tables do not have", "a published index")
    for model_id in index.manifest.checkpoints:
        if f"checkpoint-{model_id}/{REFERENCES_FILE}" not in index.manifest.files:
            raise refused(
                f"The index {index.name}", f"its task needs references, and checkpoint {model_id} comes without them"
            )


def _assign_checkpoints(
    index: _OpenedIndex,
    attributor: FeaturizedModel,
    given: Checkpoint | Sequence[Checkpoint] | Mapping[int, Checkpoint] | None,
) -> None:
    """Find the weights of every checkpoint.

    The first that applies counts: the checkpoints that the user gives, the model's own weights if they have the
    recorded fingerprint, a repo that the index names, and a path that a run of this machine has recorded.
    """
    store, manifest = index.store, index.manifest
    ids, sources = sources_of(given, store.model_ids)
    if unknown := sorted(set(ids or ()) - set(store.model_ids)):
        raise ValueError(
            f"`checkpoints` names the model ids {unknown}; the index has {store.model_ids}. Expected some of those."
        )
    current = fingerprint_state_dict(attributor.model.state_dict())
    prints = {model_id: store.checkpoint_info(model_id)["fingerprint"] for model_id in store.model_ids}
    for model_id, fingerprint in prints.items():
        if model_id in sources:
            continue
        published = None if manifest is None else manifest.checkpoints[model_id].source
        if fingerprint == current:
            sources[model_id] = None  # the model's own weights
        elif published is not None:
            sources[model_id] = HubCheckpoint(
                published.repo_id, published.revision, index.token, index.local_files_only
            )
    attributor.sources.update(sources)
    if not any(model_id in sources or attributor.source_of(model_id, {}) is not None for model_id in prints):
        called = getattr(getattr(attributor.model, "config", None), "_name_or_path", None)
        raise CheckpointMismatchError(
            f"The model {called or type(attributor.model).__name__!r} has weights with the fingerprint {current}; the "
            f"index {index.name} was made with {', '.join(sorted(set(prints.values())))}. Expected one of those: the "
            "very weights, in the same dtype, not the base that was fine-tuned. Pass them as `model=` or in "
            "`checkpoints=`."
        )
