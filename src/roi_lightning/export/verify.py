"""Prove that a directory is as exported: every byte, every zero, and every kept weight."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec

from roi_lightning.errors import UserError, near_folder
from roi_lightning.export import checks
from roi_lightning.masks.mask_set import MASK_FILE
from roi_lightning.models.base_tensors import BaseTensors, open_base
from roi_lightning.models.source import SIDECAR, ModelSource

P = ParamSpec("P")


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

    def require(self, what: str) -> None:
        """Refuse a directory with something wrong in it; later failures often follow from the first.

        Args:
            what: What the directory is called in the error.

        Raises:
            UserError: Naming every check that failed, and saying of the first what is wrong.
        """
        if not self.ok:
            first, *others = self.failures
            also = f"; also {', '.join(check.name for check in others)}" if others else ""
            reason = f"{first.name}: {first.detail}{also}"
            raise UserError(f"{what} does not verify ({reason}); fetch or write it again")

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        rows = [asdict(check) for check in self.checks]
        return {"directory": str(self.directory), "ok": self.ok, "checks": rows}


def verify_export(directory: Path, base: ModelSource | BaseTensors | None = None) -> VerifyReport:
    """Check an exported directory.

    Args:
        directory: Any directory.
        base: The model it was made from; without it the kept weights are only known by the files' hashes.

    Raises:
        UserError: If there is no such directory or the base can't be read. Whatever is wrong inside the
            directory is reported, not raised.
    """
    if not directory.is_dir():
        raise UserError(f"{str(directory)!r} is no directory; give an exported one{near_folder(directory)}")
    if not any((directory / name).exists() for name in (SIDECAR, MASK_FILE)):
        below = [str(each) for each in directory.iterdir() if (each / SIDECAR).is_file()]
        remedy = f"but holds one; give {below[0]!r}" if below else f"for it has no {SIDECAR}; give one"
        raise UserError(f"{str(directory)!r} is no exported directory, {remedy}")
    return VerifyReport(directory, list(_checks(directory, base)))


def _checks(directory: Path, base: ModelSource | BaseTensors | None) -> Iterator[Check]:
    export = checks.Exported(directory)
    yield run_check("sidecar", checks.sidecar, export)
    yield run_check("files", checks.files, export)
    yield run_check("checksums", checks.checksums, export)
    yield run_check("config", checks.config, export)
    yield run_check("mask", checks.mask, export)
    yield run_check("zeros", checks.zeros, export)
    masks = None
    with suppress(UserError):  # the check of the mask file reports it
        masks = export.masks
    if masks is not None and masks.updated:
        yield run_check("updates", checks.updates, export)
    if base is None:
        return
    tensors = open_base(base, "auto" if masks is None else masks.base.dtype)
    yield run_check("copied files", checks.copied, export, tensors)
    yield run_check("same tensors", checks.same_tensors, export, tensors)
    yield run_check("base hashes", checks.base_hashes, export, tensors)
    yield run_check("survivors", checks.survivors, export, tensors)
    yield run_check("other tensors", checks.others, export, tensors)


def run_check(name: str, check: Callable[P, str], *args: P.args, **options: P.kwargs) -> Check:
    """The outcome of one check, whichever way it ends."""
    try:
        return Check(name, True, check(*args, **options))
    except checks.CheckFailedError as error:
        return Check(name, False, str(error))
    except Exception as error:  # damaged files fail in ways of their own; none may look like success
        return Check(name, False, f"can't be checked: {error or type(error).__name__}")
