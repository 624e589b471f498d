"""From a published index to an attributor that scores new targets, without the training data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from huggingface_hub import constants
from torch.utils.data import default_collate as torch_collate
from transformers import default_data_collator

from hf_trak.config import TrakConfig
from hf_trak.data.model_inputs import check_rows
from hf_trak.data.rows import Collator, default_collator
from hf_trak.errors import CheckpointMismatchError, ConfigMismatchError, IncompleteStoreError
from hf_trak.featurize.comparisons import COMPARISONS
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.hub.files import LocalFiles, access_errors, hub_api
from hf_trak.hub.foreign_json import shown
from hf_trak.hub.index_store import IndexStore, open_index
from hf_trak.hub.manifest import MANIFEST_FILE, IndexManifest, checked_repo, checked_revision, refused
from hf_trak.hub.models import HubCheckpoint, load_model
from hf_trak.hub.pull import open_repo
from hf_trak.hub.safe_loading import load_dataset
from hf_trak.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from hf_trak.modelout_functions.identity import task_identity
from hf_trak.store.store import FeatureStore
from hf_trak.weights.checkpoints import Checkpoint, fingerprint_state_dict

F = TypeVar("F", bound=FeaturizedModel)

RUN_OPTIONS = (
    "auto_find_batch_size",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "disable_tqdm",
    "engine",
    "label_names",
    "lambda_reg",
    "lambda_relative",
    "max_block_bytes",
    "output_dir",
    "per_device_batch_size",
    "remove_unused_columns",
    "use_cpu",
)
"""Fields of `TrakConfig` that can be chosen anew for an index. The others define its features and come from it."""


class AbsentRows:
    """Stands for training rows that are not at hand: their number is known, their content is not."""

    absent = True
    """Nothing is computed from rows of such a dataset to compare it with what is stored."""

    def __init__(self, count: int, name: str) -> None:
        """
        Args:
            count: number of rows.
            name: of the index, for messages.
        """
        self.count = count
        self.name = name

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NoReturn:
        raise IncompleteStoreError(
            f"Training row {index} of the index {self.name} is needed, and the training dataset is not at hand. "
            "Expected it for tasks that draw on training rows, such as CLIP. Pass `train_dataset=` to "
            "`from_pretrained`."
        )


def load_attributor(
    cls: type[F],
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
    checkpoints: Checkpoint | Sequence[Checkpoint] | Mapping[int, Checkpoint] | None = None,
    **options: Any,
) -> F:
    """What [`TrakAttributor.from_pretrained`] does: see there for the arguments.

    Args:
        cls: the class of the result.

    Raises:
        HubAccessError: repo, revision or file does not exist or cannot be reached.
        RefusedIndexError: the index is damaged or hostile, or of another format.
        IncompleteStoreError: a directory holds neither an index nor a run.
        ConfigMismatchError: model, task or training dataset are not those of the index.
        CheckpointMismatchError: the model has none of the weights that the index was made with.
        ValueError: the index names no model, or an option cannot be chosen.
    """
    if unknown := sorted(set(options) - set(RUN_OPTIONS)):
        raise ValueError(
            f"{unknown} cannot be chosen for an index that exists. Expected some of {list(RUN_OPTIONS)}; the other "
            "settings define its features and are read from it."
        )
    store, manifest = _open(repo_or_path, revision, token, local_files_only, options.pop("output_dir", None))
    config, name = store.config, _name(store, repo_or_path)
    if model is None or isinstance(model, str):
        model = _model(config, manifest, model, name, token, local_files_only)
    task = _task(config, name) if task is None else task
    if train_dataset is None:
        train_dataset = AbsentRows(config["train_size"], name)
        data_collator = data_collator or _collator(train_dataset, processing_class)
    elif isinstance(train_dataset, str):
        train_dataset = _train_dataset(train_dataset, manifest, token)
    arguments = _arguments(config, manifest, model, name, str(store.output_dir), options)
    recorded: dict[str, Any] | None = None
    if isinstance(train_dataset, AbsentRows):
        recorded = {key: config[key] for key in ("train_fingerprint", "collation") if key in config}
    attributor = cls(
        model, arguments, train_dataset, data_collator, processing_class, task, store=store, recorded_rows=recorded
    )
    _check_same(attributor, store, name)
    if manifest is not None and attributor.task.reference_rows(config["train_size"]):
        for model_id, published in manifest.checkpoints.items():
            if published.references is None:
                raise refused(
                    f"The index {name}", f"its task needs references, and checkpoint {model_id} comes without them"
                )
    _assign_checkpoints(attributor, manifest, checkpoints, name, token, local_files_only)
    return attributor


def _open(
    repo_or_path: str, revision: str | None, token: str | bool | None, local_files_only: bool, output_dir: str | None
) -> tuple[FeatureStore, IndexManifest | None]:
    path = Path(repo_or_path)
    if path.is_dir():
        if not (path / MANIFEST_FILE).exists():
            if output_dir is not None and Path(output_dir).resolve() != path.resolve():
                raise ValueError(
                    f"`output_dir` is {output_dir!r}, but {repo_or_path!r} is the output directory of a run and keeps "
                    "its results. Leave `output_dir` out."
                )
            return FeatureStore.load(path), None  # the output directory of a run
        files = LocalFiles(path)
        work = files.work_dir if output_dir is None else Path(output_dir)
        if work.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"`output_dir` is {output_dir!r}, inside the copy {repo_or_path!r} of an index, whose files are "
                "somebody else's. Expected another directory for the features of targets and for scores. Leave "
                "`output_dir` out: they are then kept beside the Hub's cache."
            )
        store = open_index(files, work)
        return store, store.manifest
    if path.exists():
        raise ValueError(f"{repo_or_path!r} is a file. Expected the directory of an index, or a repo.")
    store = open_repo(repo_or_path, output_dir, revision, token, local_files_only)
    return store, store.manifest


def _name(store: FeatureStore, repo_or_path: str) -> str:
    files = getattr(store, "files", None)
    return repo_or_path if files is None else files.name


def _model(
    config: Mapping[str, Any],
    manifest: IndexManifest | None,
    given: str | None,
    name: str,
    token: str | bool | None,
    local_files_only: bool,
) -> torch.nn.Module:
    class_name = config.get("model_class")
    recorded, revision = config.get("model_name"), config.get("model_revision")
    if given is None:
        if recorded is None and manifest is not None:
            first = next((entry.source for entry in manifest.checkpoints.values() if entry.source), None)
            recorded, revision = (first.repo_id, first.revision) if first else (None, None)
        if recorded is None:
            raise ValueError(
                f"The index {name} does not say where its model is. Expected `model=`: the model that the index was "
                f"made with (a {class_name}), as a module, a directory or a repo."
            )
        if manifest is not None:
            try:
                checked_repo(recorded, "`model_name`")
                if revision is not None:
                    checked_revision(revision, "`model_revision`")
            except ValueError as error:
                raise refused(f"{FeatureStore.CONFIG_FILE} of {name}", str(error)) from error
    dtype = None if manifest is None else manifest.weights_dtype
    return load_model(
        str(recorded if given is None else given),
        revision if given in (None, recorded) else None,
        str(class_name),
        dtype,
        token,
        local_files_only,
        repo_only=given is None and manifest is not None,
    )


def _task(config: Mapping[str, Any], name: str) -> AbstractModelOutput:
    """The task that the index was made with, where the library can build it. Nothing is imported by its name."""
    recorded = config.get("task")
    described = recorded if isinstance(recorded, dict) else {}
    settings = described.get("settings")
    for kind in TASK_TO_MODELOUT.values():
        if not isinstance(settings, dict) or f"{kind.__module__}.{kind.__qualname__}" != described.get("class"):
            continue
        for arguments in ({}, settings):
            try:
                task = kind(**arguments)
            except (TypeError, ValueError):
                continue
            if task_identity(task) == recorded:
                return task
    raise ValueError(
        f"The index {name} was made with the task {recorded!r:.300}, which is not built from its description. Pass "
        "the same one as `task=`: a function (model_output, batch) -> tensor (B,), or an `AbstractModelOutput`."
    )


def _collator(rows: AbsentRows, processing_class: Any) -> Collator:
    """The collator that the targets' rows ask for, since there are no training rows to look at."""

    def collate(batch: list[Any]) -> Any:
        check_rows(batch, default_data_collator)
        return torch_collate(batch) if isinstance(batch[0], tuple | list) else default_data_collator(batch)

    return collate if processing_class is None else default_collator(_Mappings(), processing_class)


class _Mappings:
    """Rows that look like those of a `datasets.Dataset`, for the choice of a collator."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


def _train_dataset(name: str, manifest: IndexManifest | None, token: str | bool | None) -> Any:
    recorded = None if manifest is None else manifest.train_dataset
    same = recorded is not None and recorded.name == name
    with access_errors(name, recorded.revision if same and recorded else None):
        if not constants.HF_HUB_OFFLINE:
            hub_api(token).dataset_info(name)  # says in our words if the repo is out of reach
        return load_dataset(
            name,
            recorded.config if same and recorded else None,
            split=(recorded.split if same and recorded else None) or "train",
            revision=recorded.revision if same and recorded else None,
            token=token,
        )


def _arguments(
    config: Mapping[str, Any],
    manifest: IndexManifest | None,
    model: torch.nn.Module,
    name: str,
    output_dir: str,
    options: Mapping[str, Any],
) -> TrakConfig:
    """The configuration that the index was made with, as far as it changes results, and the caller's own options."""
    settings = {} if manifest is None else manifest.settings
    algorithm = str(config.get("projection"))
    fields = {
        "proj_type": algorithm.rpartition("-")[0],
        "proj_dim": config["proj_dim"],
        "proj_nonzeros": config.get("proj_nonzeros", 1),
        "seed": config.get("seed"),
        "feature_dtype": config["feature_dtype"],
        "model_dtype": config.get("model_dtype"),
        "shard_size": config["shard_size"],
        "grad_wrt": _attributed(config, model, name),
        "output_dir": output_dir,
    }
    try:
        return TrakConfig(**{**settings, **fields, **options})
    except ValueError as error:
        raise ConfigMismatchError(
            f"The configuration of the index {name} does not work with this version of hf_trak: {error}"
        ) from error


def _attributed(config: Mapping[str, Any], model: torch.nn.Module, name: str) -> list[str] | None:
    recorded = config.get("parameters")
    if ParameterLayout.from_model(model).to_list() == recorded:
        return None
    shapes = {name: list(value.shape) for name, value in model.named_parameters()}
    entries = recorded if isinstance(recorded, list) else []
    pairs = [entry[:2] for entry in entries if isinstance(entry, list) and len(entry) == 3]
    wrong = [entry for entry in pairs if not isinstance(entry[0], str) or shapes.get(entry[0]) != entry[1]]
    if wrong or not pairs or len(pairs) != len(entries):
        raise ConfigMismatchError(
            f"The index {name} attributes {len(entries)} parameters of a {config.get('model_class')}; {len(wrong)} of "
            f"them are not those of the given {type(model).__name__} (first: {wrong[:2]!r:.200}). Expected the model "
            "that the index was made with."
        )
    return [str(entry[0]) for entry in pairs]


def _check_same(attributor: FeaturizedModel, store: FeatureStore, name: str) -> None:
    """Everything that defines features has to come out as the index records it."""
    given = attributor.store_config() if store.version > 1 else attributor.first_format()
    try:
        changes = store.changes(given, COMPARISONS)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if not isinstance(store, IndexStore):
            raise
        reason = f"{type(error).__name__}: {shown(str(error))}"
        raise refused(
            f"{store.CONFIG_FILE} of {name}",
            f"what it says of model, task or rows is not what hf_trak writes ({reason})",
        ) from error
    if changes:
        raise ConfigMismatchError(
            f"The index {name} was made with another configuration than model, task and training dataset given here:\n"
            "  " + "\n  ".join(changes) + "\nPass those that it was made with; leave out `train_dataset` if it is not "
            "at hand."
        )


def _assign_checkpoints(
    attributor: FeaturizedModel,
    manifest: IndexManifest | None,
    given: Checkpoint | Sequence[Checkpoint] | Mapping[int, Checkpoint] | None,
    name: str,
    token: str | bool | None,
    local_files_only: bool,
) -> None:
    """Find the weights of every checkpoint: those given, the model's own where the fingerprint says so, the Hub's."""
    store = attributor.store
    sources: dict[int, Checkpoint | None] = dict(_by_id(given, store.model_ids))
    current = fingerprint_state_dict(attributor.model.state_dict())
    prints = {model_id: store.checkpoint_info(model_id)["fingerprint"] for model_id in store.model_ids}
    for model_id, fingerprint in prints.items():
        if model_id in sources:
            continue
        published = None if manifest is None else manifest.checkpoints[model_id].source
        if fingerprint == current:
            sources[model_id] = None  # the model's own weights
        elif published is not None:
            sources[model_id] = HubCheckpoint(published.repo_id, published.revision, token, local_files_only)
        elif attributor.source_of(model_id, {}) is not None:
            continue  # a path of this machine, in the output directory of a run
    attributor.sources.update(sources)
    if not any(model_id in sources or attributor.source_of(model_id, {}) is not None for model_id in prints):
        called = getattr(getattr(attributor.model, "config", None), "_name_or_path", None)
        raise CheckpointMismatchError(
            f"The model {called or type(attributor.model).__name__!r} has weights with the fingerprint {current}; the "
            f"index {name} was made with {', '.join(sorted(set(prints.values())))}. Expected one of those: the very "
            "weights, in the same dtype, not the base that was fine-tuned. Pass them as `model=` or in `checkpoints=`."
        )


def _by_id(given: Any, ids: Sequence[int]) -> dict[int, Checkpoint]:
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(isinstance(key, int) for key in given):
        if unknown := sorted(set(given) - set(ids), key=str):
            raise ValueError(f"`checkpoints` names the model ids {unknown}; the index has {list(ids)}.")
        return dict(given)
    values = list(given) if isinstance(given, list | tuple) else [given]
    if len(values) != len(ids):
        raise ValueError(
            f"`checkpoints` has {len(values)} entries; the index has the model ids {list(ids)}. Expected one for "
            "each, in this order, or a mapping from ids to checkpoints."
        )
    return dict(zip(ids, values, strict=True))
