"""The stages of the work, as the tables name them."""

FIT, BASES, EIGEN, EIGENVALUES = "fit", "fit: bases", "fit: eigendecompositions", "fit: eigenvalues"
TARGETS, SCORES = "targets", "scores"
HYBRID_FEATURES, HYBRID_SYSTEM, HYBRID_REST = "hybrid: features", "hybrid: system", "hybrid: targets and scores"
STAGES = (FIT, BASES, EIGEN, EIGENVALUES, TARGETS, SCORES, HYBRID_FEATURES, HYBRID_SYSTEM, HYBRID_REST)
"""Stages in the order of the tables. What a library does besides a named part of a fit is in `FIT` alone."""

SCORING, HYBRID = "scoring", "hybrid"
"""Groups of stages, each with one peak of memory; the fit is one, too."""
