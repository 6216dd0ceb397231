"""The one exception for what a user can mend; commands print its text without a traceback."""


class UserError(ValueError):
    """Bad input. The message names the offending value and the remedy."""
