"""How fast masks are drawn and 2:4 models run, each beside a reference in the same process."""
