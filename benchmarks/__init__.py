"""Measurements of this project; their results are in `results/`."""
