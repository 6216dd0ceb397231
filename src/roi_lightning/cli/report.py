"""`report RUN --out FILE.html`: one page that shows what a run did."""

import sys

from roi_lightning.cli.arguments import ReportOptions
from roi_lightning.reports.page import write_report


def main(options: ReportOptions) -> None:
    """Read what the run has left, and write its page.

    Raises:
        UserError: If there is nothing to report, a file is damaged, or the page can't be written.
    """
    write_report(options.run, options.out)
    sys.stdout.write(f"{options.out}\n")
