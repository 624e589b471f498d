"""Whitened features: sketches of gradients times P^{-1/2}, with a curvature P that is fitted first."""

import logging
from typing import Any

import torch

from hf_trak.config import TrakConfig
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.maps import WhitenedProjection
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fidelity import Agreement, fitted_curvature, sampled_scores
from hf_trak.store.sealed import read_sealed, write_sealed

logger = logging.getLogger(__name__)

LEAST_AGREEMENT = 0.5
"""Rank correlation of inner products of features with exact ones, below which a sketch does not hold them."""

CHECKED_ROWS, CHECKED_TARGETS = 32, 4

AGREEMENT_FILE = "agreement.json"


class WhitenedModel(FeaturizedModel):
    """A featurized model whose features are whitened."""

    def feature_map(self, model_id: int) -> WhitenedProjection:
        """Fit the curvature of the weights that the model has now, or read it, and return the map of their gradients.

        Args:
            model_id: the checkpoint that these weights are. All processes call this together.

        Returns:
            The map from gradients `(B, P)` to whitened features `(B, k)`.

        Raises:
            StoreError: the rows are not at hand, as those of a published index, and no curvature was published with
                it.
        """
        return WhitenedProjection(self._curvature(model_id), self.args.curvature.whitening_damping, self.projector())

    def _curvature(self, model_id: int) -> Curvature:
        exact = ExactScores(self)
        if getattr(self.train_dataset, "absent", False):
            return fitted_curvature(exact, model_id)
        return exact.fitted(model_id)

    def check_features(self, model_id: int) -> float:
        """Compare inner products of whitened features with exact ones on a sample, and warn where they disagree.

        The result is kept beside the features, so that they are compared once, and after a kill all the same.

        Args:
            model_id: the checkpoint, featurized. All processes call this together.

        Returns:
            The rank correlation, mean over the targets of the sample; 1 if the rows are too few to tell.
        """
        if len(self.train_dataset) <= CHECKED_TARGETS + 3 or getattr(self.train_dataset, "absent", False):
            return 1.0
        path = self.store.checkpoint_dir(model_id) / AGREEMENT_FILE
        features = self.processes.broadcast_from_main(lambda: self.store.train(model_id).content_hash)
        saved = self.processes.broadcast_from_main(lambda: read_sealed(path) if path.exists() else {})
        if saved.get("features") == features:
            return float(saved["spearman"])
        scores, curvature, _ = sampled_scores(self, CHECKED_ROWS, CHECKED_TARGETS, 0, model_id)
        found = Agreement.of(scores.products, scores.exact_products, 1).mean_spearman
        self.processes.broadcast_from_main(lambda: write_sealed(path, {"features": features, "spearman": found}))
        if found < LEAST_AGREEMENT and self.processes.is_main_process:
            logger.warning(
                "Inner products of the whitened features of checkpoint %d have a rank correlation of %.2f with exact "
                "ones (%s, %d rows × %d targets): %d numbers per row do not hold them. Score with `method='exact'` or "
                "'rerank', raise `proj_dim`, or featurize with `curvature.whitened=False` in another directory.",
                model_id,
                found,
                curvature.kind,
                len(scores.rows),
                len(scores.targets),
                self.proj_dim,
            )
        return found


def featurized_model(
    model: torch.nn.Module, args: TrakConfig | None = None, *given: Any, **more: Any
) -> FeaturizedModel:
    """Make a featurized model, of whitened features if the configuration asks for them.

    Args:
        model, args, given, more: the arguments of [`FeaturizedModel`].

    Raises:
        ValueError, TypeError: as [`FeaturizedModel`].
    """
    kind = WhitenedModel if isinstance(args, TrakConfig) and args.curvature.whitened else FeaturizedModel
    return kind(model, args, *given, **more)
