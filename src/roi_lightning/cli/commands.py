"""The commands by name, and what each does in a line; importing this imports none of them."""

from typing import Final

CONFIGURED: Final = {
    "fit": "learn a mask, and write a verified model directory",
    "validate": "measure loss and perplexity of a checkpoint's hard mask",
    "export": "write a model directory and a mask file from a training checkpoint",
    "plan": "say how much memory and text a run takes, before it reads any weight",
}
PLAIN: Final = {
    "prune": "make a mask without training: magnitude, Wanda, SparseGPT",
    "apply": "write a model directory from a base model and a mask file",
    "compare": "measure how many weights two masks both keep: a table and a picture",
    "verify": "check an exported directory: pattern, zeros, kept weights, every byte",
    "evaluate": "measure perplexities and benchmark tasks of models and masks, side by side",
    "report": "write one HTML page about a run",
    "doctor": "check what decides how fast runs are on this machine",
}
COMMANDS: Final = CONFIGURED | PLAIN
# An option that commands without a configuration have too, or that is typed often → its full name.
SHORT: Final = {
    "--lm": "--model.lm",
    "--pattern": "--model.pattern",
    "--patterns": "--model.patterns",
    "--sampler": "--model.sampler",
    "--prior": "--model.prior",
    "--corpora": "--data.corpora",
    "--seq_len": "--data.seq_len",
    "--steps": "--trainer.max_steps",
    "--seed": "--seed_everything",
}


def sentence(command: str) -> str:
    """What a command does, as a sentence."""
    meaning = COMMANDS[command]
    return f"{meaning[0].upper()}{meaning[1:]}."
