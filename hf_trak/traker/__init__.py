"""The `trak` API: `TRAKer`, and the parts that only it uses.

Start with `traker`, whose methods stand in the order in which a script calls them. `open_checkpoint` and `batch_rows`
say which rows a batch belongs to, `gradient_pipeline` turns it into projected gradients, `requirements` says what a
step needs of the steps before it, and `ensemble` averages over checkpoints. `plugins` and `run_identity` deal with
classes of users. `savers` and `score_computers` have contracts and implementations; `products` and `utils` have the
functions that the API documents. The top-level modules `savers`, `score_computers` and `utils` are import paths only.

This package may import any other except `attributor`, `callbacks`, `featurize`, `evaluation`, `hub`, `report`,
`recipe_kit` and `cli`.
"""

from hf_trak.traker.traker import TRAKer

__all__ = ["TRAKer"]
