"""What a page is made of: run folders, exported directories, results of `compare` and `evaluate`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from roi_lightning.errors import UserError, did_you_mean
from roi_lightning.export.sidecar import WITH_WEIGHTS, read_sidecar
from roi_lightning.models.source import SIDECAR
from roi_lightning.reports.run_files import CONFIG, EXPORT, RECORD, REPORT, SUMMARY
from roi_lightning.reports.run_record import RunRecord, read_record

OVERLAP: Final = "overlap.json"
_METHODS: Final = {"roi": "RoI", "maskllm": "MaskLLM", "proxsparse": "ProxSparse", "maskpro": "MaskPro"}
_KINDS: Final = (
    f"a run's folder ({RECORD} or {SUMMARY}), an exported directory ({SIDECAR}), a folder of compare ({OVERLAP}), or "
    "the JSON of evaluate"
)


@dataclass(frozen=True)
class Mask:
    """A run or an exported directory: a mask, and what is known of how it was made.

    Attributes:
        path: As given.
        name: To show; unique on the page.
        kind: A run of `fit`, or a directory of `prune`, `apply`, `fit` or `export`.
        record: What the run recorded; None without a record.
        summary: Content of `summary.json`; empty without.
        report: Content of `report.json`; empty without.
        sidecar: Of the export; empty without.
        export: The exported directory; None without.
        config: The run's `config.yaml`; None without.
    """

    path: Path
    name: str
    kind: Literal["run", "export"]
    record: RunRecord | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    sidecar: Mapping[str, Any] = field(default_factory=dict)
    export: Path | None = None
    config: Path | None = None

    @property
    def run(self) -> Mapping[str, Any]:
        """What the newest leg says that the run is: model, method, pattern, corpora and so on."""
        return self.record.legs[-1].start["run"] if self.record else {}

    @property
    def training(self) -> Mapping[str, Any]:
        """What the export says about how the mask was made."""
        found: Mapping[str, Any] = self.sidecar.get("training", {})
        return found

    @property
    def model(self) -> str:
        """The base model as it was named."""
        return str(self.run.get("model") or self.sidecar.get("base", {}).get("spec") or "a model")

    @property
    def pattern(self) -> str:
        """N:M, or mixed patterns as `2:4 + 4:8 + dense`."""
        return str(
            self.run.get("pattern") or self.sidecar.get("pattern") or self.summary.get("pattern") or "N:M"
        )

    @property
    def mixed(self) -> Mapping[str, Any]:
        """Of mixed patterns the numbers of weights `kept` and `prunable`; else empty."""
        found: Mapping[str, Any] = self.run.get("mixed_patterns") or self.sidecar.get("mixed_patterns") or {}
        return found

    @property
    def learned(self) -> str:
        """What the summary calls the learned mask: its last row."""
        return str(next(reversed(self.summary["perplexity"])))

    @property
    def method(self) -> str:
        """As one writes it."""
        names = [self.run.get("method"), self.training.get("method")]
        if not any(names) and self.summary:
            names.append(self.learned)
        name = str(next(filter(None, names), "an unknown method"))
        learner, trained, _ = name.partition(WITH_WEIGHTS)
        return f"{_METHODS.get(learner, learner)}{' with trained weights' if trained else ''}"

    @property
    def status(self) -> str:
        """Of the last leg: `finished`, `interrupted`, `failed` or `killed`."""
        return self.record.legs[-1].status if self.record else "finished"

    @property
    def last_step(self) -> int:
        """The last optimizer step that anything is known of."""
        if self.record is None:
            return int(self.summary.get("steps") or self.training.get("steps") or 0)
        leg = self.record.legs[-1]
        steps = [points[-1][0] for points in self.record.curves.values()]
        return max([int(leg.start["step"]), *([] if leg.end is None else [int(leg.end["step"])]), *steps])

    @property
    def resumed_at(self) -> list[int]:
        """The steps at which later legs began."""
        return [int(leg.start["step"]) for leg in self.record.legs[1:]] if self.record else []


@dataclass(frozen=True)
class Results:
    """A file of `evaluate` or `compare`.

    Attributes:
        path: As given.
        content: Of the file.
    """

    path: Path
    content: Mapping[str, Any]


@dataclass(frozen=True)
class Sources:
    """Everything that a page is made of.

    Attributes:
        masks: Runs and exported directories, in the order given.
        evaluations: Of `evaluate`.
        comparisons: Of `compare`.
    """

    masks: list[Mask]
    evaluations: list[Results]
    comparisons: list[Results]


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read what a page is made of.

    Args:
        paths: Run folders, exported directories, folders of `compare`, JSON files of `evaluate` or `compare`.

    Raises:
        UserError: If a path is none of them, is given twice, or a file in it is damaged.
    """
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if resolved.count(path.resolve()) > 1:
            raise UserError(f"{str(path)!r} is given twice; give every run once")
    sources = Sources([], [], [])
    for path, name in zip(paths, _names(paths), strict=True):
        found = _read(path, name)
        if isinstance(found, Mask):
            sources.masks.append(found)
        else:
            (sources.comparisons if "overlap" in found.content else sources.evaluations).append(found)
    return sources


def _names(paths: Sequence[Path]) -> list[str]:
    """The last part of every path, or as many as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read(path: Path, name: str) -> Mask | Results:
    if path.is_file():
        content = _object(path)
        if _is_results(content):
            return Results(path, content)
    elif any((path / file).is_file() for file in (RECORD, SUMMARY, REPORT)):
        return _read_run(path, name)
    elif (path / SIDECAR).is_file():
        return Mask(path, name, "export", sidecar=read_sidecar(path, None), export=path)
    elif (path / OVERLAP).is_file():
        return Results(path, _object(path / OVERLAP))
    elif path.is_dir():
        runs = sorted(found.parent.name for found in path.glob(f"*/{RECORD}"))
        raise UserError(
            f"{str(path)!r} has nothing to report; give {_KINDS}" + did_you_mean_inside(path, runs)
        )
    else:
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"there is no {str(path)!r}; give {_KINDS}" + did_you_mean(path.name, near))
    raise UserError(f"{str(path)!r} is nothing that evaluate or compare wrote; give {_KINDS}")


def did_you_mean_inside(folder: Path, runs: Sequence[str]) -> str:
    """A question to end an error about a folder of runs with; empty if there are none in it."""
    return f"; did you mean {str(folder / runs[0])!r}?" if runs else ""


def _is_results(content: object) -> bool:
    if not isinstance(content, dict):
        return False
    return isinstance(content.get("overlap"), list) or (
        isinstance(content.get("models"), dict) and isinstance(content.get("settings"), dict)
    )


def _read_run(path: Path, name: str) -> Mask:
    export = path / EXPORT
    summary = _optional(path / SUMMARY)
    if not (export / SIDECAR).is_file() and summary.get("export"):
        export = Path(summary["export"])
    has_export = (export / SIDECAR).is_file()
    return Mask(
        path,
        name,
        "run",
        read_record(path) if (path / RECORD).is_file() else None,
        summary,
        _optional(path / REPORT),
        read_sidecar(export) if has_export else {},
        export if has_export else None,
        path / CONFIG if (path / CONFIG).is_file() else None,
    )


def _optional(path: Path) -> dict[str, Any]:
    return _object(path) if path.is_file() else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} can't be read: {error}; write it again, or move it away") from error
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} holds no JSON object; write it again, or move it away")
    return content
