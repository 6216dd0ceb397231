"""How fast it is, beside references: sampler, training step, packed linear layer, generation."""
