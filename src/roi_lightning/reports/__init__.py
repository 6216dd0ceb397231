"""The page that a run ends with, and the figures of masks."""
