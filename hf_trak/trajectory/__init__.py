"""The training run itself, asked what its rows did: steps of optimizers, followed forwards and backwards.

Start with `optimizer_steps`, the maths of one step, and `hyperparameters`, what a `Trainer` says about all steps.
Imports no packages above `curvature`.
"""
