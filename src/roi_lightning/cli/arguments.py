"""The options of the commands that take no configuration; importing this imports neither torch nor Lightning."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.oneshot.settings import PruneSettings

DType = Literal["auto", "float32", "bfloat16", "float16"]  # as in models.config, which imports torch


@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """Write a base model with a mask applied to it.

    Attributes:
        lm: The base model: hub id, directory, or GGUF file.
        mask: A mask file or an exported directory.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        dtype: What a GGUF model is cast to (default: what the mask was made for).
    """

    lm: str = field(kw_only=False)
    mask: Path = field(kw_only=False)
    out: Path
    overwrite: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Measure how much of what one mask keeps another keeps too (weights kept by both ÷ weights kept).

    Overall, by kind of layer, by layer. Writes overlap.json and masks.png: corners of q_proj, k_proj and up_proj of
    the middle block, a column per mask, measured against the last one.

    Attributes:
        masks: Two or more mask files or exported directories; NAME=PATH chooses the name to show.
        out: The folder to write to.
        json: Also write the overlaps as JSON there.
    """

    masks: list[str] = field(kw_only=False)
    out: Path
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Say what this machine has of what decides how fast a run is.

    Attributes:
        json: Also write the same as JSON there.
    """

    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvalConfig):
    """Perplexities, zero-shot accuracy and any task of lm-evaluation-harness, side by side.

    Attributes:
        lm: Hub ids, directories (packed or not), GGUF files, or mask files (with --base).
        base: The model that mask files apply to; if among the models, the one that others are compared with.
        dtype: Of the weights: auto for the stored one, bfloat16 for GGUF.
        device: auto, cpu, cuda or cuda:N.
        json: Also write the results as JSON there.
        markdown: Also write them as Markdown there.
        trust_remote_code: Let the models' own Python code run.
    """

    lm: list[str] = field(kw_only=False)
    base: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    json: Path | None = None
    markdown: Path | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class PruneOptions(PruneSettings):
    """Choose N of every M weights without training, layer after layer.

    Writes the same directory and mask file as a learned mask gets.

    Attributes:
        lm: Hub id, directory, or GGUF file.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        corpora: Calibration text, as in data.corpora: files, globs, hub ids, python-docs, or mappings like
            '{source: x.jsonl, text_field: body}'; of chats '{source: x.jsonl, messages_field: messages}'.
        revision: Branch, tag or commit of a hub id.
        dtype: In which the model runs, and a GGUF model is saved: auto for the stored one, bfloat16 for GGUF.
        trust_remote_code: Run the model repository's code.
    """

    lm: str = field(kw_only=False)
    method: str = field()
    out: Path
    overwrite: bool = False
    corpora: Sequence[str] = ("python-docs",)
    revision: str | None = None
    dtype: DType = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one HTML page of a run: perplexities, curves, the mask, continuations. It needs no other file.

    Attributes:
        run: The run's folder.
        out: The page to write; an earlier page is replaced.
    """

    run: Path = field(kw_only=False)
    out: Path


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check N:M along the input dimension, exact zeros and every file's hash.

    With --base also that kept weights are bit for bit the base model's (packed in int8: the base model's in int8) and
    nothing else changed.

    Attributes:
        directory: An exported, packed or permuted directory.
        base: The base model: hub id, directory, or GGUF file.
        json: Also write the result as JSON there.
    """

    directory: Path = field(kw_only=False)
    base: str | None = None
    json: Path | None = None
