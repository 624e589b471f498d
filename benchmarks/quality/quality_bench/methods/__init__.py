"""Methods of attribution by name; each module holds those of one library."""

import importlib

from quality_bench.job import Method

LIBRARIES: dict[str, tuple[str, ...]] = {
    "hf_trak": (),
    "baselines": ("rank_bm25",),
    "traker": ("traker==0.3.2",),
    "dattri": ("dattri==0.3.0",),
    "dattri_llm": ("dattri-llm==0.1.0",),
    "kronfluence": ("kronfluence==1.0.1", "einops", "einconv", "opt-einsum"),
    "bergson": (
        "bergson==2.5.1", "jaxtyping", "wadler_lindig", "natsort", "petname", "simple-parsing", "docstring-parser",
        "ml_dtypes", "torchopt", "optree", "graphviz",
    ),
}  # fmt: skip
"""What is installed for each library, into a folder of its own, without what hf_trak's `recipes` extra brings."""


def methods(library: str) -> dict[str, Method]:
    """The methods of a library by name. The library must be importable."""
    return importlib.import_module(f"quality_bench.methods.with_{library}").METHODS
