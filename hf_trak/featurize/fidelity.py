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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from hf_trak.config import TrakConfig
from hf_trak.curvature.curvature import Curvature, identity_curvature
from hf_trak.curvature.files import CURVATURE_FILE, CurvatureFiles
from hf_trak.curvature.maps import GradientMap, Preconditioning, TargetProducts
from hf_trak.curvature.report import CurvatureReport
from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.featurize.converting import scorer_of
from hf_trak.featurize.definition import fitted_kind, whitening_damping
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.methods import Exact
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.modelout_functions.base import Side
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.streaming import score_blocks
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
        ValueError: the configured curvature is the identity, of which there is nothing to report.
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
    """How well two matrices of scores agree, target by target.

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
        ranks = [np.apply_along_axis(_ranks, 0, one) for one in (found, exact)]
        best = [np.argsort(-one, axis=0, kind="stable")[:top] for one in (found, exact)]
        return cls(
            tuple(_correlation(a, b) for a, b in zip(ranks[0].T, ranks[1].T, strict=True)),
            tuple(len(set(a) & set(b)) / top for a, b in zip(best[0].T.tolist(), best[1].T.tolist(), strict=True)),
        )

    @property
    def mean_spearman(self) -> float:
        """Mean over targets."""
        return float(np.mean(self.spearman))

    @property
    def mean_overlap(self) -> float:
        """Mean over targets."""
        return float(np.mean(self.overlap))

    @property
    def standard_error(self) -> float:
        """Standard error of `mean_spearman` over targets; infinite for one target."""
        m = len(self.spearman)
        return float(np.std(self.spearman, ddof=1)) / math.sqrt(m) if m > 1 else math.inf


@dataclass(frozen=True)
class Fidelity:
    """How well the scores of an index agree with exact ones.

    Attributes:
        model_id (`int`): the checkpoint.
        rows (`int`): number of training rows that were compared.
        targets (`int`): number of targets, which are training rows, too.
        top (`int`): number of highest rows in the overlaps.
        features (`int`): k, the number of features per row.
        curvature (`str`): kind of the curvature of the exact scores.
        projection ([`Agreement`]): inner products of features, beside those of whole gradients.
        scores ([`Agreement`]): scores of the index, beside exact scores under the curvature.
    """

    model_id: int
    rows: int
    targets: int
    top: int
    features: int
    curvature: str
    projection: Agreement
    scores: Agreement

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain JSON."""
        content = asdict(self)
        for name, one in (("projection", self.projection), ("scores", self.scores)):
            content[name] |= {"mean_spearman": one.mean_spearman, "mean_overlap": one.mean_overlap}
        return content

    def __str__(self) -> str:
        """Say both agreements in a sentence each."""

        def figures(one: Agreement) -> str:
            error = f" ± {one.standard_error:.2f}" if math.isfinite(one.standard_error) else ""
            return f"{one.mean_spearman:.2f}{error}, {one.mean_overlap:.0%} of the top {self.top}"

        return "\n".join(
            [
                f"Fidelity of checkpoint {self.model_id}, {self.rows} training rows × {self.targets} targets (rank "
                f"correlation per target, mean ± standard error; chance: 0, {self.top / self.rows:.0%}):",
                f"  {self.features:,} features beside whole gradients: {figures(self.projection)}",
                f"  scores of the index beside exact {self.curvature} scores: {figures(self.scores)}",
            ]
        )


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
    model: FeaturizedModel, rows: int = 64, targets: int = 16, seed: int = 0, model_id: int | None = None
) -> Fidelity:
    """Compare scores from stored features with exact ones, see [`~hf_trak.TrakAttributor.fidelity`].

    Args:
        model (`FeaturizedModel`):
            The featurized model. All processes call this together.
        rows, targets, seed, model_id:
            As there.

    Raises:
        As there.
    """
    scores, curvature, checkpoint = sampled_scores(model, rows, targets, seed, model_id)
    top = min(_TOP, max(1, len(scores.rows) // 4))
    return Fidelity(
        model_id=checkpoint,
        rows=len(scores.rows),
        targets=len(scores.targets),
        top=top,
        features=model.proj_dim,
        curvature=curvature.kind,
        projection=Agreement.of(scores.products, scores.exact_products, top),
        scores=Agreement.of(scores.index, scores.exact, top),
    )


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
    if getattr(model.train_dataset, "absent", False):
        raise IncompleteStoreError(
            "The training rows of this index are not at hand. Expected them, since exact scores need their gradients. "
            "Pass them as `train_dataset`."
        )
    chosen_rows, chosen_targets = _sample(len(model.train_dataset), rows, targets, seed)
    checkpoint = model.scorer.ensemble(None if model_id is None else [model_id])[0]
    # The Gram matrix of the hybrid is one of all rows, which a sample lacks: compare with EK-FAC.
    exact = ExactScores(model, Exact(fitted_kind(model.args.curvature)))
    source = model.source_of(checkpoint, {})
    exact.fit({checkpoint: source})
    curvature = fitted_curvature(exact, checkpoint)
    with model.weights(checkpoint, source):
        sample = _Sample(model, checkpoint, chosen_rows, chosen_targets, exact, curvature)
        return sample.scores(), curvature, checkpoint


def _sample(n: int, rows: int, targets: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw distinct training rows and targets, half of all rows as targets at most."""
    rows, targets = checked_int(rows, "rows", _LEAST_ROWS), checked_int(targets, "targets", 1)
    if n <= _LEAST_ROWS:
        raise ValueError(f"There are {n} training rows. Expected at least {_LEAST_ROWS + 1} to compare scores of.")
    order = np.random.Generator(np.random.Philox(checked_int(seed, "seed", 0))).permutation(n)
    count = min(targets, n // 2, n - _LEAST_ROWS)
    return sorted(map(int, order[count : count + rows])), sorted(map(int, order[:count]))


class _Sample:
    """The drawn rows and targets under the weights that the model has now."""

    def __init__(
        self,
        model: FeaturizedModel,
        model_id: int,
        rows: list[int],
        targets: list[int],
        exact: ExactScores,
        curvature: Curvature,
    ) -> None:
        self._model = model
        self._train_task = exact.train_task
        self._damping = exact.damping
        self._curvature = curvature
        self._model_id = model_id
        self._rows = rows
        self._targets = targets
        self._identity = {
            **model.store.identity(model_id),
            "curvature": curvature.digest,
            "damping": str(exact.damping),
            "sample": content_digest({"rows": rows, "targets": targets}),
        }
        self._directory: Path = model.store.output_dir / f"fidelity-{content_digest(self._identity)}"

    def scores(self) -> SampledScores:
        """Compute all four matrices. What is written on the way is removed again."""
        model = self._model
        features, q = self._stored_features()
        whole = self._shards(
            "targets", self._targets, model.layout.total, Preconditioning(identity_curvature(model.layout), 0.0),
            model.task, "target",
        )  # fmt: skip
        projected, products, scores = [], [], []
        for number, gradients in self._groups(whole):
            projected.append(self._projected(gradients))
            preconditioned = self._curvature.precondition(gradients, self._damping)
            as_projected = gradients
            if model.args.whitened:
                as_projected = self._curvature.precondition(gradients, whitening_damping(model.args))
            products.append(self._exact(f"products-{number}", as_projected, model.task))
            scores.append(self._exact(f"scores-{number}", preconditioned, self._train_task))
        model.processes.broadcast_from_main(lambda: shutil.rmtree(self._directory))
        targets = torch.cat(projected)
        return SampledScores(
            self._rows,
            self._targets,
            (features @ targets.T * q.unsqueeze(1)).double().numpy(),
            torch.cat(products, 1).double().numpy(),
            self._index_scores(features, q, targets).double().numpy(),
            torch.cat(scores, 1).double().numpy(),
        )

    def _stored_features(self) -> tuple[Tensor, Tensor]:
        """Read the features `(rows, k)` and q `(rows,)` of the drawn rows."""
        shards = self._model.store.train(self._model_id)
        features, q = [], []
        for row in self._rows:
            shard = shards.read(shards.plan.shard_of(row))
            features.append(shard.rows(row - shard.start, row - shard.start + 1).grads[0].float())
            q.append(shard.out_to_loss[row - shard.start])
        return torch.stack(features), torch.stack(q)

    def _groups(self, shards: ShardSet) -> Iterator[tuple[int, Tensor]]:
        """Read whole gradients of as many targets at a time as fit into memory twice, plain and preconditioned."""
        model = self._model
        together = max(1, int(model.args.exact_memory * 2**30) // (8 * model.layout.total))
        for first in range(0, len(self._targets), together):
            last = min(first + together, len(self._targets)) - 1
            read = [shards.read(index) for index in range(shards.plan.shard_of(first), shards.plan.shard_of(last) + 1)]
            low = read[0].start
            whole = torch.cat([shard.grads for shard in read])[first - low : last + 1 - low]
            yield first, whole.to(model.device)

    def _projected(self, gradients: Tensor) -> Tensor:
        """Project whole gradients as the index does, with its storage dtype."""
        model = self._model
        projector = model.feature_map(self._model_id)
        sink = projector.sink(len(gradients), self._model_id, model.device)
        sink(0, gradients)
        features = sink.result() * projector.scale
        rotation = model.store.rotation(self._model_id)
        if rotation is not None:
            return rotation.apply(features).cpu()
        return features.to(model.store.feature_dtype).float().cpu()

    def _exact(self, name: str, targets: Tensor, task: AbstractModelOutput) -> Tensor:
        """Multiply the gradients of the drawn rows by those of targets, and by q: `(rows, targets)`."""
        shards = self._shards(name, self._rows, len(targets), TargetProducts(targets), task, "train")
        return torch.cat([shard.grads * shard.out_to_loss.unsqueeze(1) for shard in shards])

    def _index_scores(self, features: Tensor, q: Tensor, targets: Tensor) -> Tensor:
        scorer = self._model.scorer
        system = scorer.precondition(self._model_id, lambda: targets, len(targets))
        ((_, _, scores),) = score_blocks([[Shard(0, len(features), features, q)]], [system])
        return scores.cpu()

    def _shards(
        self, name: str, rows: list[int], width: int, gradients: GradientMap, task: AbstractModelOutput, side: Side
    ) -> ShardSet:
        """Compute a map of the gradients of some training rows: `(len(rows), width)`."""
        model = self._model
        size = max(1, min(model.args.per_device_batch_size, _SHARD_BYTES // (4 * width)))
        shards = ShardSet(
            self._directory, name, ShardPlan(len(rows), size), width, torch.float32, {**self._identity, "kind": name}
        )
        dataset: Any = model.train_dataset
        part = dataset.select(rows) if hasattr(dataset, "select") else Subset(dataset, rows)
        what = f"fidelity, {name}, checkpoint {self._model_id}"
        model.featurizer(task, gradients).fill(shards, part, self._model_id, side, what)
        return shards


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank numbers from 1, equal ones by their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: np.ndarray = np.cumsum(counts) - (counts - 1) / 2
    return means[places]


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Correlation of two lists of ranks; 0 where one is constant."""
    first, second = first - first.mean(), second - second.mean()
    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norm if norm > 0 else 0.0


_MOST_ROWS = 1 << 20

_LEAST_COMPARED_ROWS = 4


@dataclass(frozen=True)
class ConversionFidelity:
    """How well scores of a converted store agree with those of its source.

    Attributes:
        before (`str`): storage of the features of the source.
        after (`str`): that of the converted ones.
        bytes_before (`int`): bytes of a row of features of the source, with its scale.
        bytes_after (`int`): those of a converted one.
        rows (`int`): number of training rows that were compared.
        targets (`int`): number of targets, which are other training rows.
        top (`int`): number of highest rows in the overlap.
        scores (`Agreement`): converted scores beside those of the source.
    """

    before: str
    after: str
    bytes_before: int
    bytes_after: int
    rows: int
    targets: int
    top: int
    scores: Agreement

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain JSON."""
        means = {"mean_spearman": self.scores.mean_spearman, "mean_overlap": self.scores.mean_overlap}
        return {**asdict(self), "scores": {**asdict(self.scores), **means}}

    def __str__(self) -> str:
        """Say in a sentence what was saved, and in another one what it costs."""
        error = f" ± {self.scores.standard_error:.3f}" if math.isfinite(self.scores.standard_error) else ""
        return "\n".join(
            [
                f"{self.before} to {self.after}: {self.bytes_before:,} to {self.bytes_after:,} bytes per row, "
                f"{self.bytes_before / self.bytes_after:.1f} times fewer.",
                f"Scores beside those before, {self.rows:,} training rows × {self.targets} others as targets: rank "
                f"correlation {self.scores.mean_spearman:.3f}{error}, {self.scores.mean_overlap:.0%} of the top "
                f"{self.top} (chance: 0, {self.top / self.rows:.0%}).",
            ]
        )


def compare_stores(
    source: FeatureStore,
    converted: FeatureStore,
    args: TrakConfig | None = None,
    processes: Processes | None = None,
    targets: int = 16,
    seed: int = 0,
) -> ConversionFidelity:
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
        [`ConversionFidelity`]: rank correlations and overlaps of the highest rows.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is out of range, or there are fewer than 4 training rows.
        SingularGramError: the ridge is too small for these features.
    """
    args, processes = args or TrakConfig(), processes or Processes()
    rows, drawn = _sampled_targets(source.train_size, targets, seed)
    scores = []
    for store in (source, converted):
        scorer, ids = scorer_of(store, args, processes), converted.model_ids
        preconditioned = [
            scorer.precondition(model_id, _targets(source, store, model_id, drawn), len(drawn)) for model_id in ids
        ]
        scores.append(_scores_of(scorer, ids, preconditioned, rows, len(drawn)))
    before, after = scores
    top = min(_TOP, max(1, len(rows) // 4))
    return ConversionFidelity(
        str(source.config["feature_dtype"]),
        str(converted.config["feature_dtype"]),
        row_bytes(source),
        row_bytes(converted),
        len(rows),
        len(drawn),
        top,
        Agreement.of(after.double().numpy(), before.double().numpy(), top),
    )


def row_bytes(store: FeatureStore) -> int:
    """Number of bytes of a row of features, with its scale, without the weight q."""
    form = store.code_format
    return store.proj_dim * store.feature_dtype.itemsize if form is None else form.row_bytes + 4


def _sampled_targets(n: int, targets: int, seed: int) -> tuple[Tensor, list[int]]:
    """Draw targets among n training rows, and take the others to be compared, or a sample of very many."""
    count = checked_int(targets, "targets", 1)
    if n < _LEAST_COMPARED_ROWS:
        raise ValueError(f"There are {n} training rows. Expected at least {_LEAST_ROWS} to compare scores of.")
    order = np.random.Generator(np.random.Philox(checked_int(seed, "seed", 0))).permutation(n)
    count = min(count, n // 2)
    return torch.from_numpy(np.sort(order[count : count + _MOST_ROWS])), sorted(map(int, order[:count]))


def _targets(source: FeatureStore, store: FeatureStore, model_id: int, drawn: Sequence[int]) -> Callable[[], Tensor]:
    """Return what reads the features of the targets `(m, k)` in the coordinates of a store, float32."""

    def read() -> Tensor:
        shards = source.train(model_id)
        found = []
        for row in drawn:
            shard = shards.read(shards.plan.shard_of(row))
            found.append(shard.rows(row - shard.start, row - shard.start + 1).grads.float())
        features = torch.cat(found)
        rotation = store.rotation(model_id) if source.code_format is None else None
        # The first bytes of rows are a store of their first columns.
        return features[:, : store.proj_dim] if rotation is None else rotation.apply(features)

    return read


def _scores_of(scorer: Scorer, ids: Sequence[int], targets: Sequence[Any], rows: Tensor, m: int) -> Tensor:
    """Compute the scores of some training rows `(rows, m)`, float32, in every process."""
    result = torch.zeros(len(rows), m)
    with scorer.processes.all_or_none():
        for start, stop, block in scorer.blocks(ids, targets):
            first, last = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
            result[first:last] = block[rows[first:last] - start].cpu()
    return scorer.processes.add(result)  # every row comes from one process, the others add zeros
