"""The stages of the work, as the tables name them."""

FIT, BASES, EIGEN, EIGENVALUES = "fit", "fit: bases", "fit: eigendecompositions", "fit: eigenvalues"
TARGETS, SCORES, HYBRID = "targets", "scores", "hybrid"
SCORING = "scoring"
"""The group of `TARGETS` and `SCORES`, whose peak memory is one."""
STAGES = (FIT, BASES, EIGEN, EIGENVALUES, TARGETS, SCORES, HYBRID)
"""Stages in the order of the tables. What a library does besides a named part of a fit is in `FIT` alone."""
