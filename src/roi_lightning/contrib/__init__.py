"""Beside the mission: rival methods and other uses of 2:4 models, which nothing else here imports."""
