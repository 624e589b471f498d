"""Rows: datasets, streams, and how they become inputs of a model."""
