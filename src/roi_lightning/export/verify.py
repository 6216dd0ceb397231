"""Prove that a directory is what an export left: every byte, every zero, and every survivor."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roi_lightning.errors import UserError
from roi_lightning.export import checks
from roi_lightning.export.base import BaseTensors, open_base
from roi_lightning.sources import ModelSource


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: What was checked.
        ok: Whether it held.
        detail: How much was checked, or what is wrong.
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of all checks of one directory."""

    directory: Path
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.ok for check in self.checks)

    @property
    def failures(self) -> list[Check]:
        """The checks that did not hold."""
        return [check for check in self.checks if not check.ok]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        rows = [asdict(check) for check in self.checks]
        return {"directory": str(self.directory), "ok": self.ok, "checks": rows}


def verify_export(directory: Path, base: ModelSource | BaseTensors | None = None) -> VerifyReport:
    """Check an exported directory.

    Args:
        directory: Any directory.
        base: The model it was made from; without it the survivors are only known by the files' hashes.

    Raises:
        UserError: If there is no such directory or the base can't be read. Whatever is wrong inside the
            directory is reported, not raised.
    """
    if not directory.is_dir():
        raise UserError(f"{str(directory)!r} is no directory; give one that was exported or packed")
    return VerifyReport(directory, list(_checks(directory, base)))


def require_verified(what: str, directory: Path, base: ModelSource | BaseTensors | None = None) -> None:
    """Refuse a directory with something wrong in it.

    Args:
        what: What the directory is called in the error.
        directory: See `verify_export`.
        base: Likewise.

    Raises:
        UserError: Naming every check that failed, and saying of the first what is wrong; others often follow from it.
    """
    report = verify_export(directory, base)
    if not report.ok:
        first, *others = report.failures
        also = f"; also {', '.join(check.name for check in others)}" if others else ""
        raise UserError(
            f"{what} does not verify ({first.name}: {first.detail}{also}); fetch or write it again"
        )


def _checks(directory: Path, base: ModelSource | BaseTensors | None) -> Iterator[Check]:
    export = checks.Exported(directory)
    yield run_check("sidecar", lambda: f"pattern {export.sidecar['pattern']}, checksum right")
    yield run_check("files", lambda: checks.files(export))
    yield run_check("checksums", lambda: checks.checksums(export))
    yield run_check("config", lambda: checks.config(export))
    yield run_check("mask", lambda: checks.mask(export))
    yield run_check("zeros", lambda: checks.zeros(export))
    if checks.has_updates(export):
        yield run_check("updates", lambda: checks.updates(export))
    if base is None:
        return
    tensors = open_base(base, _dtype(export)) if isinstance(base, ModelSource) else base
    yield run_check("copied files", lambda: checks.copied(export, tensors))
    yield run_check("same tensors", lambda: checks.same_tensors(export, tensors))
    yield run_check("base hashes", lambda: checks.base_hashes(export, tensors))
    yield run_check("survivors", lambda: checks.survivors(export, tensors))
    yield run_check("other tensors", lambda: checks.others(export, tensors))


def run_check(name: str, check: Callable[[], str]) -> Check:
    """The outcome of one check, whichever way it ends."""
    try:
        return Check(name, True, check())
    except checks.CheckFailedError as error:
        return Check(name, False, str(error))
    except Exception as error:  # damaged files fail in ways of their own; none may look like success
        return Check(name, False, f"can't be checked: {error or type(error).__name__}")


def _dtype(export: checks.Exported) -> str:
    try:
        return export.masks.base.dtype
    except UserError:
        return "auto"
