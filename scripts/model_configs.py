"""Writes the configurations of models into configs/: `python scripts/model_configs.py`.

Each is the paper's recipe with a model, a pattern, and a micro-batch that suits the model.
"""

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# File → hub id and windows of a micro-batch; with one window activations are recomputed.
MODELS = {
    "qwen0.5b": ("Qwen/Qwen2.5-0.5B", 4),
    "qwen1.5b": ("Qwen/Qwen2.5-1.5B", 2),
    "qwen3b": ("Qwen/Qwen2.5-3B", 1),
    "qwen7b": ("Qwen/Qwen2.5-7B", 1),
    "qwen3_0.6b": ("Qwen/Qwen3-0.6B-Base", 4),
    "qwen3_1.7b": ("Qwen/Qwen3-1.7B-Base", 2),
    "qwen3_4b": ("Qwen/Qwen3-4B-Base", 1),
    "llama3.2_1b": ("meta-llama/Llama-3.2-1B", 2),
    "llama3.2_3b": ("meta-llama/Llama-3.2-3B", 1),
    "smollm2_135m": ("HuggingFaceTB/SmolLM2-135M", 4),
    "smollm2_360m": ("HuggingFaceTB/SmolLM2-360M", 2),
    "smollm2_1.7b": ("HuggingFaceTB/SmolLM2-1.7B", 2),
    "gemma2_9b": ("google/gemma-2-9b", 1),
    "gemma3_270m": ("google/gemma-3-270m", 2),
    "gemma3_1b": ("google/gemma-3-1b-pt", 2),
}
AT_2OF8 = ("qwen0.5b", "qwen1.5b", "qwen3b", "qwen7b")
EAGER = ("gemma2_9b",)


def files() -> dict[str, str]:
    """The text of every file by its name."""
    texts = {f"{name}_2of4.yaml": _at_2of4(name, *model) for name, model in MODELS.items()}
    return texts | {f"{name}_2of8.yaml": _at_2of8(name) for name in AT_2OF8}


def _at_2of4(name: str, lm: str, windows: int) -> str:
    text = f"""# The paper's recipe on {lm} at 2:4: roi-lightning fit --config {name}_2of4.yaml
extends: recipes/paper.yaml
model:
  init_args:
    lm: {lm}
    pattern: "2:4" # N kept of every M consecutive inputs
"""
    if name in EAGER:
        text += "    attn_implementation: eager # its soft-capped attention is exact only here\n"
    if windows > 1:
        text += "    activation_checkpointing: false # recompute activations to save memory\n"
        text += f"data:\n  batch_size: {windows} # windows per micro-batch and device\n"
    return text


def _at_2of8(name: str) -> str:
    return f"""# The same at 2:8: roi-lightning fit --config {name}_2of8.yaml
extends: {name}_2of4.yaml
model:
  init_args:
    pattern: "2:8" # N kept of every M consecutive inputs
"""


if __name__ == "__main__":
    for name, text in files().items():
        (CONFIGS / name).write_text(text, encoding="utf-8")
