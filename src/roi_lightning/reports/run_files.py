"""Names of the files that a run writes into its folder and that reports read there."""

from typing import Final

CONFIG: Final = "config.yaml"
EXPORT: Final = "export"
MASK: Final = "mask.safetensors"
PAGE: Final = "report.html"
PRIOR: Final = "prior.safetensors"
RECORD: Final = "record.jsonl"
REPORT: Final = "report.json"
SUMMARY: Final = "summary.json"
