"""Facts that are published about an index besides its feature store, and their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_trak.config import TrakConfig
from hf_trak.featurize.batch_size import BatchSizeFinder
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fidelity import Fidelity
from hf_trak.hub.manifest import TrainSource
from hf_trak.hub.models import HubCheckpoint
from hf_trak.hub.names import HubSource, checked_repo, checked_revision
from hf_trak.hub.origins import copied_manifest, known_sources, recorded_model, train_source
from hf_trak.store.store import FeatureStore

CheckpointSource = str | HubCheckpoint | HubSource
"""Weights on the Hub: `"hf://user/model@revision"`, `"user/model@revision"`, or an object that names both."""


@dataclass(frozen=True)
class IndexFacts:
    """Facts that are published about an index and that its feature store does not record.

    Args:
        settings (`TrakConfig`, *optional*):
            The configuration of the run, for λ and the batch size. Defaults to the settings of the index that the
            store is a copy of, and otherwise to `TrakConfig()`.
        model_name (`str`, *optional*):
            The model repo that [`TrakAttributor.from_pretrained`] is to load. Defaults to the name in the model's
            configuration (for a fine-tuned model that of its base), if it is certainly the name of a repo.
        model_revision (`str`, *optional*):
            Branch, tag or commit of `model_name`.
        weights_dtype (`str`, *optional*):
            Dtype in which the weights are to be loaded, such as `"float32"`. Defaults to that of a copied index.
        checkpoints (`Mapping[int, str | HubCheckpoint | HubSource]`, *optional*):
            Where the weights of each model id are on the Hub: `"hf://user/model@revision"`, `"user/model@revision"`
            or a [`HubCheckpoint`]. Needed for ids whose weights are not those of the model and did not come from the
            Hub.
        train_dataset (`TrainSource`, *optional*):
            The dataset repo of the training rows. Defaults to that of a copied index.
        lds (`float`, *optional*):
            The linear datamodeling score, from -1 to 1, if it was measured. Defaults to that of a copied index.
        fidelity (`Fidelity`, *optional*):
            What [`TrakAttributor.fidelity`] returned, for the card.
    """

    settings: TrakConfig | None = None
    model_name: str | None = None
    model_revision: str | None = None
    weights_dtype: str | None = None
    checkpoints: Mapping[int, CheckpointSource] | None = None
    train_dataset: TrainSource | None = None
    lds: float | None = None
    fidelity: Fidelity | None = None


def attributor_facts(
    attributor: FeaturizedModel, checkpoints: Mapping[int, CheckpointSource] | None = None, **given: Any
) -> IndexFacts:
    """Collect the facts that an attributor knows about its own index.

    Args:
        attributor: any `FeaturizedModel`; its configuration, weights and training dataset are described.
        checkpoints: takes precedence over the [`HubCheckpoint`] objects that the attributor was featurized with.
        given: `model_name`, `model_revision`, `lds` and `fidelity` of [`IndexFacts`].

    Raises:
        TypeError: `given` has another name.
    """
    args = attributor.args
    if args.auto_find_batch_size:
        found = BatchSizeFinder(args.per_device_batch_size, attributor.store.output_dir).batch_size
        args = replace(args, per_device_batch_size=found)
    floating = [value.dtype for value in attributor.model.parameters() if value.is_floating_point()]
    sources = {key: source for key, source in attributor.sources.items() if isinstance(source, HubCheckpoint)}
    return IndexFacts(
        settings=args,
        weights_dtype=str(floating[0]).removeprefix("torch.") if floating else None,
        checkpoints={**sources, **(checkpoints or {})},
        train_dataset=train_source(attributor.train_dataset),
        **given,
    )


def completed(facts: IndexFacts, store: FeatureStore) -> IndexFacts:
    """Fill in what was not given and what the store, or the index that it is a copy of, knows.

    Raises:
        ValueError: the name or revision of the model cannot be that of a repo.
        RefusedIndexError: the store is a copy of an index, and its manifest is damaged.
    """
    if (copied := copied_manifest(store)) is not None:
        facts = replace(
            facts,
            settings=facts.settings or TrakConfig(**copied.settings),
            weights_dtype=facts.weights_dtype or copied.weights_dtype,
            train_dataset=facts.train_dataset or copied.train_dataset,
            lds=copied.lds if facts.lds is None else facts.lds,
        )
    if facts.model_name is None:
        name, revision = recorded_model(store)
        facts = replace(facts, model_name=name, model_revision=facts.model_revision or revision)
    if facts.model_name is not None:
        checked_repo(facts.model_name, "`model_name`")
    if facts.model_revision is not None:
        checked_revision(facts.model_revision, "`model_revision`")
    return replace(facts, checkpoints={**known_sources(store), **(facts.checkpoints or {})})
