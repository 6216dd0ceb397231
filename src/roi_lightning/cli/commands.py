"""The commands by name, and what each does in a line; importing this imports none of them."""

from typing import Final

CONFIGURED: Final = {
    "fit": "learn a mask; ends with a hardened, verified checkpoint",
    "validate": "loss and perplexity of a checkpoint's hardened mask",
    "export": "a training checkpoint to a Hugging Face directory and a mask file",
    "plan": "parameters, bytes, tokens and steps of a run, before any weight is read",
}
PLAIN: Final = {
    "prune": "a mask without training: magnitude, Wanda, SparseGPT",
    "apply": "a base model and a mask file to the same directory",
    "compare": "how much of what one mask keeps the others keep too: a table and a picture",
    "verify": "check an exported directory: pattern, zeros, kept weights, every byte",
    "evaluate": "perplexities and benchmark tasks of models and masks, side by side",
    "report": "one HTML page about a run, to read or to mail",
    "new": "write a small project of your own that builds on this package",
    "doctor": "what of this machine decides how fast runs are, and what works here",
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
