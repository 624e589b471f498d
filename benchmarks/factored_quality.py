"""The two-sided map `factored` beside `sjlt` at equal bytes, on cases of the benchmark of quality with built banks.

    python benchmarks/quality build --cases gpt2 --work quality --downloads downloads
    python benchmarks/factored_quality.py gpt2 --work quality --downloads downloads

Of each index: LDS by share of dropped rows, for two seeds of the projection, and the rank correlation of inner
products of its features with exact ones, mean over targets and seeds.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "quality"))

import numpy as np
from quality_bench.case import Case
from quality_bench.each_case import each_case
from quality_bench.job import BATCH, Job

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation import Bank, evaluate_bank
from hf_trak.evaluation.bank_scores import judged_parts
from hf_trak.modelout_functions import get_task
from hf_trak.projectors.factored import two_sided_matrices

SEEDS = (0, 1)
STORAGE: dict[str, dict[str, Any]] = {
    "2,048 bytes (int4 × 4,096)": {"proj_dim": 4096, "feature_dtype": "int4"},
    "512 bytes (int2 × 2,048)": {"proj_dim": 2048, "feature_dtype": "int2"},
}
SIZES = (8, 12, 16, 32)
"""p; the layers of these models are too small for 64, and some for 16 and 32."""


def reduced(job: Job, size: int) -> tuple[float, int]:
    """Return the share of the parameters that is in large matrices, and how many numbers are left of a gradient."""
    shapes = [tuple(parameter.shape) for parameter in job.model.parameters()]
    total = sum(parameter.numel() for parameter in job.model.parameters())
    matrices = two_sided_matrices(shapes, size)
    inside = sum(one.height * one.width for one in matrices)
    return inside / total, total - inside + len(matrices) * size**2


def table(case: Case, bank: Bank, job: Job) -> None:
    """Print a table as it grows."""
    parts = judged_parts(bank)
    shares = [f"LDS, {part.removeprefix('drop-')}" for part in parts]
    head = [case.title, "in matrices", "numbers before sjlt", "products", *shares]
    total = sum(parameter.numel() for parameter in job.model.parameters())
    for storage, options in STORAGE.items():
        print(f"\n{storage}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
        indexes: list[tuple[str, float, int, dict[str, Any]]] = [("`sjlt`", 0.0, total, {})]
        for size in SIZES:
            share, left = reduced(job, size)
            if not share:
                continue
            settings = {"proj_type": f"factored-{size}"}
            indexes.append((f"`factored`, p = {size}", share, left, settings))
        for name, share, left, settings in indexes:
            products, found = [], []
            for seed in SEEDS:
                one, lds = judged(case, bank, job, {**options, **settings, "seed": seed})
                products.append(one)
                found.append(lds)
            cells = [f"{share:.0%}", f"{left:,}", f"{np.mean(products):.2f}"]
            cells += [" / ".join(f"{lds[part]:.3f}" for lds in found) for part in parts]
            print(f"| {' | '.join([name, *cells])} |", flush=True)


def judged(case: Case, bank: Bank, job: Job, options: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Make an index; return its rank correlation with exact products, and LDS by part of the bank."""
    with tempfile.TemporaryDirectory() as directory:
        config = TrakConfig(directory, per_device_batch_size=BATCH, **options)
        attributor = TrakAttributor(job.model, config, case.train, task=get_task(case.task)).featurize()
        scored = attributor.attribute(case.targets, top_k=None).with_format("numpy")
        scores = np.stack(scored["trak_scores"][:]).T.astype(np.float64)
        products = attributor.fidelity(rows=64, targets=16).projection.mean_spearman
    lds = {one.part: one.lds.value for one in evaluate_bank(bank, {"index": scores}, parts=judged_parts(bank))}
    return products, lds


if __name__ == "__main__":
    each_case(__doc__, table)
