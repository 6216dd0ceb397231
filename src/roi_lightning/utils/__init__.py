"""Knows no mask and no model: atomic and checksummed files, progress, devices, sharded tensors, tables, C++."""
