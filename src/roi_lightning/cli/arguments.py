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
        mask: A mask file, a run's folder or an exported directory.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        dtype: Number type that a GGUF model is cast to (default: the type that the mask was made for).
    """

    lm: str = field(kw_only=False)
    mask: Path = field(kw_only=False)
    out: Path
    overwrite: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Measure how many weights two masks both keep, as a share of the weights that one of them keeps.

    Prints a table. Writes overlap.json (overall, by kind of layer, by layer) and masks.png, corners of q_proj, k_proj
    and up_proj of the middle block. Each column is a mask; the last mask is the reference.

    Attributes:
        masks: Two or more mask files, folders of runs or exported directories; NAME=PATH chooses the name to show.
        out: The folder to write to.
        json: Also write the overlaps as JSON there.
    """

    masks: list[str] = field(kw_only=False)
    out: Path
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check what decides how fast runs are on this machine.

    Attributes:
        json: File to write the checks to as JSON, besides printing.
    """

    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvalConfig):
    """Measure perplexities, zero-shot accuracy and any task of lm-evaluation-harness, side by side.

    Attributes:
        lm: Hub ids, directories (packed or not), folders of runs, GGUF files, or mask files (with --base).
        base: The model that mask files apply to. If it is measured too, the others are compared with it.
        dtype: Number type of the weights; auto takes the stored type, and bfloat16 for GGUF.
        device: Device to run on: auto, cpu, cuda or cuda:N.
        json: File to write the results to as JSON, besides printing.
        markdown: File to write the tables to as Markdown, besides printing.
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
class NewOptions:
    """Make a project of your own: a learner with its training step, a schedule, a corpus, a configuration, a test.

    Attributes:
        folder: The folder to make. Its name, with underscores for dashes, names the Python package in it.
    """

    folder: Path = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(PruneSettings):
    """Choose N of every M weights without training, layer after layer.

    Writes the same kind of directory and mask file as fit.

    Attributes:
        lm: Hub id, directory, or GGUF file.
        out: The directory to write.
        overwrite: Replace an earlier export there.
        corpora: Calibration text, as in data.corpora: files, globs, hub ids, python-docs, or mappings like
            '{source: x.jsonl, text_field: body}'; for chats '{source: x.jsonl, messages_field: messages}'.
        revision: Branch, tag or commit of a hub id.
        dtype: Number type that the model runs in, and that a GGUF model is saved in; auto takes the stored type, and
            bfloat16 for GGUF.
        trust_remote_code: Let the model repository's own Python code run.
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
        run: The run's folder, such as runs/NAME.
        out: The page to write; an earlier page is replaced.
    """

    run: Path = field(kw_only=False)
    out: Path


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Check N:M along the input dimension, exact zeros and every file's hash.

    With --base it also checks that kept weights are bit for bit the base model's (rounded to int8 if packed so), and
    that nothing else changed.

    Attributes:
        directory: An exported, packed or permuted directory, or a run's folder for its export.
        base: The base model: hub id, directory, or GGUF file.
        json: File to write the result to as JSON, besides printing.
    """

    directory: Path = field(kw_only=False)
    base: str | None = None
    json: Path | None = None
