"""TRAK from codes: how good scores are for the bytes that an index keeps per row.

For every number of columns, rows and targets are featurized once in float32; rows are then rotated and encoded as a
store with codes does it, and the ridge regression runs on what is decoded.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from hf_trak import TrakAttributor
from hf_trak.config import BITS
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.store.codes import CodedRows, CodeFormat, Rotation
from quality_bench.job import Cost, Job, Method, Scores

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
"""Bytes per row."""
FORMS = ("float32", "int8", "int4", "int2", "int1")
RIDGE, PLAIN, PREFIX = "", ", no ridge", ", first 512 bytes"


def variant(form: str, size: int, kind: str = RIDGE) -> str:
    """Name of the scores from rows of `size` bytes in one form."""
    return f"{form}, {size} B{kind}"


def by_bytes(attributor: Callable[..., TrakAttributor], models: Callable[[Job], list[nn.Module]]) -> Method:
    """Make a method whose variants are the forms and sizes, with and without the ridge regression.

    Args:
        attributor: makes the attributor of a job.
        models: gives the checkpoint.
    """

    def attribute(job: Job, cost: Cost) -> Scores:
        (model,) = models(job)
        found: Scores = {}
        for columns in sorted({size * 8 // BITS[form] for form in FORMS for size in SIZES}):
            own = attributor(job, model, False, proj_dim=columns)
            rows, q = _features(own, job, "train")
            targets, _ = _features(own, job, "targets")
            rotation = Rotation(columns, own.args.seed, 0)
            for form in FORMS:
                size = columns * BITS[form] // 8
                if size not in SIZES:
                    continue
                if form == "float32":
                    kept, asked, prefix = rows, targets, None
                else:
                    codes = CodedRows.encode(rotation.apply(rows), CodeFormat(BITS[form], columns))
                    kept, asked, prefix = codes.decode(), rotation.apply(targets), codes.first(512).decode()
                lam = ridge_lambda(float(kept.double().square().sum()), *kept.shape, own.args.lambda_relative)
                solved = _preconditioned(kept.double(), asked.double(), lam)
                found[variant(form, size)] = _weighted(kept.double() @ solved.T, q)
                found[variant(form, size, PLAIN)] = _weighted((kept @ asked.T).double(), q)
                if prefix is not None and size > 512:
                    part = solved[:, : prefix.shape[1]]
                    found[variant(form, size, PREFIX)] = _weighted(prefix.double() @ part.T, q)
        cost.bytes_per_row = float(max(SIZES))
        return found

    return attribute


def _features(own: TrakAttributor, job: Job, part: str) -> tuple[Tensor, Tensor]:
    """Features `(rows, k)` and q `(rows,)` of training rows or targets, each from a store of its own."""
    args = replace(own.args, output_dir=str(job.directory / f"{part}-{own.args.width}"))
    one = TrakAttributor(own.model, args, getattr(job.case, part), task=own.task)
    shards = list(_filled(one))
    return torch.cat([shard.grads for shard in shards]), torch.cat([shard.out_to_loss for shard in shards])


def _filled(own: TrakAttributor) -> Iterator:
    """The shards of the rows, without a Gram matrix."""
    own.features.prepare_store()
    with own.features.weights(0, None, register=True):
        shards = own.features.store.train(0)
        own.features.featurizer().fill(shards, own.train_dataset, 0, "train", "rows")
    return iter(shards)


def _preconditioned(rows: Tensor, targets: Tensor, lam: float) -> Tensor:
    """t (XᵀX + λI)⁻¹ `(m, k)`, from the smaller system."""
    if rows.shape[1] <= rows.shape[0]:
        return RidgeSystem(rows.T @ rows, lam).solve(targets)
    weights = RidgeSystem(rows @ rows.T, lam).solve(targets @ rows.T)
    return (targets - weights @ rows) / lam


def _weighted(products: Tensor, q: Tensor) -> np.ndarray:
    return (products * q.double().unsqueeze(1)).numpy()
