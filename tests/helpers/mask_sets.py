"""Random masks of tiny models, for tests that ask nothing of the weights."""

import torch

from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.mask_set import BaseModel, MaskSet
from roi_lightning.masks.pattern import NMPattern

# [out, in] by the kind of a layer.
QWEN = {
    "self_attn.q_proj": (12, 32),
    "self_attn.k_proj": (6, 32),
    "mlp.up_proj": (20, 32),
    "mlp.down_proj": (12, 64),
}
GPT2 = {"attn.c_attn": (24, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (32, 16), "mlp.c_proj": (16, 32)}


def names_of(kinds, blocks, prefix):
    return {f"{prefix}.{i}.{kind}.weight": shape for i in range(blocks) for kind, shape in kinds.items()}


def mask_set(seed, pattern="2:4", shapes=None, transposed=False, base="some/model"):
    """Random masks; shapes are [out, in] by name."""
    generator, rule = torch.Generator().manual_seed(seed), NMPattern(pattern)
    layers = {}
    for name, shape in (shapes or names_of(QWEN, 4, "model.layers")).items():
        kept = rule.top(torch.rand(shape, generator=generator))
        layers[name] = LayerMask.from_rows(kept, transposed)
    return MaskSet(rule, layers, BaseModel(base, None, "float32", dict.fromkeys(layers, base)))
