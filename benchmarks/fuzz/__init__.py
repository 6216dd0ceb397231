"""Mutated mask files and configurations against the readers: each must be accepted rightly or refused cleanly."""
