"""Documents that the dense model writes, in a file that is read like any other text.

Each batch of documents is added to an unfinished file when it is done; a run that was interrupted resumes there, and
ends with the same text.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.contrib.self_text.samples import Document, Selection, sample_documents, start_token
from roi_lightning.contrib.self_text.settings import BATCH_SIZE, SampleSettings, about
from roi_lightning.data.packing import identity as tokenizer_identity
from roi_lightning.errors import UserError, reason
from roi_lightning.export.sidecar import file_sha256
from roi_lightning.models.config import DType, load_config, max_positions
from roi_lightning.models.loading import load_language_model
from roi_lightning.models.source import ModelSource
from roi_lightning.models.stored_tensors import StoredTensors
from roi_lightning.utils.atomic_io import write_json, written_aside
from roi_lightning.utils.progress import progress

UNFINISHED: Final = ".unfinished"
_VERSION: Final = 1  # to be raised when the same settings give other documents


@dataclass(frozen=True, eq=False, kw_only=True)
class Author:
    """The dense model that writes, and how it is run.

    Attributes:
        source: Where it is stored.
        tokenizer: Its own.
        device: Where it computes.
        dtype: Of its weights.
        batch_size: Documents at a time; the text depends on it by rounding only.
        trust_remote_code: Run its repository's code.
    """

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: DType = "auto"
    batch_size: int = BATCH_SIZE
    trust_remote_code: bool = False

    @cached_property
    def digest(self) -> str:
        """What tells the model from others: a commit on the hub, else a SHA-256 of its weights and configuration."""
        source = self.source
        if source.commit is not None:
            return source.commit
        if source.kind == "gguf" and source.path is not None:
            files = [source.path]
        else:
            stored = StoredTensors(source.directory).files.values()
            files = [source.directory / name for name in ("config.json", *sorted(set(stored)))]
        digests = [file_sha256(path) for path in progress(files, "hashing the model")]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def identity(self, settings: SampleSettings) -> dict[str, Any]:
        """What its documents depend on, except for rounding; plain values.

        Raises:
            UserError: If the tokenizer has no token to start with.
        """
        start = start_token(self.tokenizer, settings.start)
        text = {"model": self.digest, "tokenizer": tokenizer_identity(self.tokenizer)}
        return {"version": _VERSION, **text, "dtype": self.dtype, **asdict(settings), "start": start}

    def load(self) -> PreTrainedModel:
        """The model, on its device."""
        lm = load_language_model(self.source, self.dtype, self.trust_remote_code, device=self.device)
        lm.to(self.device)  # type: ignore[arg-type]
        return lm


def write_samples(author: Author, settings: SampleSettings, out: Path) -> dict[str, Any]:
    """Have a model write documents to a file of JSON lines with one field, `text`, and facts about it beside it.

    Args:
        author: The model.
        settings: Which documents.
        out: The file; what an interrupted call left of it is used, if it is of the same text.

    Returns:
        The facts: what the text is a function of, counts and SHA-256 of the text, and what computed it.

    Raises:
        UserError: If the model can't be read, or takes fewer tokens, or writes nothing, or what is left of an earlier
            call is of another text, or the disk refuses.
    """
    _check_length(author, settings)
    identity, unfinished = author.identity(settings), out.with_name(f"{out.name}{UNFINISHED}")
    selection = Selection(author.tokenizer)
    for documents in _resume(unfinished, identity):
        selection.add(documents, settings.tokens)
    if selection.written:
        rank_zero_info(f"sampling resumes after {selection.written} documents in {str(unfinished)!r}")
    lm, before, started = author.load(), selection.tokens, time.perf_counter()
    for documents in _batches(lm, author, settings, selection):
        if not unfinished.exists():
            _append(unfinished, identity)
        _append(unfinished, [asdict(document) for document in documents])
    run = {
        "lm": author.source.spec,
        "tokens": selection.tokens - before,
        "seconds": round(time.perf_counter() - started, 1),
        "batch_size": author.batch_size,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in selection.texts]
    content = "".join(f"{line}\n" for line in lines).encode()
    text = selection.facts() | {"sha256": hashlib.sha256(content).hexdigest()}
    facts = {"identity": identity, "text": text, "run": run}
    write_json(about(out), facts)
    with written_aside(out) as partial:
        partial.write_bytes(content)
    unfinished.unlink(missing_ok=True)
    return facts


def summary(facts: Mapping[str, Any]) -> str:
    """The counts among the facts about a file, in words."""
    text = facts["text"]
    dropped = ", ".join(f"{count} {reason}" for reason, count in text["dropped"].items())
    return (
        f"{text['documents']:,} documents of {text['tokens']:,} tokens, {text['ended']:,} of them ended by the "
        f"model; dropped: {dropped}"
    )


def _check_length(author: Author, settings: SampleSettings) -> None:
    config = load_config(author.source, author.trust_remote_code)
    longest = max_positions(config)
    if longest is not None and settings.max_tokens > longest:
        raise UserError(
            f"max_tokens of sampled text is {settings.max_tokens} and model {author.source.spec!r} reads at most "
            f"{longest} tokens; lower it"
        )


class _Advance:
    """The report of `progress` on work of which many pieces are done at a time.

    Args:
        total: Pieces.
        description: What is being done to them.

    Attributes:
        done: How many are.
    """

    def __init__(self, total: int, description: str) -> None:
        self._report = iter(progress(range(total), description))
        self.done = 0
        next(self._report, None)

    def go_to(self, done: int) -> None:
        """So many pieces are done, or will never come."""
        for _ in range(done - self.done):
            next(self._report, None)
        self.done = max(self.done, done)

    def close(self) -> None:
        """End the report."""
        self._report.close()  # type: ignore[attr-defined]  # a generator


def _batches(
    lm: PreTrainedModel, author: Author, settings: SampleSettings, selection: Selection
) -> Iterator[list[Document]]:
    """Documents, batch by batch, selected once they are dealt with, until there are enough."""
    before = selection.tokens
    with closing(_Advance(settings.tokens - before, "sampling tokens")) as advance:
        while selection.tokens < settings.tokens:
            done = selection.tokens - before
            numbers = selection.next_batch(settings, author.batch_size)
            report = partial(_report, advance, done)
            documents = sample_documents(lm, author.tokenizer, settings, numbers, report)
            yield documents
            selection.add(documents, settings.tokens)


def _report(advance: _Advance, before: int, drawn: int) -> None:
    advance.go_to(before + drawn)


def _resume(file: Path, identity: Mapping[str, Any]) -> list[list[Document]]:
    """The batches in an unfinished file, none if there is no such file; a line that has no end is cut off."""
    if not file.exists():
        return []
    try:
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        head, *lines = [json.loads(line) for line in whole.splitlines()]
        batches = [[Document(**document) for document in batch] for batch in lines]
        other = sorted(name for name in identity if head.get(name) != identity[name])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{str(file)!r} can't be resumed ({reason(error)}); remove it") from error
    if other:
        raise UserError(
            f"{str(file)!r} is left of other samples, with another {', '.join(other)}; remove it, choose another "
            "file, or resume with the same model and settings"
        )
    os.truncate(file, len(whole))
    return batches


def _append(file: Path, value: object) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as stream:
            stream.write(f"{json.dumps(value)}\n".encode())
    except OSError as error:
        raise UserError(
            f"{str(file)!r} can't be written: {error}; make room or choose another place"
        ) from error
