"""What `evaluate` says besides its tables: its JSON, and the sentence below them."""

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roi_lightning.evaluation.config import PROTOCOL_2048, WORDS
from roi_lightning.evaluation.run import Evaluation


def as_json(evaluation: Evaluation, device: str) -> dict[str, Any]:
    """The results and how they were measured; numbers that JSON does not have are spelled ("inf", "nan").

    Args:
        evaluation: From `evaluate_models`.
        device: Where the models ran.
    """
    harness = evaluation.harness
    described = {
        **asdict(evaluation.config),
        "limit": evaluation.config.first,
        "tasks": evaluation.config.names,
        "harness": {
            name: {"num_fewshot": shots, "version": harness["versions"].get(name)}
            for name, shots in harness.get("n-shot", {}).items()
        },
        "bos": {model.name: model.bos for model in evaluation.models},
        "word_length": {model.name: model.word_length for model in evaluation.models},
        "roi_lightning": importlib.metadata.version("roi-lightning"),
        "lm_eval": importlib.metadata.version("lm_eval") if harness else None,
        "dense": evaluation.dense,
        "device": device,
    }
    content: dict[str, Any] = _spelled({"models": evaluation.results, "settings": described})
    return content


def _spelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _spelled(inner) for key, inner in value.items()}
    unknown = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if unknown else value


def caption(evaluation: Evaluation) -> str:
    """How to read the tables."""
    config, dense = evaluation.config, evaluation.dense
    text = config.text or "the WikiText-2 test text"
    words = ", ".join(f"{model.word_length:,} ({model.name})" for model in evaluation.models)
    starts = ", ".join(f"{model.bos} ({model.name})" for model in evaluation.models if model.bos)
    shots = {f"{count} ({name})" for name, count in evaluation.harness.get("n-shot", {}).items() if count}
    parts = {
        f"token PPL: {text} in windows of {config.seq_len} tokens, the tail kept": "token_perplexity"
        in config.names,
        f"each begins with {starts}, which is never predicted": "token_perplexity" in config.names and starts,
        f"2048 PPL: the rows of {text} in windows of 2048, the tail dropped": PROTOCOL_2048 in config.names,
        f"word PPL: tokens at once {words}": WORDS in config.names,
        f"examples per question: {', '.join(sorted(shots))}": shots,
        "asked as a chat by the model's template": config.apply_chat_template,
        f"×: ratio to {dense}; +/−: difference": dense,
        "±: standard error": evaluation.harness,
        "W/U: kept weights updated": True,
        f"only the first {config.first} windows, documents and questions": config.first,
    }
    return "; ".join(part for part, applies in parts.items() if applies) + "."
