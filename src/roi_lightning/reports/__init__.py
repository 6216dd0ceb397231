"""What a run leaves for its report, and the page made of it; files and figures only, no Trainer."""

from roi_lightning.reports.run_files import RECORD
from roi_lightning.reports.run_record import Leg, RunRecord, append, read_record

__all__ = ["RECORD", "Leg", "RunRecord", "append", "read_record"]
