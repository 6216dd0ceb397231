"""Learn N:M sparsity masks for frozen language models, with PyTorch Lightning."""
