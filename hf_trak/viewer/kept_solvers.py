"""Ridge systems that are kept between questions: factorizing XᵀX + λI takes longer than everything else."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch import Tensor

from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.scores.scorer import Scorer

MOST_KEPT = 4
"""Number of factorizations that are kept, each of k² numbers of 8 bytes with the primal solver."""

Solve = Callable[[Tensor], Tensor]


class KeptSolvers:
    """Applies (XᵀX + λI)⁻¹ to targets, under any checkpoint and λ, and keeps the factors of the last few."""

    def __init__(self, model: FeaturizedModel, most: int = MOST_KEPT) -> None:
        """
        Args:
            model: the model and its store.
            most: number of factorizations to keep.
        """
        self._model = model
        self._most = most
        self._kept: OrderedDict[tuple[int, float | None], Solve] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def solve(self, model_id: int, lambda_relative: float | None, targets: Tensor) -> Tensor:
        """Compute t (XᵀX + λI)⁻¹ of targets.

        Args:
            model_id: the checkpoint.
            lambda_relative: λ as a multiple of trace(XᵀX) / min(n, k); `None` takes the λ of the configuration.
            targets: t, `(m, k)`.

        Returns:
            `(m, k)`, float64.

        Raises:
            SingularGramError: λ is too small for these features.
            ValueError: λ is negative or not finite.
        """
        key = (model_id, lambda_relative)
        if key not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            self._kept[key] = self._made(*key)
        self._kept.move_to_end(key)
        return self._kept[key](targets)

    def _made(self, model_id: int, lambda_relative: float | None) -> Solve:
        scorer = self._scorer(lambda_relative)
        if scorer.solvers.choice(model_id).kind != "primal":
            return partial(scorer.solvers.solve, scorer.solvers.make(model_id))
        gram = scorer.gram(model_id)
        assert gram is not None  # a viewer is one process, which is the main one
        return scorer.system(model_id, gram).solve

    def _scorer(self, lambda_relative: float | None) -> Scorer:
        model, args = self._model, self._model.args
        if lambda_relative is None:
            return model.scorer
        given = (model.store, model.processes, model.device, None, lambda_relative)
        return Scorer(*given, args.solver, args.solver_rank)
