"""Files, progress, devices, sharded tensors, tables, C++: code that knows no mask and no model."""
