"""The parts of the benchmark of curvature; `recipes/benchmarks/curvature` is the command."""
