"""A base model with its channels in another order as a directory: written to a temporary path, verified, renamed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from roi_lightning.contrib.permute.channels import consistent_orders
from roi_lightning.contrib.permute.permutation import PERMUTATION_FILE, Permutation, PermutedBase
from roi_lightning.errors import UserError
from roi_lightning.export import checks
from roi_lightning.export.destination import check_destination, check_not_base
from roi_lightning.export.formats import DirectoryFormat
from roi_lightning.export.sidecar import command_line, heading, plain, write_sidecar
from roi_lightning.export.verify import Check, VerifyReport, run_check
from roi_lightning.models.base_tensors import BaseTensors, open_base, same
from roi_lightning.models.source import ModelSource
from roi_lightning.utils.atomic_io import written_aside
from roi_lightning.utils.progress import progress

PERMUTED: Final = "roi_lightning.permuted"


def write_permuted(
    base: BaseTensors,
    permutation: Permutation,
    out: Path,
    facts: Mapping[str, object],
    check: Callable[[Path], None],
    *,
    overwrite: bool = False,
) -> Path:
    """Write a model's tensors in another order, and its other files.

    Args:
        base: The tensors.
        permutation: Of exactly this model.
        out: The directory to make.
        facts: How the order was chosen, for the sidecar; anything JSON can spell.
        check: Called with the finished directory before it gets its name; what it raises leaves nothing behind.
        overwrite: Replace an earlier directory of this project at `out`.

    Returns:
        `out`, absolute.

    Raises:
        UserError: If `out` can't be used or the result does not verify; nothing new is left behind then.
    """
    out = out.absolute()
    check_not_base(out, base.source)
    check_destination(out, base.nbytes, overwrite=overwrite)
    permuted = PermutedBase(base, permutation)
    with written_aside(out) as partial:
        partial.mkdir()
        for file_name in progress(sorted(set(base.files.values())), "writing weights"):
            permuted.write_weights(file_name, partial)
        permuted.write_companions(partial)
        write_sidecar(partial, _describe(permutation, facts))
        verify_permuted(partial, base).require("the permuted directory")
        check(partial)
    return out


def _describe(permutation: Permutation, facts: Mapping[str, object]) -> dict[str, Any]:
    base = permutation.base
    return heading(PERMUTED) | {
        "pattern": str(permutation.pattern),
        "base": {"spec": base.spec, "revision": base.revision, "dtype": base.dtype},
        "permutation_file": PERMUTATION_FILE,
        "command": command_line(),
        "permuting": plain(facts),
    }


class _PermutedDirectory(checks.Exported):
    form = (PERMUTED, 1)
    written = (PERMUTATION_FILE,)

    @cached_property
    def permutation(self) -> Permutation:
        """Raises UserError if the permutation file is missing or not intact."""
        return Permutation.load(self.directory)


def verify_permuted(directory: Path, base: ModelSource | BaseTensors | None = None) -> VerifyReport:
    """Check a permuted directory.

    Args:
        directory: Any directory.
        base: The model that was reordered; without it weights are only known by the files' hashes.

    Raises:
        UserError: If the base can't be read. Whatever is wrong inside the directory is reported, not raised.
    """
    return VerifyReport(directory, list(_checks(directory, base)))


def _checks(directory: Path, base: ModelSource | BaseTensors | None) -> Iterator[Check]:
    export = _PermutedDirectory(directory)
    yield run_check("sidecar", checks.sidecar, export)
    yield run_check("files", checks.files, export)
    yield run_check("checksums", checks.checksums, export)
    yield run_check("config", checks.config, export)
    yield run_check("permutation", _permutation, export)
    if base is None:
        return
    dtype = "auto"
    with suppress(UserError):  # the check of the permutation file reports it
        dtype = export.permutation.base.dtype
    tensors = open_base(base, dtype)
    yield run_check("copied files", checks.copied, export, tensors)
    yield run_check("same tensors", checks.same_tensors, export, tensors)
    yield run_check("base hashes", _base_hashes, export, tensors)
    yield run_check("channels", _channels, export, tensors)
    yield run_check("reordered tensors", _reordered, export, tensors)


def _permutation(export: _PermutedDirectory) -> str:
    """The permutation file is intact, and every order in it a permutation."""
    return f"{len(export.permutation.orders)} tensors, each reordered by a permutation"


def _base_hashes(export: _PermutedDirectory, base: BaseTensors) -> str:
    """The base model is the one that was permuted."""
    return checks.hashed(export.permutation.base.sha256, base)


def _channels(export: _PermutedDirectory, base: BaseTensors) -> str:
    """What makes channels and what reads them is reordered alike, heads within themselves."""
    orders = export.permutation.orders
    try:
        wanted = consistent_orders(base, export.permutation.pattern, orders)
    except (ValueError, RuntimeError) as error:
        raise checks.CheckFailedError(str(error)) from error
    wrong = sorted(orders.keys() ^ wanted.keys())
    checks.require_none(wrong, "reordered without what belongs to it, or left out")
    checks.require_none([n for n in orders if not orders[n].same(wanted[n])], "reordered in another way")
    return "the layers before and after every channel are reordered alike"


def _reordered(export: _PermutedDirectory, base: BaseTensors) -> str:
    """The tensors are the base model's in the recorded order, bit for bit."""
    tensors, permuted = export.tensors, PermutedBase(base, export.permutation)
    names = list(base.files)
    wrong = [n for n in progress(names, "comparing tensors") if not same(tensors[n], permuted[n])]
    checks.require_none(wrong, "differs from the reordered base model's")
    return (
        f"{len(names)} tensors are bit for bit the base model's, {len(export.permutation.orders)} reordered"
    )


FORMAT: Final = DirectoryFormat(verify_permuted)
