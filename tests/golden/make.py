"""Writes the files beside it, which today's code must read: a tiny model and one of everything made of it.

Run it (`python tests/golden/make.py`) only when a format changes on purpose, and raise that format's version.
"""

import os
import shutil
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from helpers.lab import Lab  # noqa: E402
from helpers.text_files import write_jsonl  # noqa: E402
from roi_lightning.models.fingerprint import base_model
from roi_lightning.models.base_tensors import open_base
from roi_lightning.export import write_export  # noqa: E402
from roi_lightning.masks.mask_set import MaskSet  # noqa: E402
from roi_lightning.masks.layer_mask import LayerMask  # noqa: E402
from roi_lightning.masks.pattern import NMPattern  # noqa: E402
from roi_lightning.contrib.packed import write_packed  # noqa: E402
from roi_lightning.models.source import resolve_model
from roi_lightning.models.stored_tensors import StoredTensors
from helpers.tiny_models import tiny_qwen2  # noqa: E402

PAIRS = list(combinations(range(4), 2))


def kept(layer: int, shape: tuple[int, int]) -> torch.Tensor:
    """A mask that every reader can make by itself: group g of layer l keeps pair (g + l) mod 6; bool `shape`."""
    mask = torch.zeros(shape[0] * shape[1] // 4, 4, dtype=torch.bool)
    for group, row in enumerate(mask):
        row[list(PAIRS[(group + layer) % 6])] = True
    return mask.view(shape)


def masks() -> MaskSet:
    """The masks of all linear layers of the model in this folder, which must be the working directory."""
    source, stored = resolve_model("model"), StoredTensors(Path("model"))
    names = [name for name in sorted(stored) if name.endswith("_proj.weight")]
    layers = {name: LayerMask.from_rows(kept(i, stored.shape(name))) for i, name in enumerate(names)}
    return MaskSet(NMPattern("2:4"), layers, base_model(open_base(source), layers))


def main() -> None:
    os.chdir(HERE)
    for folder in ("model", "export", "packed", "packed_int8"):
        shutil.rmtree(folder, ignore_errors=True)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tiny_qwen2(Path("model"), **sizes, num_attention_heads=2, num_key_value_heads=1)
    stored = masks()
    stored.save(Path("mask.safetensors"))
    write_export(resolve_model("model"), stored, Path("export"), training={"method": "roi", "steps": 1})
    write_packed(Path("export"), Path("packed"))
    write_packed(Path("export"), Path("packed_int8"), weights="int8")
    write_jsonl(
        Path("text.jsonl"), (f"{number} cats sat on a mat and saw two dogs run. " * 5 for number in range(30))
    )
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), Path(folder) / "shared")
        learner, trainer = lab.learn(1, model="model", data=lab.data(tokenizer="model", corpora="text.jsonl"))
        for name, parameter in learner.learned_parameters():
            weight = name.removeprefix("lm.").rpartition(".")[0] + ".weight"
            parameter.data.copy_(stored.layers[weight].to_bool().float() - 0.5)
        trainer.save_checkpoint("run.ckpt")


if __name__ == "__main__":
    main()
