"""A model pruned, a mask learned, measured and saved, from Python.

Cells for an editor or Jupyter; it also runs as a script. The environment may name another model (ROI_MODEL) and
another number of steps (ROI_STEPS).
"""

# %% [markdown]
# # 2:4 from Python
# A model of transformers, its tokenizer, and text: here the manual that comes with every Python.

# %%
import os
from copy import deepcopy
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import mkdtemp

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from roi_lightning.api import apply, evaluate, learn, prune
from roi_lightning.contrib.packed import accelerate
from roi_lightning.models.source import resolve_model

folder = Path(mkdtemp())
manual = list(topics.values())
(folder / "learned_from.txt").write_text("\n".join(manual[6:30]))
(folder / "held_out.txt").write_text("\n".join(manual[:6]))

# %%
# A hub id or a directory goes into from_pretrained as it is; smollm2-135m is a GGUF file in a package. On a GPU, or a
# CPU with instructions for it, bfloat16 takes half the memory; on other CPUs it is several times slower.
model = resolve_model(os.environ.get("ROI_MODEL", "smollm2-135m"))
lm = AutoModelForCausalLM.from_pretrained(**model.pretrained, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(**model.pretrained)

# %% [markdown]
# ## Before


# %%
def tell(name: str, lm: PreTrainedModel) -> None:
    """Perplexity on text that nothing here was fitted to."""
    print(name, evaluate(lm, tokenizer, folder / "held_out.txt", seq_len=128, limit=16))


tell("dense", lm)

# %% [markdown]
# ## A mask without training
# `prune` and `learn` leave the model alone; `apply` sets the weights that a mask drops to zero, in place.

# %%
text = str(folder / "learned_from.txt")
pruned = prune(lm, tokenizer, text, method="wanda", windows=8, seq_len=128)
copy = deepcopy(lm)
apply(copy, pruned.masks, pruned.updates)
tell("wanda", copy)

# %% [markdown]
# ## A learned mask
# A few steps show how it goes; hundreds make it good.

# %%
masks = learn(
    lm,
    tokenizer,
    text,
    pattern="2:4",
    steps=int(os.environ.get("ROI_STEPS", "15")),
    seq_len=128,
    batch_size=4,
    learning_rate=3e-3,
    distillation=0.0,
    accelerator="cpu",
)
masks.save(folder / "mask.safetensors")  # a bit per weight

# %%
apply(lm, masks)
tell("roi", lm)

# %% [markdown]
# ## In less memory
# Packed, the linear layers take 17/32 of their bytes (9/16 in bfloat16); at 2:4 only, for generating and evaluating,
# not for saving.

# %%
packed = deepcopy(lm).eval()
done = accelerate(packed)
print(f"{len(done.packed)} layers: {done.bytes_before:,} bytes before, {done.bytes_after:,} after")
tell("packed", packed)

# %% [markdown]
# ## What is left
# An ordinary model, half of whose linear weights are zeros: `lm.save_pretrained` saves it like any other. The base
# and the mask file make the same, every byte checked:
# `roi-lightning apply BASE mask.safetensors --out DIR`.

# %%
prompt = tokenizer("A Python function is", return_tensors="pt")
print(tokenizer.decode(lm.generate(**prompt, max_new_tokens=20, do_sample=False)[0]))
print(folder / "mask.safetensors")
