"""How good a model is: perplexities, lm-evaluation-harness tasks, and the table of results."""
