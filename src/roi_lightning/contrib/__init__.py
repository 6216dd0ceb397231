"""Additions to the core: methods to compare with, and tools for 2:4 models; the core imports none of them."""
