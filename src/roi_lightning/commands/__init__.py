"""One thin file per plain command: its options as a dataclass, and `main(argv)`."""
