"""How good a model is: perplexities over windows of text, and lm-evaluation-harness tasks."""

from roi_lightning.evaluation.perplexity import window_perplexity

__all__ = ["window_perplexity"]
