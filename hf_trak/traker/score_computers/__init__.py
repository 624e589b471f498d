"""Score computers of the `trak` API: the matrix products that turn gradients into features, and features into scores.

Start with `base`, the contract; `basic` has the two that the API documents. This package may import `hf_trak.scores`,
`hf_trak.runtime`, `hf_trak.traker.score_computers.basic` and `hf_trak.errors`.
"""

from hf_trak.traker.score_computers.basic import (
    AbstractScoreComputer,
    BasicScoreComputer,
    BasicSingleBlockScoreComputer,
)

__all__ = ["AbstractScoreComputer", "BasicScoreComputer", "BasicSingleBlockScoreComputer"]
