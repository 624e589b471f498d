"""Whitened features: projections of P^{-1/2} ∇f instead of ∇f, for a fitted curvature P.

Their inner products approximate ⟨∇f_i, P⁻¹ ∇f_t⟩, the scores under the curvature, and the ridge regression over them
is TRAK's in coordinates in which the Fisher information is the identity. A sketch of k numbers holds inner products
up to an error of ‖φ_i‖‖φ_t‖ / √k. Where whitened gradients are almost orthogonal, as those of large models are, that
error is larger than the products: `check_sketch` measures it.
"""

import logging

from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.maps import WhitenedProjection
from hf_trak.featurize.curvature_settings import whitening_damping
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fidelity import Agreement, sampled_scores
from hf_trak.featurize.fitted import fitted_curvature

logger = logging.getLogger(__name__)

LEAST_AGREEMENT = 0.5
"""Rank correlation of inner products of features with exact ones, below which a sketch does not hold them."""

CHECKED_ROWS, CHECKED_TARGETS = 32, 4


def whitened_map(model: FeaturizedModel, model_id: int) -> WhitenedProjection:
    """Fit the curvature of the weights that the model has now, or read it, and return the map of their gradients.

    Args:
        model: the model. All processes call this together.
        model_id: the checkpoint that these weights are.

    Returns:
        The map from gradients `(B, P)` to whitened features `(B, k)`.

    Raises:
        StoreError: the rows are not at hand, as those of a published index, and no curvature was published with it.
    """
    return WhitenedProjection(_curvature(model, model_id), whitening_damping(model.args), model.projector())


def _curvature(model: FeaturizedModel, model_id: int) -> Curvature:
    exact = ExactScores(model)
    if getattr(model.train_dataset, "absent", False):
        return fitted_curvature(exact, model_id)
    return exact.fitted(model_id)


def check_sketch(model: FeaturizedModel, model_id: int) -> float:
    """Compare inner products of whitened features with exact ones on a sample, and warn where they disagree.

    Args:
        model: featurized, with its training rows. All processes call this together.
        model_id: the checkpoint.

    Returns:
        The rank correlation, mean over the targets of the sample; 1 where there are too few rows to tell.
    """
    if len(model.train_dataset) <= CHECKED_TARGETS + 3:
        return 1.0
    scores, curvature, _ = sampled_scores(model, CHECKED_ROWS, CHECKED_TARGETS, 0, model_id)
    found = Agreement.of(scores.products, scores.exact_products, 1).mean_spearman
    if found < LEAST_AGREEMENT and model.processes.is_main_process:
        logger.warning(
            "Inner products of the whitened features of checkpoint %d have a rank correlation of %.2f with exact ones "
            "(%s, %d rows × %d targets): %d numbers per row do not hold them. Score with `exact=True` or `rerank`, "
            "raise `proj_dim`, or featurize with `whitened=False` in another directory.",
            model_id,
            found,
            curvature.kind,
            len(scores.rows),
            len(scores.targets),
            model.proj_dim,
        )
    return found
