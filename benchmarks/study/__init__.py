"""Learning methods side by side: methods × patterns × token budgets × seeds, in one table and one picture."""
