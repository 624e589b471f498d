"""Features of examples: from rows and checkpoints to projected gradients in a store."""
