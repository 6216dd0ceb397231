"""What the speed benchmarks share: timing in turns, models, and one frame for options, table, JSON and picture."""
