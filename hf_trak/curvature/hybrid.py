"""The hybrid of EK-FAC and TRAK: the empirical Gram matrix of TRAK over the Kronecker curvature instead of over λI.

EK-FAC inverts P, a model's Fisher information with the structure of its layers. TRAK inverts GᵀG + λI, with G the
gradients of all n training rows: no structure is assumed, but of P dimensions the data fix n at most, and λI fills in
for the rest. The hybrid lets P fill in instead:

    H = P + GᵀG / λ

G should be that of the loss' Gauss-Newton matrix, Σ h ∇f ∇fᵀ, rather than of its gradients: rows come as √h ∇f with a
weight, so that weight · row = −∇ℓ (see `hf_trak.modelout_functions.loss.GaussNewtonModelOutput`), and scores are
multiplied by the weights at the end.

In the space where P is the identity, φ = P^{-1/2} g, with K = ΦΦᵀ `(n, n)` over the training rows and C = ΦΦ_qᵀ
`(n, m)` the exact EK-FAC scores, the Woodbury identity gives, up to a factor that is the same for all scores,

    scores = (K + λI)⁻¹ C

P = I is TRAK in its dual form; λ → ∞ is EK-FAC.

K may come from a sketch Φ̂ `(n, k)` of the whitened gradients, since what the ridge removes lies in few directions; C
may not: whitened gradients are nearly orthogonal, and their sketched products are mostly noise. With A = Φ̂ᵀΦ̂ + λI,

    scores = (C − Φ̂ A⁻¹ Φ̂ᵀ C) / λ

is one k × k system and two products that stream over the rows. Where n ≤ k, the n × n system is solved as it stands.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hf_trak.errors import SingularGramError

Rows = Callable[[], Iterable[tuple[int, Tensor]]]
"""Returns a matrix in pieces `(start, rows)`, in order, anew on every call."""


class HybridSystem:
    """The solution of the hybrid's system for m targets, applied to blocks of rows.

    Attributes:
        ridge (`float`): λ.
    """

    def __init__(self, n: int, features: Rows, scores: Rows, ridge_relative: float, largest_dual: int = 2048) -> None:
        """
        Args:
            n (`int`):
                Number of training rows.
            features (`Callable`):
                Φ̂ `(n, k)`: sketched, whitened gradients of the training rows.
            scores (`Callable`):
                C `(n, m)`: their exact scores.
            ridge_relative (`float`):
                λ as a multiple of the mean diagonal element of K.
            largest_dual (`int`, *optional*, defaults to 2048):
                Largest n for which the n × n system may be solved.

        Raises:
            SingularGramError: all features are zero.
        """
        first = next(iter(features()))[1]
        self._features = features
        self._dual: Tensor | None = None
        self.ridge = 0.0
        k = first.shape[1]
        if n <= min(k, largest_dual):
            whole = torch.cat([rows.double() for _, rows in features()])
            gram = whole @ whole.T
            system = self._ridged(gram, float(gram.trace()) / n * ridge_relative)
            right = torch.cat([rows.double() for _, rows in scores()])
            self._dual = torch.linalg.solve(system, right)
            return
        gram = torch.zeros(k, k, dtype=torch.float64)
        moment: Tensor | None = None
        for (_, rows), (_, part) in zip(features(), scores(), strict=True):
            rows = rows.double()
            gram.addmm_(rows.T, rows)
            product = rows.T @ part.double()
            moment = product if moment is None else moment.add_(product)
        assert moment is not None  # there is at least one row
        system = self._ridged(gram, float(gram.trace()) / n * ridge_relative)
        self._weights = torch.cholesky_solve(moment, torch.linalg.cholesky(system))

    def _ridged(self, gram: Tensor, ridge: float) -> Tensor:
        if not ridge > 0:
            raise SingularGramError(
                f"The ridge of the hybrid is {ridge:.3g}: the whitened features of all training rows are zero, or "
                "`hybrid_lambda` is. Expected a positive number. Set `hybrid_lambda` above 0, or use "
                "`curvature='ekfac'`."
            )
        self.ridge = ridge
        return gram + ridge * torch.eye(len(gram), dtype=gram.dtype)

    def apply(self, start: int, features: Tensor, scores: Tensor) -> Tensor:
        """Compute the scores of some training rows.

        Args:
            start (`int`): number of the first of them.
            features (`torch.Tensor`): their rows of Φ̂.
            scores (`torch.Tensor`): their rows of C.

        Returns:
            `torch.Tensor`: `(rows, m)`, float32.
        """
        if self._dual is not None:
            return self._dual[start : start + len(scores)].float()
        return ((scores.double() - features.double() @ self._weights) / self.ridge).float()
