"""Measures regard side by side with its peers. Run from a checkout: python -m benchmarks dense."""
