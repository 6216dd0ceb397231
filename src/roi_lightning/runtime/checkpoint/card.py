"""The model card of a packed directory: what it is, and what loads it."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any


def packed_card(description: Mapping[str, Any]) -> str:
    """Write the card.

    Args:
        description: The sidecar's content.

    Returns:
        Markdown with a YAML front matter.
    """
    base, pattern = description["base"], description["pattern"]
    name = base["spec"] if base["revision"] else PurePath(base["spec"]).name or base["spec"]
    lines = ["---"]
    if base["revision"]:  # only hub models have one
        lines.append(f"base_model: {base['spec']}")
    lines += ["library_name: roi-lightning", "pipeline_tag: text-generation", "tags:"]
    lines += [
        f"- {tag}" for tag in ("sparsity", "pruning", f'"{pattern}"', "semi-structured", "roi-lightning")
    ]
    return "\n".join([*lines, "---", "", f"# {name}, {pattern} sparse, packed", "", _TEXT])


_TEXT = """Of every masked linear layer only the kept weights are here (`values`), and two bits for the place of each
in its group (`places`). **This is no checkpoint for transformers or an inference engine**: `config.json` names a type
of model that none of them knows, so that they end with an error. One function loads it, without ever holding a dense
copy:

```python
from roi_lightning.runtime import from_packed
from transformers import AutoTokenizer
model = from_packed("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH", config=model.config)
```

It computes what the dense directory computes that it was packed from. Every file is hashed while it is loaded, this
one included, and a directory in which one has changed is refused. `python -m roi_lightning verify PATH --base BASE`
compares the kept weights with the base model's. What the base model's licence asks for applies here too.
"""
