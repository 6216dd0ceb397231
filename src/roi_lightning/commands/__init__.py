"""One thin file per plain command; each has `build_parser()` and `main(argv)`."""
