"""Measure the ladder: `python -m benchmarks run`, from the repository root."""
