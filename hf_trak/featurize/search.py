"""Interactive search for a model: targets in, the best training rows out, from vectors that FAISS holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hf_trak.featurize.definition import Checkpoints, sources_of
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.runtime.checks import checked_int
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, attach_columns, fixed_size_list
from hf_trak.scores.search import RECORD_FILE, GradientSearch, search_identity
from hf_trak.weights.checkpoints import Checkpoint


class SearchIndex:
    """The training features of a model as vectors, which [`~SearchIndex.search`] asks about targets.

    Attributes:
        vectors (`GradientSearch`):
            The vectors. `vectors.index` is the `datasets.search.FaissIndex`.
    """

    def __init__(
        self, model: FeaturizedModel, vectors: GradientSearch, sources: Mapping[int, Checkpoint | None] | None = None
    ) -> None:
        """
        Args:
            model (`FeaturizedModel`):
                Computes features of targets.
            vectors (`GradientSearch`):
                The training features.
            sources (`Mapping`, *optional*):
                Weights of the checkpoints, by id, where they cannot be found again.
        """
        self._model = model
        self._sources = dict(sources or {})
        self.vectors = vectors

    def search(self, eval_dataset: Any, top_k: int = 20, checkpoints: Checkpoints = None) -> Dataset:
        """Find the training rows that helped and harmed targets most.

        Args:
            eval_dataset (`Dataset`):
                The targets, with the columns of the training dataset.
            top_k (`int`, *optional*, defaults to 20):
                Number of training rows to return per target, from either end.
            checkpoints (*optional*):
                Weights of all checkpoints of the index, see [`~hf_trak.TrakAttributor.attribute`].

        Returns:
            The rows with the columns of [`~hf_trak.TrakAttributor.attribute`]. Scores are as exact as the vectors; row
            numbers are −1 where an index that looks at a part of the rows found no more.

        Raises:
            ValueError: `top_k` is less than 1, the dataset is empty, or other checkpoints are given.
            CheckpointMismatchError: the weights at hand are not those of the features.
        """
        count = checked_int(top_k, "top_k", 1, type_error=ValueError)
        ids = self.vectors.model_ids
        asked, given = sources_of(checkpoints, ids)
        if asked is not None and set(asked) != set(ids):
            raise ValueError(
                f"`checkpoints` names the model ids {asked}; the vectors are means over {ids}. Expected all of these. "
                f"Leave `checkpoints` out, or call `build_search(checkpoints={asked})` for another index."
            )
        sources = given or self._sources
        targets = self._model.precondition(self._model.question(eval_dataset, checkpoints=sources or ids))
        found = [self.vectors.best(targets, count, largest) for largest in (True, False)]
        values = [value for rows, scores in found for value in (rows.astype(np.int64), scores.astype(np.float32))]
        columns = [fixed_size_list(np.ascontiguousarray(one)) for one in values]
        return attach_columns(eval_dataset, Dataset(pa.table(columns, names=list(TOP_K_COLUMNS))))


def build_search(
    model: FeaturizedModel, factory: str, directory: str | Path | None, checkpoints: Checkpoints
) -> SearchIndex:
    """Read the search index of a directory, or build one from the training features; see
    [`~hf_trak.TrakAttributor.build_search`]."""
    ids, sources = model.chosen(checkpoints)
    train = [model.store.train(model_id) for model_id in ids]
    identity = search_identity(factory, train)
    if directory is not None and (Path(directory) / RECORD_FILE).exists():
        return SearchIndex(model, GradientSearch.load(directory, identity), sources)
    vectors = GradientSearch.build(train, ids, identity, factory)
    if directory is not None:
        vectors.save(directory)
    return SearchIndex(model, vectors, sources)
