"""`generate LM …`: what models and masks make of the same prompts, side by side, or in a conversation."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from roi_lightning.cli.chat import converse
from roi_lightning.cli.compared_models import ComparedModels
from roi_lightning.cli.options import parse_options
from roi_lightning.errors import UserError
from roi_lightning.evaluation.continuations import (
    Continuation,
    Decoding,
    check_room,
    continue_prompts,
    encode_chat,
    encode_prompt,
    read_prompts,
)
from roi_lightning.evaluation.models import EvaluatedModel, resolve_models
from roi_lightning.evaluation.run import shorten
from roi_lightning.evaluation.side_by_side import SideBySide, as_markdown, print_side_by_side
from roi_lightning.utils.atomic_io import write_json, written_aside
from roi_lightning.utils.devices import choose_device


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Decoding, ComparedModels):
    """Continue prompts by several models, side by side, or talk to them.

    Attributes:
        prompt: Texts to continue.
        prompts: A file of more: a prompt per line, or .jsonl with {"prompt": ...} per line.
        chat: Apply the chat template; without prompts, a conversation: /reset begins a new one, /exit or Ctrl-D ends.
    """

    prompt: Sequence[str] = ()
    prompts: Path | None = None
    chat: bool = False

    @property
    def texts(self) -> list[str]:
        """All prompts.

        Raises:
            UserError: If there is none and there is to be no conversation either, or there is one to be written.
        """
        texts = [*self.prompt, *(read_prompts(self.prompts) if self.prompts else ())]
        if not texts and not self.chat:
            raise UserError("there is no prompt; give some with --prompt or --prompts, or --chat for a talk")
        if not texts and (self.json or self.markdown):
            raise UserError("a conversation is not written to --json or --markdown; give --prompt as well")
        return texts


def main(argv: Sequence[str]) -> int:
    """Check everything, generate with one model after the other, print, and write what was asked for.

    Returns:
        0.

    Raises:
        UserError: For whatever can't be continued or written; nothing is written then.
    """
    options = parse_options(GenerateOptions, "generate", argv)
    device, texts = choose_device(options.device), options.texts
    options.check_outputs()
    models = resolve_models(options.lm, options.base, options.trust_remote_code)
    encoded = {model.name: [_encode(model, text, options) for text in texts] for model in models}
    for model in models:
        model.check_weights()
    if not texts:
        converse(models, options, lambda model: model.load(options.dtype, device, options.trust_remote_code))
        return 0
    answers = {}
    for model in models:
        lm = model.load(options.dtype, device, options.trust_remote_code)
        description = f"{shorten(model.name, 32)}: tokens"
        answers[model.name] = continue_prompts(lm, model.tokenizer, encoded[model.name], options, description)
        del lm
        gc.collect()  # a model's modules refer to each other in circles
        torch.cuda.empty_cache()
    _show(texts, answers, options, str(device))
    return 0


def _encode(model: EvaluatedModel, text: str, options: GenerateOptions) -> list[int]:
    if options.chat:
        ids = encode_chat(model.tokenizer, [{"role": "user", "content": text}])
    else:
        ids = encode_prompt(model.tokenizer, text)
    check_room(len(ids), options.max_new_tokens, model.max_positions)
    return ids


def _show(
    texts: Sequence[str],
    answers: Mapping[str, Sequence[Continuation]],
    options: GenerateOptions,
    device: str,
) -> None:
    items = [
        SideBySide(text, answers={name: made[i].text for name, made in answers.items()})
        for i, text in enumerate(texts)
    ]
    rates = {
        name: sum(x.tokens for x in made) / sum(x.seconds for x in made) for name, made in answers.items()
    }
    print_side_by_side(items, {name: f"({rate:.1f} tokens/s)" for name, rate in rates.items()})
    if options.json:
        settings = {"max_new_tokens": options.max_new_tokens, "method": options.method, "chat": options.chat}
        settings |= {"dtype": options.dtype, "device": device, "base": options.base}
        content = {"continuations": [asdict(item) for item in items], "generation": settings}
        write_json(options.json, content | {"tokens_per_second": rates})
    if options.markdown:
        with written_aside(options.markdown) as partial:
            partial.write_text(as_markdown(items), encoding="utf-8")
