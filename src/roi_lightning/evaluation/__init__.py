"""How good a model is: perplexities, lm-evaluation-harness tasks, and the table of results."""

from roi_lightning.evaluation.perplexity import window_perplexity

__all__ = ["window_perplexity"]
