"""Curvature: the Fisher information of a model in the eigenbases of its layers, and exact scores under it.

`fit` makes the passes over a sample of training rows, `blocks` says which parameters share a block, `sums` holds what
a pass adds up, and `eigen` decomposes it. `maps` applies the inverse to gradients, and `hybrid` joins it with the
ridge of TRAK. `refinement` has the options of refined targets, and `conjugate_gradients` solves for them. `files`
keeps a curvature in a directory, `verification` checks one, `report` describes it.
"""
