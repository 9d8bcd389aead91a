"""Benchmarks: figures as ratios, measured in one run."""
