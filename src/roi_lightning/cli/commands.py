"""The commands by name, and what each does in a line; importing this imports none of them."""

from typing import Final

GROUPS: Final = {
    "start": {"new": "write a small project of your own that builds on this package"},
    "learn": {
        "plan": "say how much memory and text a run takes, before it reads any weight",
        "fit": "learn a mask, and write a verified model directory",
        "validate": "measure loss and perplexity of a checkpoint's hard mask",
        "export": "write a model directory and a mask file from a training checkpoint",
    },
    "judge": {
        "evaluate": "measure perplexities and benchmark tasks of models and masks, side by side",
        "compare": "measure how many weights two masks both keep: a table and a picture",
        "verify": "check an exported directory: pattern, zeros, kept weights, every byte",
        "report": "write one HTML page about a run",
    },
    "without learning": {
        "prune": "make a mask without training: magnitude, Wanda, SparseGPT",
        "apply": "write a model directory from a base model and a mask file",
    },
    "this machine": {"doctor": "check what decides how fast runs are on this machine"},
}
COMMANDS: Final = {name: text for group in GROUPS.values() for name, text in group.items()}
CONFIGURED: Final = frozenset(GROUPS["learn"])
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
    "--lr": "--model.optimizer.lr",
    "--seed": "--seed_everything",
}
