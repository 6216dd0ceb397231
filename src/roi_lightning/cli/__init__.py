"""The command line: one file a command, and LightningCLI for those that take a configuration."""
