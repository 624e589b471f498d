"""An index and its model: new targets in, scores of all training rows out."""

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from hf_trak.attributor import TrakAttributor
from hf_trak.data.rows import attribute_of
from hf_trak.errors import HfTrakError
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurizer import StoredRows
from hf_trak.featurize.reranking import row_source
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.methods import Index, Rerank
from hf_trak.report.content import Columns, Content, content_of, stored
from hf_trak.report.page import facts_shown
from hf_trak.report.run import known_facts
from hf_trak.scores.scored_dataset import without_rerank_columns
from hf_trak.scores.spans import Span
from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.shards import ShardPlan
from hf_trak.viewer.session import Answer, Session, TokenScores, label_rows
from hf_trak.viewer.target_form import TYPED_COLUMNS, TargetForm, check_numbers
from hf_trak.viewer.train_rows import TrainRows

MOST_KEPT = 4

"""Number of factorizations that are kept, each of k² numbers of 8 bytes with the primal solver."""


logger = logging.getLogger(__name__)


MOST_RERANKED = 2000

GENERATED_TOKENS = 32


@dataclass(frozen=True)
class Question:
    """One question about one target.

    Attributes:
        texts (`Mapping[str, str]`): typed texts, by the fields of the form.
        upload (`bytes`, *optional*): content of the uploaded file.
        label (`str`, *optional*): the label; `None` leaves it to the model.
        predicted (`bool`): attribute what a language model writes next, in place of the text as it stands.
        words (`str`, *optional*): attribute one word, or piece, of what is said.
        model_ids (`Sequence[int]`, *optional*): checkpoints to average over; `None` takes all.
        lambda_relative (`float`, *optional*): relative ridge; `None` takes that of the index.
        rerank (`int`, *optional*): score so many of the best rows of either end exactly.
        tokens (`bool`): break the scores down by the tokens of the target.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    upload: bytes | None = None
    label: str | None = None
    predicted: bool = False
    words: str | None = None
    model_ids: Sequence[int] | None = None
    lambda_relative: float | None = None
    rerank: int | None = None
    tokens: bool = False


class IndexSession(Session):
    """Answers questions about new targets with an index and its model.

    Factors of ridge systems are kept between questions. Features of targets are computed in a directory that is
    removed with each answer, so that nothing of what users type stays on disk; reranked answers keep theirs in the
    output directory, as `attribute` does. One process answers one question at a time.
    """

    def __init__(
        self,
        attributor: TrakAttributor,
        form: TargetForm | None = None,
        prepare: Callable[[Dataset], Any] = lambda rows: rows,
        title: str = "Which training rows did this?",
        roots: Sequence[Path] = (),
    ) -> None:
        """
        Args:
            attributor (`TrakAttributor`):
                The model and its features.
            form (`TargetForm`, *optional*):
                What users type. By default a row as JSON.
            prepare (`Callable`, *optional*):
                Turns a row as it is stored into one that the model accepts, as it did with the training rows.
            title (`str`, *optional*):
                Heading of the page.
            roots (`Sequence[Path]`, *optional*):
                Directories below which image files of rows may be read.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            ConfigMismatchError: model, task, rows or settings are not those of the features.
        """
        self.attributor = attributor
        self.features = features = attributor.features
        features.prepare_store()
        self.title = title
        self.roots = list(roots)
        self.model_ids = features.scorer.ensemble(None)
        self.tokenizer = features.processing_class
        source = row_source(features)
        self.form = form or TargetForm(columns=tuple(getattr(source, "column_names", TYPED_COLUMNS)))
        self.rows = TrainRows(source, features.store.train_size)
        self.reranks = source is not None and self._has_curvature()
        self._prepare = prepare
        self._solver = lru_cache(MOST_KEPT)(self._factors)
        self._compared: set[int] = set()
        self._influence: np.ndarray | None = None

    def facts(self) -> list[tuple[str, str]]:
        return facts_shown(known_facts(self.features))

    def self_influence(self) -> np.ndarray:
        """Compute τ(z_i, z_i) of every training row, once.

        Raises:
            HfTrakError: a shard is missing or damaged, or λ is too small.
        """
        if self._influence is None:
            self._influence = self.attributor.self_influence().numpy()
        return self._influence

    def warm_up(self) -> None:
        """Do once what the first question would have to wait for: factors, the choice of an engine and its check.

        Raises:
            HfTrakError: questions cannot be answered, since weights, files or λ do not allow it.
        """
        for model_id in self.model_ids:
            self._solver(model_id, None)(torch.zeros(1, self.features.proj_dim))
        if self.form.as_json:
            return
        try:
            self._answer(self.form.example(), Question(tokens=not self.form.predicts))
        except HfTrakError:
            raise
        except ValueError as error:  # of the example, which may have no tokens that this tokenizer knows
            logger.info("The first question will take longer than others: %s", error)

    def ask(self, question: Question) -> Answer:
        """Score all training rows against a target.

        Raises:
            ValueError: the target cannot be read, or an option is out of range.
            HfTrakError: the model has other weights than the index, λ is too small, or a file is damaged.
            TypeError: the task has no prediction.
        """
        return self._answer(self.form.row(question.texts, question.upload, question.label), question)

    def _answer(self, given: Dataset, question: Question) -> Answer:
        model, ids = self.attributor, self._checked_ids(question.model_ids)
        generates = self.form.generates and question.predicted
        rows = given if generates and self.form.as_json else without_transform(self._prepare(given))
        if self.form.as_json:
            check_numbers(rows.with_format(None)[0], model.model)
        if generates or (self.form.predicts and question.label is None):
            with self.features.last_weights(ids):
                rows = model.predict(rows, **({"max_new_tokens": self._room(rows)} if generates else {}))
        if question.words:
            ready = attribute_of(self.features.data_collator, "ready")
            rows = Span(words=question.words).of(rows, self.tokenizer, ready)
        target = self._shown_target(given, rows, generates)
        if question.rerank is not None:
            return self._reranked(rows, question, ids, target)
        batches = self.features.featurizer().batches(rows, "target")
        singles = label_rows(model.task, batches, rows, self.rows.count) if question.tokens else None
        asked = self._preconditioned(rows, ids, question.lambda_relative)
        if singles is None:
            return Answer(target, np.arange(self.rows.count), self._scores(ids, asked)[:, 0])
        parts = self._preconditioned(singles, ids, question.lambda_relative)
        both = [torch.cat(pair) for pair in zip(asked, parts, strict=True)]
        scores = self._scores(ids, both)
        positions = [int(place) for place in singles.with_format(None)["trak_position"][:]]
        tokens = TokenScores(positions, np.ascontiguousarray(scores[:, 1:]))
        whole = np.ascontiguousarray(scores[:, 0])
        return Answer(target, np.arange(self.rows.count), whole, tokens=tokens, prepared=dict(rows[0]))

    def _room(self, rows: Dataset) -> int:
        """Count the tokens that the model may write after a target. Raises `ValueError` if there is no room."""
        limit = getattr(getattr(self.attributor.model, "config", None), "max_position_embeddings", None)
        taken = len(rows.with_format(None)[0].get("input_ids", ()))  # `predict` counts those of a chat
        room = GENERATED_TOKENS if not isinstance(limit, int) else min(GENERATED_TOKENS, limit - taken)
        if room < 1:
            raise ValueError(
                f"The target has {taken:,} tokens, and the model takes {limit:,}. Expected room for an answer. "
                "Shorten the target."
            )
        return room

    def _shown_target(self, given: Dataset, rows: Dataset, generates: bool) -> Content:
        """Read what is shown of a target: what was typed, and what the model predicted."""
        hidden = [self.form.label] if self.form.label is not None and "predicted" in rows.column_names else []
        kept = stored(given.remove_columns(hidden))
        content = content_of(kept[0], Columns.find(kept))
        if "predicted" not in rows.column_names:
            return content
        said = str(rows.with_format(None)[0]["predicted"])
        if generates:
            return replace(content, texts=(*content.texts, ("the model’s answer", said)))
        return replace(content, prediction=said)

    def _preconditioned(self, rows: Dataset, ids: Sequence[int], lam: float | None) -> list[Tensor]:
        """Compute t (XᵀX + λI)⁻¹, `(m, k)` float64, for every checkpoint."""
        return [self._solver(model_id, lam)(self._features(rows, model_id)) for model_id in ids]

    def _factors(self, model_id: int, lam: float | None) -> Callable[[Tensor], Tensor]:
        """Factorize XᵀX + λI of a checkpoint, and return the function that applies its inverse to `(m, k)` targets."""
        scorer = self.features.scorer_with(lam)
        if scorer.solvers.choice(model_id).kind != "primal":
            return partial(scorer.solvers.solve, scorer.solvers.make(model_id))
        gram = scorer.gram(model_id)
        assert gram is not None  # a viewer is one process, which is the main one
        return scorer.system(model_id, gram).solve

    def _features(self, rows: Dataset, model_id: int) -> Tensor:
        """Compute features of targets, `(m, k)`, under one checkpoint. The first time, stored rows are compared."""
        model, store = self.features, self.features.store
        train = store.train(model_id)
        known = None if model_id in self._compared else StoredRows.find(train, model.train_dataset, "train")
        plan = ShardPlan(len(rows), store.config["shard_size"])
        identity = {**store.identity(model_id), "kind": "targets", "dataset_fingerprint": fingerprint_dataset(rows)}
        with tempfile.TemporaryDirectory(prefix="hf_trak-target-", dir=self.scratch) as directory:
            place = Path(directory)
            shards = store.shard_set(place, "targets", plan, identity, store.rotation(model_id))
            with model.weights(model_id, model.source_of(model_id, {})):
                featurizer = model.featurizer(projector=model.feature_map(model_id))
                featurizer.fill(shards, rows, model_id, "target", "the target", stored=known)
            self._compared.add(model_id)
            return torch.cat([shard.grads.float().clone() for shard in shards])

    def _scores(self, ids: Sequence[int], targets: Sequence[Tensor]) -> np.ndarray:
        """Compute the scores of all training rows for m preconditioned targets, `(n, m)`."""
        device = self.features.scorer.device
        scaled = [ScaledRows.of(one) for one in targets]
        on_device = [ScaledRows(one.values.to(device), one.exponents) for one in scaled]
        blocks = self.features.scorer.blocks(ids, on_device, everywhere=True)
        return torch.cat([block.cpu() for _, _, block in blocks]).numpy()

    def _reranked(self, rows: Dataset, question: Question, ids: Sequence[int], target: Content) -> Answer:
        if not self.reranks:
            raise ValueError(
                "Exact scores are asked for, and this index has no fitted curvature or no training rows at hand. "
                "Expected both. Fit one with `hf-trak curvature`, or choose the scores of the index."
            )
        count = min(int(question.rerank or 0), MOST_RERANKED, self.rows.count)
        method = Rerank(count, index=Index(lambda_relative=question.lambda_relative))
        scored = self.attributor.attribute(rows, count, method=method, checkpoints=list(ids))
        found = Answer.of_lists(scored.with_format(None)[0], target, self.rows.count)
        note = f"{len(found.rows):,} rows of the shortlist have exact scores; no other row has one."
        return replace(found, whole=False, note=note)

    def _has_curvature(self) -> bool:
        """Tell whether a curvature is fitted under every checkpoint, so that reranking need not fit one."""
        exact = ExactScores(self.features)
        if self.features.args.curvature.kind == "hybrid":
            return False
        try:
            return all(exact.directory(model_id).is_dir() for model_id in self.model_ids)
        except HfTrakError:
            return False

    def _checked_ids(self, ids: Sequence[int] | None) -> list[int]:
        chosen = set(self.model_ids if ids is None else ids)
        if not chosen or chosen - set(self.model_ids):
            raise ValueError(
                f"The checkpoints are {sorted(chosen)}. Expected one or more of {self.model_ids}. Choose some."
            )
        return [one for one in self.model_ids if one in chosen]  # in their order, not in that of clicks


def without_transform(rows: Any) -> Dataset:
    """Return prepared rows with the values that a transform makes of them, as columns.

    Args:
        rows: one prepared row.
    """
    if not isinstance(rows, Dataset) or rows.format["type"] != "custom":
        return without_rerank_columns(rows)
    made = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in dict(rows[0]).items()}
    return Dataset.from_list([made])
