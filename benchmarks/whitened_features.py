"""Whitened features beside plain ones, on cases of the benchmark of quality whose banks are built.

    python benchmarks/quality build --cases gpt2 --work quality --downloads downloads
    python benchmarks/whitened_features.py gpt2 --work quality --downloads downloads

Of each index: LDS by share of dropped rows, the rank correlation of its scores with exact ones under EK-FAC, mean over
targets, and that of inner products of its features with exact ones, which `featurize` warns of below .5.
"""

import sys
import tempfile
import time
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
from hf_trak.featurize.fidelity import Agreement
from hf_trak.modelout_functions import get_task

WIDE = {"proj_dim": 16384, "feature_dtype": "int4"}
INDEXES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whitened": {"whitened": True},
    "whitened, no ridge": {"whitened": True, "lambda_reg": 1e9},
    "plain, k = 16,384": WIDE,
    "whitened, k = 16,384": {"whitened": True, **WIDE},
}
"""Settings of every index. A ridge that is larger than all eigenvalues leaves inner products of features."""


def scores_of(attributor: TrakAttributor, case: Case, **options: Any) -> np.ndarray:
    """Return scores `(n, m)`."""
    scored = attributor.attribute(case.targets, top_k=None, **options).with_format("numpy")
    return np.stack(scored["trak_scores"][:]).T.astype(np.float64)


def table(case: Case, bank: Bank, job: Job) -> None:
    """Print a table as it grows."""
    parts = judged_parts(bank)
    shares = [f"LDS, {part.removeprefix('drop-')}" for part in parts]
    head = [case.title, "products", "beside EK-FAC", *shares, "seconds"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        args = {"per_device_batch_size": BATCH, "disable_tqdm": True}

        def attributor(name: str, **options: Any) -> TrakAttributor:
            place = str(Path(directory) / name.replace(" ", "-"))
            task = get_task(job.case.task)
            return TrakAttributor(job.model, TrakConfig(place, **args, **options), job.case.train, task=task)

        exact = scores_of(attributor("exact"), case, method="exact")
        for name, options in INDEXES.items():
            one, begun = attributor(name, **options).featurize(), time.perf_counter()
            found = scores_of(one, case)
            seconds = time.perf_counter() - begun
            products = one.fidelity(rows=64, targets=16).projection.mean_spearman
            beside = Agreement.of(found, exact, top=10).mean_spearman
            lds = {each.part: each.lds.value for each in evaluate_bank(bank, {name: found}, parts=parts)}
            cells = [
                name,
                f"{products:.2f}",
                f"{beside:.2f}",
                *(f"{lds[part]:.3f}" for part in parts),
                f"{seconds:.0f}",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    each_case(__doc__, table)
