"""The fidelity of an index: scores from stored features beside exact ones, on a sample of rows and targets.

Two things separate the scores of an index from exact scores under a Kronecker curvature: the random projection, and
the curvature. They are measured one by one, for n' training rows and m' targets that are drawn from the other training
rows:

1. q · ⟨φ_i, φ_t⟩ from features beside q · ⟨∇f_i, ∇f_t⟩ from whole gradients: what the projection alone changes. (With
   the ridge, whole gradients would need a system of P equations.) Of whitened features, ⟨∇f_i, P⁻¹ ∇f_t⟩.
2. q · φ_tᵀ(XᵀX + λI)⁻¹φ_i, the scores of the index, beside exact scores under the fitted curvature: what `attribute`
   gives and what `attribute(method="exact")` would give.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from hf_trak.config import TrakConfig
from hf_trak.curvature.curvature import Curvature, identity_curvature
from hf_trak.curvature.files import CURVATURE_FILE, CurvatureFiles
from hf_trak.curvature.maps import GradientMap, Preconditioning, TargetProducts
from hf_trak.curvature.report import CurvatureReport
from hf_trak.errors import StoreError
from hf_trak.featurize.calibration import correlation, ranks
from hf_trak.featurize.converting import scorer_of
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.methods import Exact
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.modelout_functions.base import Side
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.streaming import score_blocks
from hf_trak.store.revised import PrefixStore
from hf_trak.store.sealed import content_digest, read_sealed
from hf_trak.store.shard_set import Shard, ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.store.store import FeatureStore

_SAMPLE = ("rows", "sample")


def fitted_curvature(exact: ExactScores, model_id: int) -> Curvature:
    """Read the curvature of a checkpoint, whichever rows it was fitted to.

    Args:
        exact (`ExactScores`): the model and its configuration.
        model_id (`int`): the checkpoint.

    Raises:
        StoreError: none is fitted, or a file of it is damaged.
        ConfigMismatchError: it was fitted to other weights or parameters, or with another kind, labels or seed.
        IncompleteStoreError: there is no checkpoint of this id.
    """
    if exact.kind == "identity":
        return identity_curvature(exact.model.layout)
    expected = exact.identity(model_id, exact.sample())
    directory = exact.model.store.curvature_dir(model_id, expected)  # that of a published one, if it fits
    path = directory / CURVATURE_FILE
    if not path.exists():
        raise StoreError(
            f"{directory} holds no curvature of checkpoint {model_id}. Expected a fitted one. Call `fit_curvature()` "
            "first."
        )
    if directory == exact.directory(model_id):
        recorded = read_sealed(path).get("identity", {})
        expected |= {name: recorded[name] for name in _SAMPLE if name in recorded}
    return CurvatureFiles(directory, expected).read()


def curvature_report(exact: ExactScores, model_id: int) -> CurvatureReport:
    """Report on the curvature of a checkpoint. Raises as [`fitted_curvature`].

    Args:
        exact (`ExactScores`): the model and its configuration.
        model_id (`int`): the checkpoint.

    Raises:
        ValueError: the configured curvature is the identity, which leaves nothing to report.
    """
    if exact.kind == "identity":
        raise ValueError(
            "`curvature` is 'identity', which is fitted to nothing. Expected another one for a report. Set "
            "`curvature='ekfac'`."
        )
    return CurvatureReport.of(fitted_curvature(exact, model_id), exact.damping)


def log_reports(exact: ExactScores, model_ids: Sequence[int]) -> None:
    """Log short reports on the curvatures of some checkpoints, in the main process."""
    if exact.kind == "identity" or not exact.model.processes.is_main_process:
        return
    for model_id in model_ids:
        curvature_report(exact, model_id).log(f"Curvature of checkpoint {model_id}")


_LEAST_ROWS = 3

_TOP = 10

_SHARD_BYTES = 2**28


@dataclass(frozen=True)
class Agreement:
    """The agreement of two matrices of scores, target by target.

    Attributes:
        spearman (`tuple[float, ...]`): rank correlation over the rows, of every target.
        overlap (`tuple[float, ...]`): part of the highest rows of one that are among as many of the other.
    """

    spearman: tuple[float, ...]
    overlap: tuple[float, ...]

    @classmethod
    def of(cls, found: np.ndarray, exact: np.ndarray, top: int) -> "Agreement":
        """Compare scores `(rows, targets)` with exact ones.

        Args:
            found (`numpy.ndarray`):
                The scores.
            exact (`numpy.ndarray`):
                The exact ones.
            top (`int`):
                Number of highest rows for the overlap.
        """
        ranked = [np.apply_along_axis(ranks, 0, one) for one in (found, exact)]
        best = [np.argsort(-one, axis=0, kind="stable")[:top] for one in (found, exact)]
        return cls(
            tuple(correlation(a, b) for a, b in zip(ranked[0].T, ranked[1].T, strict=True)),
            tuple(len(set(a) & set(b)) / top for a, b in zip(best[0].T.tolist(), best[1].T.tolist(), strict=True)),
        )

    @property
    def mean_spearman(self) -> float:
        """Return the mean over targets."""
        return float(np.mean(self.spearman))

    @property
    def mean_overlap(self) -> float:
        """Return the mean over targets."""
        return float(np.mean(self.overlap))

    @property
    def standard_error(self) -> float:
        """Return the standard error of `mean_spearman` over targets. It is infinite for one target."""
        m = len(self.spearman)
        return float(np.std(self.spearman, ddof=1)) / math.sqrt(m) if m > 1 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return the agreement as plain JSON, with its means."""
        return {**asdict(self), "mean_spearman": self.mean_spearman, "mean_overlap": self.mean_overlap}


@dataclass(frozen=True)
class Fidelity:
    """The agreement of scores with those that take more bytes per row, on a sample.

    Attributes:
        model_ids (`tuple[int, ...]`): the checkpoints.
        before (`str`): what the scores are compared with: `"exact ekfac"`, say, or a storage of features.
        after (`str`): storage of the features of the scores.
        bytes_before (`int`): bytes of a row of whole gradients or features, with its scale.
        bytes_after (`int`): those of the features of the scores.
        features (`int`): k, their number.
        rows (`int`): number of training rows that were compared.
        targets (`int`): number of targets, which are other training rows.
        top (`int`): number of highest rows in the overlaps.
        scores ([`Agreement`]): the scores, beside those that they are compared with.
        projection ([`Agreement`], *optional*): inner products of features, beside those of whole gradients.
    """

    model_ids: tuple[int, ...]
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    features: int
    rows: int
    targets: int
    top: int
    scores: Agreement
    projection: Agreement | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain JSON."""
        projection = None if self.projection is None else self.projection.to_dict()
        return {**asdict(self), "scores": self.scores.to_dict(), "projection": projection}

    def __str__(self) -> str:
        """Say what was saved, and what it costs."""
        compared = {f"scores beside {self.before} scores": self.scores}
        if self.projection is not None:
            compared = {f"{self.features:,} features beside whole gradients": self.projection, **compared}
        lines = [
            f"{self.before} to {self.after}: {self.bytes_before:,} to {self.bytes_after:,} bytes per row, "
            f"{self.bytes_before / self.bytes_after:.1f} times fewer.",
            f"Fidelity of checkpoints {list(self.model_ids)}, {self.rows:,} training rows × {self.targets} others as "
            f"targets (rank correlation per target, mean ± standard error; chance: 0, {self.top / self.rows:.0%}):",
        ]
        for what, one in compared.items():
            error = f" ± {one.standard_error:.3f}" if math.isfinite(one.standard_error) else ""
            lines.append(f"  {what}: {one.mean_spearman:.3f}{error}, {one.mean_overlap:.0%} of the top {self.top}")
        return "\n".join(lines)


@dataclass(frozen=True)
class SampledScores:
    """Scores of a sample, `(rows, targets)` each.

    Attributes:
        rows (`list[int]`): the training rows.
        targets (`list[int]`): the training rows that are taken as targets.
        products (`numpy.ndarray`): q times inner products of features.
        exact_products (`numpy.ndarray`): q times inner products of whole gradients.
        index (`numpy.ndarray`): scores of the index.
        exact (`numpy.ndarray`): exact scores under the curvature.
    """

    rows: list[int]
    targets: list[int]
    products: np.ndarray
    exact_products: np.ndarray
    index: np.ndarray
    exact: np.ndarray


def measure_fidelity(
    model: FeaturizedModel,
    of: Literal["index"] | int | FeatureStore = "index",
    rows: int = 64,
    targets: int = 16,
    seed: int = 0,
    model_id: int | None = None,
) -> Fidelity:
    """Compare the scores of an index with exact ones, or cheaper scores with those of the index.

    Args:
        model (`FeaturizedModel`):
            The featurized model. All processes call this together.
        of (`str`, `int` or `FeatureStore`, *optional*, defaults to `"index"`):
            The scores that are measured. Those of the index are compared with exact ones. Those of the first bytes of
            every row (their number), or of another store of the same rows (see [`compare_stores`]), are compared with
            the index, on all rows.
        rows, targets:
            See [`~hf_trak.TrakAttributor.fidelity`].
        seed (`int`, *optional*, defaults to 0):
            Seed of the sample.
        model_id (`int`, *optional*):
            The checkpoint; by default the first.

    Returns:
        [`Fidelity`]: rank correlations and overlaps of the highest rows.

    Raises:
        IncompleteStoreError: the features or the rows are not at hand.
        ValueError: a number is out of range, or the features have no first bytes.
    """
    if of != "index":
        for one in model.scorer.ensemble(None):
            if isinstance(of, int):
                model.store.train(one).names_within(of)
        store = PrefixStore(model.store, of) if isinstance(of, int) else of
        return compare_stores(model.store, store, model.args, model.processes, targets, seed)
    scores, curvature, checkpoint = sampled_scores(model, rows, targets, seed, model_id)
    top = _top(scores.rows)
    return Fidelity(
        (checkpoint,),
        f"exact {curvature.kind}",
        str(model.store.config["feature_dtype"]),
        4 * model.layout.total,
        row_bytes(model.store),
        model.proj_dim,
        len(scores.rows),
        len(scores.targets),
        top,
        Agreement.of(scores.index, scores.exact, top),
        Agreement.of(scores.products, scores.exact_products, top),
    )


def _top(rows: Sequence[int]) -> int:
    """Return the number of highest rows in an overlap."""
    return min(_TOP, max(1, len(rows) // 4))


def sampled_scores(
    model: FeaturizedModel, rows: int, targets: int, seed: int, model_id: int | None
) -> tuple[SampledScores, Curvature, int]:
    """Compute the scores of a sample in four ways.

    Returns:
        The scores, the curvature and the id of the checkpoint.

    Raises:
        IncompleteStoreError: the features or the rows are not at hand.
        ValueError: a number is out of range.
    """
    model.require_rows("exact scores, which need their gradients")
    chosen_rows, chosen_targets = _sample(len(model.train_dataset), rows, targets, seed)
    checkpoint = model.scorer.ensemble(None if model_id is None else [model_id])[0]
    # The Gram matrix of the hybrid is one of all rows, which a sample lacks: compare with EK-FAC.
    exact = ExactScores(model, Exact(model.args.curvature.fitted_kind))
    source = model.source_of(checkpoint, {})
    exact.fit({checkpoint: source})
    curvature = fitted_curvature(exact, checkpoint)
    with model.weights(checkpoint, source):
        sample = _Sample(exact, curvature, checkpoint, chosen_rows, chosen_targets)
        return sample.scores(), curvature, checkpoint


def _sample(n: int, rows: int, targets: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw distinct training rows and targets, half of all rows as targets at most."""
    rows, targets = checked_int(rows, "rows", _LEAST_ROWS), checked_int(targets, "targets", 1)
    if n <= _LEAST_ROWS:
        raise ValueError(f"There are {n} training rows. Expected at least {_LEAST_ROWS + 1} to compare scores of.")
    order = np.random.Generator(np.random.Philox(seed)).permutation(n)
    count = min(targets, n // 2, n - _LEAST_ROWS)
    return sorted(map(int, order[count : count + rows])), sorted(map(int, order[:count]))


@dataclass(frozen=True)
class _Sample:
    """The drawn rows and targets under the weights that the model has now."""

    exact: ExactScores
    curvature: Curvature
    model_id: int
    rows: list[int]
    targets: list[int]

    @property
    def model(self) -> FeaturizedModel:
        return self.exact.model

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {
            **self.model.store.identity(self.model_id),
            "curvature": self.curvature.digest,
            "damping": str(self.exact.damping),
            "sample": content_digest({"rows": self.rows, "targets": self.targets}),
        }

    @cached_property
    def directory(self) -> Path:
        return self.model.store.output_dir / f"fidelity-{content_digest(self.identity)}"

    def scores(self) -> SampledScores:
        """Compute all four matrices. What is written on the way is removed again."""
        model = self.model
        features, q = _read_rows(model.store.train(self.model_id), self.rows)
        whole = self._shards(
            "targets", self.targets, model.layout.total, Preconditioning(identity_curvature(model.layout), 0.0),
            model.task, "target",
        )  # fmt: skip
        projected, products, scores = [], [], []
        for number, gradients in self._groups(whole):
            projected.append(self._projected(gradients))
            preconditioned = self.curvature.precondition(gradients, self.exact.damping)
            as_projected = gradients
            if model.args.curvature.whitened:
                as_projected = self.curvature.precondition(gradients, model.args.curvature.whitening_damping)
            products.append(self._exact(f"products-{number}", as_projected, model.task))
            scores.append(self._exact(f"scores-{number}", preconditioned, self.exact.train_task))
        model.processes.broadcast_from_main(lambda: shutil.rmtree(self.directory))
        targets = torch.cat(projected)
        return SampledScores(
            self.rows,
            self.targets,
            (features @ targets.T * q.unsqueeze(1)).double().numpy(),
            torch.cat(products, 1).double().numpy(),
            self._index_scores(features, q, targets).double().numpy(),
            torch.cat(scores, 1).double().numpy(),
        )

    def _groups(self, shards: ShardSet) -> Iterator[tuple[int, Tensor]]:
        """Read whole gradients of as many targets at a time as fit into memory twice, plain and preconditioned."""
        model = self.model
        together = max(1, int(model.args.curvature.memory * 2**30) // (8 * model.layout.total))
        for first in range(0, len(self.targets), together):
            last = min(first + together, len(self.targets)) - 1
            read = [shards.read(index) for index in range(shards.plan.shard_of(first), shards.plan.shard_of(last) + 1)]
            low = read[0].start
            whole = torch.cat([shard.grads for shard in read])[first - low : last + 1 - low]
            yield first, whole.to(model.device)

    def _projected(self, gradients: Tensor) -> Tensor:
        """Project whole gradients as the index does, with its storage dtype."""
        model = self.model
        projector = model.feature_map(self.model_id)
        sink = projector.sink(len(gradients), self.model_id, model.device)
        sink(0, gradients)
        features = sink.result() * projector.scale
        rotation = model.store.rotation(self.model_id)
        if rotation is not None:
            return rotation.apply(features).cpu()
        return features.to(model.store.feature_dtype).float().cpu()

    def _exact(self, name: str, targets: Tensor, task: AbstractModelOutput) -> Tensor:
        """Multiply the gradients of the drawn rows by those of targets, and by q: `(rows, targets)`."""
        shards = self._shards(name, self.rows, len(targets), TargetProducts(targets), task, "train")
        return torch.cat([shard.grads * shard.out_to_loss.unsqueeze(1) for shard in shards])

    def _index_scores(self, features: Tensor, q: Tensor, targets: Tensor) -> Tensor:
        scorer = self.model.scorer
        system = scorer.precondition(self.model_id, lambda: targets, len(targets))
        ((_, _, scores),) = score_blocks([[Shard(0, len(features), features, q)]], [system])
        return scores.cpu()

    def _shards(
        self, name: str, rows: list[int], width: int, gradients: GradientMap, task: AbstractModelOutput, side: Side
    ) -> ShardSet:
        """Compute a map of the gradients of some training rows: `(len(rows), width)`."""
        model = self.model
        size = max(1, min(model.args.batch_size, _SHARD_BYTES // (4 * width)))
        shards = ShardSet(
            self.directory, name, ShardPlan(len(rows), size), width, torch.float32, {**self.identity, "kind": name}
        )
        dataset: Any = model.train_dataset
        part = dataset.select(rows) if hasattr(dataset, "select") else Subset(dataset, rows)
        what = f"fidelity, {name}, checkpoint {self.model_id}"
        model.featurizer(task, gradients).fill(shards, part, self.model_id, side, what)
        return shards


_MOST_ROWS = 1 << 20


def compare_stores(
    source: FeatureStore,
    converted: FeatureStore,
    args: TrakConfig | None = None,
    processes: Processes | None = None,
    targets: int = 16,
    seed: int = 0,
) -> Fidelity:
    """Compare the scores of a converted store with those of the store that it was converted from.

    All processes call this together.

    Args:
        source (`FeatureStore`):
            The store that was converted.
        converted (`FeatureStore`):
            The result of [`~hf_trak.featurize.converting.convert_store`], or a
            [`~hf_trak.store.revised.PrefixStore`], the first bytes of the rows of `source`.
        args (`TrakConfig`, *optional*):
            Settings of the ridge regression. By default `TrakConfig()`.
        processes (`Processes`, *optional*):
            The processes that take part.
        targets (`int`, *optional*, defaults to 16):
            Number of training rows that are drawn as targets, half of all at most.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draw.

    Returns:
        [`Fidelity`]: rank correlations and overlaps of the highest rows.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is out of range, or there are fewer than 4 training rows.
        SingularGramError: the ridge is too small for these features.
    """
    args, processes = args or TrakConfig(), processes or Processes()
    rows, drawn = _sample(source.train_size, _MOST_ROWS, targets, seed)
    scores = []
    for store in (source, converted):
        scorer, ids = scorer_of(store, args, processes), converted.model_ids
        preconditioned = [
            scorer.precondition(model_id, partial(_target_features, source, store, model_id, drawn), len(drawn))
            for model_id in ids
        ]
        scores.append(_scores_of(scorer, ids, preconditioned, torch.tensor(rows), len(drawn)))
    before, after = (one.double().numpy() for one in scores)
    return Fidelity(
        tuple(converted.model_ids),
        str(source.config["feature_dtype"]),
        str(converted.config["feature_dtype"]),
        row_bytes(source),
        row_bytes(converted),
        converted.proj_dim,
        len(rows),
        len(drawn),
        _top(rows),
        Agreement.of(after, before, _top(rows)),
    )


def _read_rows(shards: ShardSet, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Read the features `(rows, k)` in float32 and q `(rows,)` of some rows."""
    features, q = [], []
    for row in rows:
        shard = shards.read(shards.plan.shard_of(row))
        features.append(shard.rows(row - shard.start, row - shard.start + 1).grads[0].float())
        q.append(shard.out_to_loss[row - shard.start])
    return torch.stack(features), torch.stack(q)


def row_bytes(store: FeatureStore) -> int:
    """Return the number of bytes of a row of features, with its scale and without the weight q."""
    form = store.code_format
    return store.proj_dim * store.feature_dtype.itemsize if form is None else form.row_bytes + 4


def _target_features(source: FeatureStore, store: FeatureStore, model_id: int, drawn: Sequence[int]) -> Tensor:
    """Read the features of the targets `(m, k)` in the coordinates of a store, float32."""
    features, _ = _read_rows(source.train(model_id), drawn)
    rotation = store.rotation(model_id) if source.code_format is None else None
    # The first bytes of rows are a store of their first columns.
    return features[:, : store.proj_dim] if rotation is None else rotation.apply(features)


def _scores_of(scorer: Scorer, ids: Sequence[int], targets: Sequence[Any], rows: Tensor, m: int) -> Tensor:
    """Compute the scores of some training rows `(rows, m)`, float32, in every process."""
    result = torch.zeros(len(rows), m)
    with scorer.processes.all_or_none():
        for start, stop, block in scorer.blocks(ids, targets):
            first, last = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
            result[first:last] = block[rows[first:last] - start].cpu()
    return scorer.processes.add(result)  # every row comes from one process, the others add zeros
