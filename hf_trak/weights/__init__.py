"""Weights: checkpoints, adapters, placement on devices, and watching that they stay as they are."""
