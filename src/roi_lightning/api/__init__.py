"""Use from Python, without the command line: functions on a transformers model in memory.

    from roi_lightning.api.apply import apply
    from roi_lightning.api.evaluate import evaluate
    from roi_lightning.api.learn import learn

    masks = learn(lm, tokenizer, "my_texts/*.txt", pattern="2:4", steps=150)
    masks.save(Path("mask.safetensors"))
    apply(lm, masks)
    print(evaluate(lm, tokenizer, "my_book.txt"))

Only `apply` changes the model it is given; `keep_zeros` keeps its zeros while other code trains it.

Masks go by the names that the weights have on disk. A model that was loaded from a directory or the hub, and still
holds its linear weights, gives masks of that directory or hub model: their file can be used wherever the commands
take one. Any other model is a base of its own, named by its class; its masks go by the names it has in memory. Those
are the names under which `save_pretrained` writes the weights, except mixtures of experts that have other names on
disk (Mixtral).
"""

from roi_lightning.api.apply import apply
from roi_lightning.api.evaluate import evaluate
from roi_lightning.api.keep_zeros import KeptZeros, keep_zeros
from roi_lightning.api.learn import learn
from roi_lightning.api.prune import PruneResult, prune

__all__ = ["KeptZeros", "PruneResult", "apply", "evaluate", "keep_zeros", "learn", "prune"]
