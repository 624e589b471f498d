"""The parts of the benchmark of curvature; `benchmarks/curvature` is the command."""
