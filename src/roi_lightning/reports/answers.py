"""Continuations of a reader's own prompts by the dense model, under the prior and under the learned mask."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from roi_lightning.errors import UserError
from roi_lightning.evaluation.continuations import Decoding, check_room, continue_prompts, encode_prompt
from roi_lightning.evaluation.models import EvaluatedModel, resolve_models
from roi_lightning.reports.run_files import MASK, PRIOR
from roi_lightning.reports.sources import Mask, Sources
from roi_lightning.utils.devices import choose_device

_DECODING: Final = Decoding(max_new_tokens=48)


def with_answers(sources: Sources, prompts: Sequence[str]) -> Sources:
    """Continue prompts by the models of every run and directory, greedily, one model after the other.

    Args:
        sources: What a page is made of.
        prompts: Texts to continue.

    Returns:
        The same, with the continuations behind those that runs recorded themselves.

    Raises:
        UserError: If there is no mask to continue them with, a model can't be read, or a prompt is too long.
    """
    if not sources.masks:
        raise UserError("--prompts needs a run or an exported directory; evaluate and compare leave no model")
    planned = [(mask, _models(mask)) for mask in sources.masks]
    tokens = {model.name: _encode(model, prompts) for _, models in planned for model in models.values()}
    written: dict[str, list[str]] = {}  # by what was loaded: runs may share the dense model
    masks = []
    for mask, models in planned:
        for model in models.values():
            if model.name not in written:
                written[model.name] = _write(model, tokens[model.name])
        answers = [
            {name: written[model.name][i] for name, model in models.items()} for i in range(len(prompts))
        ]
        told = [
            {"prompt": prompt, "source": "given", "expected": None, "answers": texts}
            for prompt, texts in zip(prompts, answers, strict=True)
        ]
        generation = {"max_new_tokens": _DECODING.max_new_tokens, "method": _DECODING.method}
        report = {"generation": generation} | {**mask.report}
        masks.append(
            replace(mask, report=report | {"continuations": [*report.get("continuations", ()), *told]})
        )
    return replace(sources, masks=masks)


def _models(mask: Mask) -> dict[str, EvaluatedModel]:
    """By the name to show."""
    paths = {"dense": mask.model}
    if (mask.path / PRIOR).is_file():
        paths[mask.report.get("mask", {}).get("reference", "prior")] = str(mask.path / PRIOR)
    learned = mask.export if mask.export else mask.path / MASK
    if not learned.exists():
        raise UserError(f"{str(mask.path)!r} has no mask yet that could continue --prompts; finish the run")
    paths[mask.method] = str(learned)
    return dict(zip(paths, resolve_models(list(paths.values()), mask.model), strict=True))


def _encode(model: EvaluatedModel, prompts: Sequence[str]) -> list[list[int]]:
    encoded = [encode_prompt(model.tokenizer, prompt) for prompt in prompts]
    for ids in encoded:
        check_room(len(ids), _DECODING.max_new_tokens, model.max_positions)
    return encoded


def _write(model: EvaluatedModel, encoded: Sequence[Sequence[int]]) -> list[str]:
    lm = model.load("auto", choose_device("auto"))
    made = continue_prompts(lm, model.tokenizer, encoded, _DECODING, f"{model.name}: tokens")
    del lm
    gc.collect()  # a model's modules refer to each other in circles
    torch.cuda.empty_cache()
    return [one.text for one in made]
