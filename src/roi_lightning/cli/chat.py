"""A conversation with one model or several, line by line, on a terminal or through a pipe."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import TextStreamer
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.evaluation.continuations import (
    Decoding,
    Message,
    check_room,
    continue_prompt,
    encode_chat,
)
from roi_lightning.evaluation.models import EvaluatedModel

_HELP: Final = "/reset begins a new conversation, /exit or Ctrl-D ends\n"


@dataclass
class _Speaker:
    """A model with its own side of the conversation."""

    model: EvaluatedModel
    lm: PreTrainedModel
    messages: list[Message] = field(default_factory=list)

    def answer(self, line: str, decoding: Decoding) -> None:
        """Write the answer to standard output while it is made; what can't be answered is forgotten again.

        Raises:
            UserError: If the conversation has become too long.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": line}]
        ids = encode_chat(self.model.tokenizer, messages)
        check_room(len(ids), decoding.max_new_tokens, self.model.max_positions)
        made = continue_prompt(self.lm, self.model.tokenizer, ids, decoding, _Printer(self.model.tokenizer))
        self.messages = [*messages, {"role": "assistant", "content": made.text}]


class _Printer(TextStreamer):
    """Writes words to standard output as soon as they are whole."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    @override
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        sys.stdout.write(text + "\n" * stream_end)
        sys.stdout.flush()


def converse(
    models: Sequence[EvaluatedModel],
    decoding: Decoding,
    load: Callable[[EvaluatedModel], PreTrainedModel],
) -> None:
    """Answer lines of standard input until they end; all models are in memory at once.

    Args:
        models: Who answers, in this order, each by what it has said itself.
        decoding: How.
        load: Gives a model on its device.

    Raises:
        UserError: If a model has no chat template; before one is loaded.
    """
    for model in models:
        encode_chat(model.tokenizer, [{"role": "user", "content": "a"}])
    speakers = [_Speaker(model, load(model)) for model in models]
    for line in _lines():
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            for speaker in speakers:
                speaker.messages = []
            sys.stdout.write("a new conversation\n")
        elif line.strip():
            for speaker in speakers:
                _say(speaker, line, decoding, named=len(speakers) > 1)


def _say(speaker: _Speaker, line: str, decoding: Decoding, named: bool) -> None:
    if named:
        sys.stdout.write(f"[{speaker.model.name}]\n")
    try:
        speaker.answer(line, decoding)
    except UserError as error:
        sys.stderr.write(f"error: {error}; /reset begins a new conversation\n")


def _lines() -> Iterator[str]:
    """What is typed, or comes through a pipe."""
    if not sys.stdin.isatty():
        yield from map(str.rstrip, sys.stdin)
        return
    sys.stdout.write(_HELP)
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
