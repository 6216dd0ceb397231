"""Knows no mask and no model: atomic files, progress, devices, sharded tensors, tables, compiled C++."""
