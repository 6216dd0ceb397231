"""`report PATH ... --out FILE.html`: one page about runs, masks and what was measured of them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roi_lightning.cli.options import parse_options
from roi_lightning.evaluation.continuations import read_prompts
from roi_lightning.reports.page import write_report


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one HTML page: what was done, perplexities, curves, the mask, figures, sample continuations.

    It needs no other file and no network. Several runs stand side by side.

    Attributes:
        path: Runs' folders, exported directories, folders of compare, JSON files of evaluate.
        out: The page to write. An earlier page is replaced.
        prompts: A file of texts to continue, one a line: by the dense model, the prior and the mask of every run.
        title: Its title (default: says what was done).
        overwrite: Replace a file there that is no report.
    """

    path: list[Path] = field(kw_only=False)
    out: Path
    prompts: Path | None = None
    title: str | None = None
    overwrite: bool = False


def main(argv: Sequence[str]) -> int:
    """Read, draw, write.

    Returns:
        0.

    Raises:
        UserError: For a path with nothing to report, a damaged file, or a page that can't be written.
    """
    options = parse_options(ReportOptions, "report", argv)
    prompts = read_prompts(options.prompts) if options.prompts else []
    write_report(options.path, options.out, title=options.title, prompts=prompts, overwrite=options.overwrite)
    sys.stdout.write(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB, needs no other file\n")
    return 0
