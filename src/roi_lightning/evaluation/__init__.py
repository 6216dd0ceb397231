"""What a model is worth: perplexities over windows of text, and lm-evaluation-harness tasks."""

from roi_lightning.evaluation.windows import window_perplexity

__all__ = ["window_perplexity"]
