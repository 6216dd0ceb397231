"""What the sampler and a training step cost, beside what they are to be held against."""
