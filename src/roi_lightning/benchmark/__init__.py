"""How fast it is, beside references: sampler, training step, packed linear layer, generation."""

from roi_lightning.benchmark.decode import DecodeBenchmark
from roi_lightning.benchmark.linear import LinearBenchmark
from roi_lightning.benchmark.sampler import SamplerBenchmark
from roi_lightning.benchmark.step import StepBenchmark

__all__ = ["DecodeBenchmark", "LinearBenchmark", "SamplerBenchmark", "StepBenchmark"]
