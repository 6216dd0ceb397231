"""The peak memory that `plan` predicts for a run, against the peak of the run's process.

    python benchmarks/plan_memory.py --json F.json -- --config quickstart.yaml --data.seq_len 256

What follows `--` goes to `plan` and, with few steps and no evaluation, to `fit` in a process of its own. On a
CPU peak resident memory counts, Python and libraries included; on a GPU the peak of what was allocated there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from roi_lightning.cli.plan import make_plan
from roi_lightning.utils.atomic_io import write_json

_STEPS: Final = 3
_CHILD: Final = """
import json, resource, sys
from pathlib import Path

import torch

from roi_lightning.__main__ import main


status = main(sys.argv[2:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
Path(sys.argv[1]).write_text(json.dumps({"processor": peak, "gpu": cuda}))
sys.exit(status)
"""


def measure(args: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run `fit` for a few steps and see what it held.

    Args:
        args: As given to `fit`.
        folder: For what it writes.
    """
    out = folder / "memory.json"
    words = [*args, "--trainer.max_steps", str(_STEPS), "--trainer.limit_val_batches", "0"]
    words += ["--trainer.callbacks", "null", "--trainer.enable_checkpointing", "false"]
    words += ["--trainer.default_root_dir", str(folder)]
    subprocess.run([sys.executable, "-c", _CHILD, str(out), "fit", *words], check=True)
    held: dict[str, Any] = json.loads(out.read_text())
    return held


def main() -> None:
    """Print the two side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("args", nargs="+", help="for plan and fit, after --")
    options = parser.parse_args()
    planned = make_plan(options.args)["bytes"]
    with tempfile.TemporaryDirectory() as folder:
        held = measure(options.args, Path(folder))
    part, place = ("process", "processor") if held["gpu"] is None else ("total", "gpu")
    result = {"args": options.args, "planned": planned, "held": held, "ratio": planned[part] / held[place]}
    print(json.dumps(result, indent=2))
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
