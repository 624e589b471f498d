"""Command lines: the parser that recipes and commands share."""
