"""Class paths of earlier versions, as their runs' `config.yaml` and users' own files hold them."""

import re
import sys
from typing import Final

_MODULES: Final = {
    "roi_lightning.module": "roi_lightning.learning",
    "roi_lightning.proxsparse": "roi_lightning.learning",
    "roi_lightning.callbacks": "roi_lightning.learning.callbacks",
    "roi_lightning.schedules": "roi_lightning.samplers.schedules",
    "roi_lightning.samplers.topk": "roi_lightning.samplers",
    "roi_lightning.sharded_strategy": "roi_lightning.learning.fsdp",
}
_CLASSES: Final = {"ShardedStrategy": "FSDP2Strategy"}
_PATH: Final = re.compile(
    rf"\b({'|'.join(map(re.escape, _MODULES))})(?:\.[a-z_]+)?\.([A-Z]\w*)|\bShardedStrategy\b"
)


def with_current_paths(text: str) -> str:
    """A configuration's text, or an argument, with the class paths of today; each change is told on stderr."""
    return _PATH.sub(_current, text)


def _current(match: re.Match[str]) -> str:
    module, name = match.group(1), match.group(2) or match.group(0)
    name = _CLASSES.get(name, name)
    new = f"{_MODULES[module]}.{name}" if module else name
    sys.stderr.write(f"{match.group(0)} is {new} now\n")
    return new
