"""Calibration text that a model writes itself: a `.jsonl` file that is read like any other."""
