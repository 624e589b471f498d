"""Scores from which a shortlist may be drawn, beside exact EK-FAC scores: matrices `(n, m)`, kept in a file."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak import Exact, TrakAttributor
from hf_trak.config import BITS
from hf_trak.curvature.maps import WhitenedProjection
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.fidelity import fitted_curvature
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.store.codes import CodedRows, CodeFormat, Rotation
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from quality_bench.case import Case
from quality_bench.job import Job
from quality_bench.methods.with_baselines import embedded, normalized, words
from quality_bench.methods.with_hf_trak import attributor

EXACT = "exact EK-FAC"
INDEX = "int4 × 4096"
"""The default index."""
FORMS = (
    ("float32", 4096), ("int4", 4096), ("int2", 4096), ("int1", 4096), ("int2", 8192), ("int1", 8192), ("int1", 16384),
)  # fmt: skip
RIDGE, PLAIN, UNIT_RIDGE, UNIT = "ridge", "no ridge", "unit norm, ridge", "unit norm, no ridge"
LAMBDAS = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Relative λ between the default and no ridge."""
WHITENED = {"whitened": 0.1, "each block scaled": 1e6}
"""Damping of the curvature whose root gradients are divided by. With much damping only the mean of a block is left."""
BM25, EMBEDDINGS = "BM25", "embedding cosine"

Scores = dict[str, np.ndarray]


def scored(case: Case, work: Path) -> tuple[Scores, dict[str, float]]:
    """Compute all scores of a case, or read them.

    Returns:
        Matrices by name, and the seconds of the exact pass and of the index.
    """
    path = work / "shortlist"
    if not (path / "seconds.json").is_file():
        path.mkdir(parents=True, exist_ok=True)
        found, seconds = _computed(case, work)
        np.savez(
            path / "scores.npz", allow_pickle=False, **{name: one.astype(np.float32) for name, one in found.items()}
        )
        (path / "seconds.json").write_text(json.dumps(seconds))
    scores = dict(np.load(path / "scores.npz", allow_pickle=False))
    return scores, json.loads((path / "seconds.json").read_text())


def refined(case: Case, work: Path) -> tuple[np.ndarray, float]:
    """Compute exact scores of refined targets, with the defaults of `refine="cg"`, or read them.

    Returns:
        The scores `(n, m)`, and the seconds that they take once the curvature is fitted.
    """
    path = work / "shortlist" / "refined.npz"
    if not path.is_file():
        seconds: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as scratch:
            job = Job(case, Path(scratch), work)
            own = attributor(job, job.model, False, curvature="ekfac")
            own.fit_curvature()
            scores = _timed(seconds, "score", lambda: _exact(own, job, refine="cg"))
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, allow_pickle=False, scores=scores.astype(np.float32), seconds=np.array(seconds["score"]))
    found = np.load(path, allow_pickle=False)
    return found["scores"], float(found["seconds"])


def _computed(case: Case, work: Path) -> tuple[Scores, dict[str, float]]:
    found: Scores = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(case, Path(scratch), work)
        job.model  # noqa: B018 - trained before time is measured
        own = attributor(job, job.model, False, curvature="ekfac")
        _timed(seconds, "exact, fit", own.fit_curvature)
        found[EXACT] = _timed(seconds, "exact, score", lambda: _exact(own, job))
        found |= _whitened(own, job)
        for columns in sorted({columns for _, columns in FORMS}):
            one = attributor(job, job.model, False, proj_dim=columns, feature_dtype="float32")
            rows, q = _timed(seconds, f"rows × {columns}", lambda one=one: _features(one, job, "train"))
            targets, _ = _features(one, job, "targets")
            rotation = Rotation(columns, one.args.seed, 0)
            for form in (form for form, wanted in FORMS if wanted == columns):
                kept, asked = rows, targets
                if form != "float32":
                    kept = CodedRows.encode(rotation.apply(rows), CodeFormat(BITS[form], columns)).decode()
                    asked = rotation.apply(targets)
                for kind, values in _forms(kept, asked, one.args.lambda_relative):
                    found[f"{form} × {columns}, {kind}"] = (values * q[:, None]).numpy()
                    if kind == UNIT:
                        found[f"{form} × {columns}, {kind}, without q"] = values.numpy()
        found[EMBEDDINGS] = (normalized(embedded(job, case.train)) @ normalized(embedded(job, case.targets)).T).numpy()
        if case.texts is not None:
            found[BM25] = _timed(seconds, BM25, lambda: bm25(case.texts(case.train), case.texts(case.targets)))
    return found, seconds


def bm25(train: list[str], targets: list[str]) -> np.ndarray:
    """Okapi BM25 of training texts, with the texts of targets as queries: `(n, m)`."""
    from rank_bm25 import BM25Okapi  # cases of images do without it

    index = BM25Okapi([words(text) for text in train])
    return np.stack([index.get_scores(words(text)) for text in targets], axis=1)


def _forms(rows: Tensor, targets: Tensor, relative: float) -> Iterator[tuple[str, Tensor]]:
    """Products of rows `(n, k)` with targets, with and without the ridge: `(n, m)`. Scores still lack q."""
    unit = normalized(rows)
    for lam, name in ((relative, RIDGE), *((value, f"ridge, λ = {value:g}") for value in LAMBDAS)):
        yield name, _ridge(rows, targets, lam)
    yield PLAIN, rows @ targets.T
    yield UNIT_RIDGE, _ridge(unit, targets, relative)
    yield UNIT, unit @ targets.T


def _ridge(rows: Tensor, targets: Tensor, relative: float) -> Tensor:
    """X (XᵀX + λI)⁻¹ tᵀ, from the smaller system."""
    rows, targets = rows.double(), targets.double()
    n, k = rows.shape
    lam = ridge_lambda(float(rows.square().sum()), n, k, relative)
    if k <= n:
        return (rows @ RidgeSystem(rows.T @ rows, lam).solve(targets).T).float()
    return RidgeSystem(rows @ rows.T, lam).solve(targets @ rows.T).T.float()


def _exact(own: TrakAttributor, job: Job, refine: str | None = None) -> np.ndarray:
    """Exact scores of all rows: `(n, m)`."""
    scored = own.attribute(job.case.targets, top_k=None, method=Exact(refine=refine)).with_format("numpy")
    return np.stack(scored["trak_scores"][:]).T


def _whitened(own: TrakAttributor, job: Job) -> Scores:
    """Inner products of sketched gradients under a curvature, whose exact inner products are the exact scores."""
    exact = ExactScores(own.features)
    curvature = fitted_curvature(exact, 0)
    found: Scores = {}
    for name, damping in WHITENED.items():
        sketch = WhitenedProjection(curvature, damping, own.features.projector())
        parts = []
        for rows, task, side in ((job.case.train, exact.train_task, "train"), (job.case.targets, own.task, "target")):
            directory = job.directory / f"{name}-{side}".replace(" ", "-")
            shards = ShardSet(directory, "sketch", ShardPlan(len(rows), 1024), sketch.proj_dim, torch.float32, {})
            own.features.featurizer(task, sketch).fill(shards, rows, 0, side, name)
            parts.append(torch.cat([shard.grads for shard in shards]))
        rotation, form = Rotation(sketch.proj_dim, own.args.seed, 0), CodeFormat(4, sketch.proj_dim)
        codes, asked = CodedRows.encode(rotation.apply(parts[0]), form).decode(), rotation.apply(parts[1])
        found[f"{INDEX}, {name}"] = (codes @ asked.T).numpy()
        for relative in LAMBDAS[1:4]:
            found[f"{INDEX}, {name}, λ = {relative:g}"] = _ridge(codes, asked, relative).numpy()
    return found


def _features(own: TrakAttributor, job: Job, part: str) -> tuple[Tensor, Tensor]:
    """Features `(rows, k)` and q `(rows,)` of training rows or targets, each from a store of its own."""
    args = replace(own.args, output_dir=str(job.directory / f"{part}-{own.args.width}"))
    one = TrakAttributor(own.model, args, getattr(job.case, part), task=own.task)
    one.features.prepare_store()
    with one.features.weights(0, None, register=True):
        shards = one.features.store.train(0)
        one.features.featurizer().fill(shards, one.train_dataset, 0, "train", "rows")
    found = list(shards)
    return torch.cat([shard.grads for shard in found]), torch.cat([shard.out_to_loss for shard in found])


def _timed(seconds: dict[str, float], name: str, run: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = run()
    seconds[name] = time.perf_counter() - started
    return result
