"""`report RUN --out FILE.html`: one page that shows what a run did."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roi_lightning.cli.options import parse_options
from roi_lightning.reports.page import write_report


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one HTML page of a run: perplexities, curves, the mask, continuations. It needs no other file.

    Attributes:
        run: The run's folder, such as runs/NAME.
        out: The page to write; an earlier page is replaced.
    """

    run: Path = field(kw_only=False)
    out: Path


def main(argv: Sequence[str]) -> int:
    """Read what the run has left, and write its page.

    Returns:
        0.

    Raises:
        UserError: If there is nothing to report, a file is damaged, or the page can't be written.
    """
    options = parse_options(ReportOptions, "report", argv)
    write_report(options.run, options.out)
    sys.stdout.write(f"{options.out}\n")
    return 0
