"""The hooked engine: per-sample gradients of all layers from one pass over a batch."""
