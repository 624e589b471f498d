"""The `trak` API: `TRAKer`, and the parts that only it uses.

Start with `traker`, whose methods stand in the order in which a script calls them. `batch_rows` says
which rows a batch belongs to and what a step needs of the steps before it. `plugins` turns a batch into projected
gradients, and deals with classes of users. `savers` and `score_computers` have contracts and implementations. The
top-level modules `savers` and `score_computers` are import paths only.

This package may import any other except `attributor`, `callbacks`, `featurize`, `evaluation`, `hub`, `report` and
`cli`.
"""

from hf_trak.traker.traker import TRAKer

__all__ = ["TRAKer"]
