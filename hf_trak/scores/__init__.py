"""From features to scores: Gram matrices, λ, products that stream, the best rows, and datasets of scores."""
