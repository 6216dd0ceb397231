"""Chats as calibration text: rendered by the tokenizer's chat template, with the tokens of the answers known.

Until it is tokenised a chat is a document like any other, the JSON of its messages: held out, streamed and cached as
text is.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jinja2
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from roi_lightning.data.files import whole
from roi_lightning.data.packing import TextTokenizer, Tokens
from roi_lightning.errors import UserError, reason

Message = dict[str, str]
ANSWERS: Final = "assistant"
_SHAREGPT: Final = {"human": "user", "gpt": ANSWERS}
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks an answer in a template
_SHOWN: Final = 100  # characters of a chat in an error
# In a template that writes the date a run that resumes tomorrow would find other tokens.
_FIXED_DATE: Final = "{% macro strftime_now(format) %}2025-01-01{% endmacro %}"


def chat_document(chat: object, source: str) -> str | None:
    """A row's chat as a document: the JSON of its messages; None where it has none.

    Args:
        chat: A list of messages: `role` and `content`, or `from` and `value` as ShareGPT has them.
        source: The corpus, for errors.

    Raises:
        UserError: If that is no chat.
    """
    if chat is None or chat == []:
        return None
    if isinstance(chat, list):
        messages = [_message(entry) for entry in chat]
        if None not in messages:
            return json.dumps(messages)
    raise UserError(
        f"corpus {source!r} has a row that is no chat, {_shown(chat)}; give a list of messages, each of two texts "
        "and nothing else: role and content, or from and value"
    )


def _message(entry: object) -> Message | None:
    if not isinstance(entry, dict):
        return None
    match {key: value for key, value in entry.items() if value is not None}:
        case {"role": str(role), "content": str(content), **others} if not others:
            return {"role": role, "content": whole(content)}
        case {"from": str(role), "value": str(content), **others} if not others:
            return {"role": _SHAREGPT.get(role, role), "content": whole(content)}
    return None


@dataclass(frozen=True)
class ChatTokenizer(TextTokenizer):
    """Turns chats into tokens, by the tokenizer's chat template.

    Attributes:
        answers_only: Whether only tokens of the assistant's messages count as predicted.

    Raises:
        UserError: If the tokenizer has no chat template, or can't tell which tokens the answers are.
    """

    answers_only: bool = False

    def __post_init__(self) -> None:
        if self.answers_only and not self.tokenizer.is_fast:
            raise UserError(
                f"{type(self.tokenizer).__name__} does not say where its tokens are in a text, as loss_on: answers "
                "needs; set loss_on: all"
            )
        _ = self.template

    @property
    def template(self) -> str:
        """The Jinja template, its date fixed."""
        try:
            template: str = self.tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                f"corpus {self.source!r} holds chats, and tokenizer {self.tokenizer.name_or_path!r} has no chat "
                "template; use a chat model, put its chat_template.jinja beside the tokenizer, or give plain text "
                "(text_field)"
            ) from error
        return _FIXED_DATE + template if "strftime_now" in template else template

    @property
    def template_digest(self) -> str:
        """Of the template and the special tokens that it may write."""
        described = [self.template, self.tokenizer.special_tokens_map]
        return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()

    @property
    @override
    def separator(self) -> int | None:
        return None

    @property
    @override
    def identity(self) -> str:
        return f"{super().identity} {self.template_digest} {self.answers_only}"

    @override
    def __call__(self, documents: Sequence[str]) -> list[Tokens]:
        """Token ids of each chat, int32, as `apply_chat_template` gives them, except two special tokens.

        A BOS that windows begin with anyway is left out, and an EOS parts a chat from the next one unless the
        template ends with it. Tokens whose prediction does not count are ~id.

        Args:
            documents: As `chat_document` makes them.

        Raises:
            UserError: If the template refuses a chat, or does not show where its answers are.
        """
        chats: list[list[Message]] = [json.loads(document) for document in documents]
        texts = [self._render(chat) for chat in chats]
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=self.answers_only,
            verbose=False,  # chats longer than the model's context are expected, they are cut afterwards
        )
        rows = [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]
        if self.answers_only:
            offsets = map(np.asarray, encoded["offset_mapping"])
            answers = (self._answers(*each) for each in zip(chats, texts, offsets, strict=True))
            rows = [np.where(counted, ids, ~ids) for ids, counted in zip(rows, answers, strict=True)]
        return [self._parted(ids, text) for ids, text in zip(rows, texts, strict=True)]

    def _render(self, chat: Sequence[Message], *, ask: bool = False) -> str:
        """A chat as text, with what asks for the next answer after it."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(chat), chat_template=self.template, add_generation_prompt=ask, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template of {self.tokenizer.name_or_path!r} refuses a chat of {self.source!r}, "
                f"{_shown(chat)} ({reason(error)}); leave such chats out"
            ) from error
        return str(rendered)

    def _answers(self, chat: list[Message], text: str, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens of a rendered chat belong to answers, their end-of-turn tokens included."""
        if _GENERATION.search(self.template):
            marked: Any = self.tokenizer.apply_chat_template(
                chat, chat_template=self.template, return_assistant_tokens_mask=True
            )
            return np.asarray(marked["assistant_masks"], dtype=bool)
        first, last = offsets.reshape(-1, 2).T
        counted = np.zeros(len(first), dtype=bool)
        for number, message in enumerate(chat):
            if message["role"] == ANSWERS:
                start, end = self._span(chat, number, text)
                counted |= (first < end) & (last > start)
        return counted

    def _span(self, chat: list[Message], number: int, text: str) -> tuple[int, int]:
        """First character of an answer and the one after its last: what a rendered chat gains by it."""
        if number:
            before, after = self._render(chat[:number], ask=True), self._render(chat[: number + 1])
            begins = after[len(before) :].lstrip().startswith(chat[number]["content"].strip())
            # A template that asks for nothing may still write the name of who answers.
            asked = begins or before != self._render(chat[:number])
            if asked and after.startswith(before) and text.startswith(after):
                return len(before), len(after.rstrip())
        why = "changes with what follows it" if number else "comes before any question"
        raise UserError(
            f"the chat template of {self.tokenizer.name_or_path!r} does not show which tokens are answers: answer "
            f"{number + 1} of {_shown(chat)} in {self.source!r} {why}; put {{% generation %}} and "
            "{% endgeneration %} around answers in the template, or set loss_on: all"
        )

    def _parted(self, ids: Tokens, text: str) -> Tokens:
        if self.bos is not None and len(ids) and ids[0] in (self.bos, ~self.bos):
            ids = ids[1:]
        eos = self.tokenizer.eos_token
        if eos is None or text.rstrip().endswith(eos):
            return ids
        end = np.asarray([self.tokenizer.eos_token_id], dtype=np.int32)
        return np.append(ids, ~end if self.answers_only else end)


def _shown(chat: object) -> str:
    said = json.dumps(chat, ensure_ascii=False, default=str)
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…"
