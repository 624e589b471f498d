"""Curvature: the Fisher information of a model in the eigenbases of its layers, and exact scores under it.

`fit` makes the passes over a sample of training rows, `blocks` says which parameters share a block, `sums` holds what
a pass adds up, `eigen` decomposes it, `preconditioner` applies the inverse to gradients, `exact` scores with them and
`hybrid` joins them with the ridge of TRAK. `files` keeps a curvature in a directory.
"""
