"""Continue prompts by a causal language model, one at a time: no answer depends on its neighbours in a batch."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final, cast

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.data.packing import find_bos, tokenize
from roi_lightning.data.samples import end_tokens
from roi_lightning.errors import UserError
from roi_lightning.utils.progress import Advance

Message = dict[str, str]  # role and content
_JSON_LINES: Final = ".jsonl"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the tokens of a continuation are chosen.

    Attributes:
        max_new_tokens: Tokens after a prompt at most; the model may end its text before.
        temperature: 0 takes the most probable token every time, above 0 one is drawn: the higher, the bolder.
        top_p: Draw only from the most probable tokens that have this share of the probability together.
        seed: Of the draws; every prompt starts with it.

    Raises:
        UserError: For numbers out of range, and a top_p where nothing is drawn.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.seed < 0:
            raise UserError(
                f"max_new_tokens is {self.max_new_tokens} and seed {self.seed}; give at least 1 and 0"
            )
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise UserError(
                f"temperature is {self.temperature:g} and top_p {self.top_p:g}; give 0 or above, and above 0 up to 1"
            )
        if self.top_p < 1 and not self.temperature:
            raise UserError(
                f"top_p is {self.top_p:g} and nothing is drawn at temperature 0; set temperature as well"
            )

    @property
    def method(self) -> str:
        """In words."""
        if not self.temperature:
            return "greedy"
        return f"sampled at temperature {self.temperature:g}, top_p {self.top_p:g}, seed {self.seed}"

    def to_transformers(self, ends: list[int]) -> transformers.GenerationConfig:
        """The same for `generate`.

        Args:
            ends: The tokens that end a text.
        """
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0} if self.temperature else {}
        return transformers.GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=bool(self.temperature),
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,  # of sequences that have ended; there is only one
            use_cache=True,
            **drawn,
        )


@dataclass(frozen=True)
class Continuation:
    """What a model makes of a prompt.

    Attributes:
        text: The new tokens as text, without special ones.
        tokens: How many were generated, the one that ended the text included.
        seconds: It took, the prompt included.
    """

    text: str
    tokens: int
    seconds: float


def read_prompts(file: Path | str) -> list[str]:
    """Prompts of a file: a line each, or of `.jsonl` the field `prompt` of each line; blank lines are none.

    Raises:
        UserError: If it can't be read or holds none.
    """
    path = Path(file)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [json.loads(line)["prompt"] for line in lines] if path.suffix == _JSON_LINES else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"prompts {str(file)!r} can't be read ({reason}); give UTF-8 text with a prompt per line, or .jsonl "
            'with {"prompt": …} per line'
        ) from error
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(f"prompts {str(file)!r} holds no prompt, or one that is no text; give some")
    return prompts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text to be continued, behind the BOS that the tokenizer puts before a text, if it does.

    Raises:
        UserError: If there are none.
    """
    bos = find_bos(tokenizer)
    ids = [] if bos is None else [bos]
    ids += tokenize([text], tokenizer)[0].tolist()
    if not ids:
        raise UserError("a prompt is empty; give some text to continue")
    return ids


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The tokens of a conversation by the tokenizer's chat template, up to where the model is to answer.

    Raises:
        UserError: If it has no template, or the template refuses the conversation.
    """
    name = tokenizer.name_or_path
    if tokenizer.chat_template is None:
        raise UserError(
            f"the tokenizer of {name!r} has no chat template; leave --chat out and give texts to continue"
        )
    try:
        ids = tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template raises what it likes
        raise UserError(f"the chat template of {name!r} refuses the conversation: {error}") from error
    return cast("list[int]", ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Tokens as text, without special ones."""
    return cast(str, tokenizer.decode([*ids], skip_special_tokens=True))


def check_room(tokens: int, new: int, longest: int | None) -> None:
    """Refuse a prompt whose continuation the model was not made for.

    Args:
        tokens: Of the prompt.
        new: `max_new_tokens`.
        longest: Tokens the model was made for; None where it names no limit.

    Raises:
        UserError: Naming the three.
    """
    if longest is not None and tokens + new > longest:
        raise UserError(
            f"a prompt of {tokens} tokens and {new} new ones are more than the model's {longest}; shorten it or "
            "lower max_new_tokens"
        )


def continue_prompts(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    description: str = "continuing prompts",
) -> list[Continuation]:
    """Continue prompts one after the other, with a report of how far that is.

    Args:
        lm: In whatever mode its layers are. If it is sharded, every rank has to call this, with the same prompts.
        tokenizer: Its own.
        prompts: Token ids, from `encode_prompt` or `encode_chat`.
        decoding: How.
        description: For the report.
    """
    done = []
    with closing(_Ticks(len(prompts) * decoding.max_new_tokens, description)) as ticks:
        for count, prompt in enumerate(prompts, 1):
            done.append(continue_prompt(lm, tokenizer, prompt, decoding, ticks))
            ticks.go_to(count * decoding.max_new_tokens)
    return done


def continue_prompt(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    decoding: Decoding,
    streamer: BaseStreamer | None = None,
) -> Continuation:
    """Continue one prompt; see `continue_prompts`.

    Args:
        lm: The model.
        tokenizer: Its own.
        prompt: Token ids.
        decoding: How.
        streamer: Is given every token as soon as it is known.
    """
    device = next(lm.parameters()).device
    ids = torch.tensor([list(prompt)], device=device)
    ends = end_tokens(lm, tokenizer)
    config = decoding.to_transformers(ends)
    started = perf_counter()
    with _ready(lm), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(decoding.seed)
        out: Tensor = lm.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=streamer,
            synced_gpus=isinstance(lm, FSDPModule),
        )
    new = out[0, len(prompt) :].tolist()
    seconds = perf_counter() - started
    count = next((i for i, token in enumerate(new, 1) if token in ends), len(new))
    return Continuation(decode(tokenizer, new[:count]), count, seconds)


@contextmanager
def _ready(lm: PreTrainedModel) -> Iterator[None]:
    """A model that generates by our settings alone: in train mode one that recomputes activations keeps no cache."""
    training, config = lm.training, lm.generation_config
    lm.eval()
    lm.generation_config = transformers.GenerationConfig()  # the model's own may sample, or punish repetition
    try:
        yield
    finally:
        lm.train(training)
        lm.generation_config = config


class _Ticks(BaseStreamer):
    """Moves a report of progress on with every token.

    Args:
        total: Tokens at most.
        description: What is being done.
    """

    def __init__(self, total: int, description: str) -> None:
        self._advance, self._prompt = Advance(total, description), True
        self.go_to, self.close = self._advance.go_to, self._advance.close

    @override
    def put(self, value: Tensor) -> None:
        if not self._prompt:  # the first that a streamer is given
            self.go_to(self._advance.done + 1)
        self._prompt = False

    @override
    def end(self) -> None:
        self._prompt = True
