"""End a real run again and again, at moments of every kind, and see that nothing is lost.

    python benchmarks/survive.py --signal KILL --times 20 --work runs/survive --json F.json

A run of the quickstart's model, shortened, is made once without interruption. The same run is then started in another
folder and ended by a signal while it steps, writes a checkpoint or validates, in turn, and at last while it exports,
each time at a random moment; `fit --resume auto` resumes it, and is ended again. After each, every file in the folder
is read; at the end the mask must be that of the uninterrupted run, to the byte. With TERM the run must also end with
status 143 and must have saved the very step it was in.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from roi_lightning.errors import UserError
from roi_lightning.export import verify_export
from roi_lightning.learning.resume import check_checkpoint
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.tables import print_table

PHASES = ("step", "checkpoint", "validation", "export")
_PHASE_FILE = "ROI_SURVIVE_PHASE"
_LONGER = 8


class Phase(Callback):
    """Writes what the run is doing, and its last complete step, where the watcher finds it."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that resumes at its last step has nothing to train, and no end of training is reported.
        if trainer.ckpt_path and step_of(Path(str(trainer.ckpt_path))) == trainer.max_steps:
            _tell("export", trainer.max_steps)

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        _tell("step", trainer.global_step)

    @override
    def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        _tell("checkpoint", trainer.global_step)

    @override
    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        _tell("validation", trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _tell("export", trainer.global_step)


def _tell(phase: str, step: int) -> None:
    path = Path(os.environ[_PHASE_FILE])
    partial = path.with_suffix(".partial")
    partial.write_text(f"{phase} {step}")
    partial.replace(path)


@dataclass(frozen=True)
class Ended:
    """One interruption.

    Attributes:
        phase: What the run was doing.
        step: Optimizer steps it had finished.
        status: Its exit status, negative for a signal.
        saved: The step of the newest checkpoint, 0 without any.
        seconds: From its start to its end.
    """

    phase: str
    step: int
    status: int
    saved: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run both, and compare.

    Returns:
        0 if nothing was lost.
    """
    args = build_parser().parse_args(argv)
    work: Path = args.work
    draws = random.Random(args.seed)
    reference = work / "whole"
    if not (reference / "mask.safetensors").is_file():
        wait(start(args, reference))
    ended: list[Ended] = []
    problems: list[str] = []
    folder = work / args.signal.lower()
    while len(ended) < args.times:
        at_work = len(ended) < args.times * 3 // 4
        phase = PHASES[len(ended) % 3] if at_work else "export"
        ended.append(interrupt(args, folder, phase, draws))
        problems += unreadable(folder) + lost(ended[-1], args.signal)
        print(f"{len(ended)}/{args.times} {ended[-1]}", flush=True)
    wait(start(args, folder))
    same = (folder / "mask.safetensors").read_bytes() == (reference / "mask.safetensors").read_bytes()
    problems += [] if same else ["the mask differs from the uninterrupted run's"]
    report(args, ended, problems)
    return 1 if problems else 0


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--signal", choices=("KILL", "TERM"), required=True)
    add("--times", type=int, default=20, help="interruptions")
    add("--work", type=Path, default=Path("runs/survive"), help="folder of the runs")
    add("--steps", type=int, default=160, help="optimizer steps of the run")
    add("--seed", type=int, default=0, help="of the moments")
    add(
        "--pause",
        type=float,
        default=1.0,
        help=f"longest time into a phase, in seconds; {_LONGER} times that for an export",
    )
    add("arguments", nargs="*", help="after --: more arguments of fit, for another model, say")
    add("--json", type=Path, help="where to write the results")
    return parser


def start(args: argparse.Namespace, folder: Path) -> "subprocess.Popen[bytes]":
    """Start or resume the run in a folder."""
    command = [sys.executable, "-m", "roi_lightning", *fit_command(args, folder)]
    environment = os.environ | {_PHASE_FILE: str(folder.absolute() / "phase")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def fit_command(args: argparse.Namespace, folder: Path) -> list[str]:
    """The command that starts or resumes the run in a folder; its configuration is written there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "survive.yaml"
    config.write_text(yaml.safe_dump(settings(args.steps, str(folder))))
    command = ["fit", "--config", "quickstart.yaml", "--config", str(config), "--resume", "auto"]
    return [*command, *args.arguments]


def settings(steps: int, folder: str) -> dict[str, Any]:
    """The quickstart with short steps, a checkpoint every five and a validation every six."""
    keeper = {"every_n_train_steps": 5, "save_top_k": 1, "save_last": "link", "filename": "{step}"}
    callbacks: list[dict[str, Any]] = [{"class_path": name} for name in ("HardenMasks", "SparseExport")]
    callbacks.append({"class_path": "benchmarks.survive.Phase"})
    callbacks.append({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": keeper})
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01, "fused": True}}
    return {
        "model": {"init_args": {"prior": "magnitude", "optimizer": optimizer}},
        "data": {"seq_len": 64, "batch_size": 1, "windows_per_step": 1, "val_windows": 8},
        "trainer": {
            "max_steps": steps,
            "validate_every_steps": 6,
            "default_root_dir": folder,
            "logger": False,
            "callbacks": callbacks,
        },
    }


def interrupt(args: argparse.Namespace, folder: Path, phase: str, draws: random.Random) -> Ended:
    """Resume the run, and end it in a phase, a random time after the run's first to third entry into it."""
    seen = folder / "phase"
    seen.unlink(missing_ok=True)
    started = time.monotonic()
    process = start(args, folder)
    entries, last = draws.randint(1, 3) if phase != "export" else 1, ""
    while process.poll() is None and entries:
        now = seen.read_text() if seen.exists() else ""
        if now != last:
            entries -= now.startswith(phase)
            last = now
        time.sleep(0.005)
    time.sleep(draws.uniform(0, args.pause * (_LONGER if phase == "export" else 1)))
    if process.poll() == 0 and phase == "export":  # too late; it exports again
        return interrupt(args, folder, phase, draws)
    if process.poll() is not None:
        raise SystemExit(f"the run ended before its interruption ({phase}); give more --steps")
    doing, step = seen.read_text().split()
    process.send_signal(getattr(signal, f"SIG{args.signal}"))
    status = process.wait()
    return Ended(doing, int(step), status, newest_step(folder), round(time.monotonic() - started, 1))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, by its name."""
    return max(map(step_of, folder.glob("checkpoints/step=*.ckpt")), default=0)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.stem.rpartition("=")[2])


def unreadable(folder: Path) -> list[str]:
    """Every incomplete file under a final name."""
    problems = []
    for path in sorted(folder.glob("checkpoints/[!.]*.ckpt")):
        try:
            if path.exists():  # a link may outlive its file
                check_checkpoint(str(path))
        except UserError as error:
            problems.append(str(error))
    try:
        if (folder / "mask.safetensors").exists():
            MaskSet.load(folder / "mask.safetensors")
        if (folder / "export").exists() and not verify_export(folder / "export").ok:
            problems.append("the export does not verify")
    except UserError as error:
        problems.append(str(error))
    return problems


def lost(ended: Ended, sent: str) -> list[str]:
    """What a run that could end by itself did not save."""
    if sent != "TERM" or ended.status == 0:
        return []
    problems = [] if ended.status in (143, -signal.SIGTERM) else [f"status {ended.status} after {ended}"]
    return problems if ended.saved >= ended.step else [*problems, f"steps lost: {ended}"]


def wait(process: "subprocess.Popen[bytes]") -> None:
    """Let a run come to its end."""
    if process.wait():
        raise SystemExit(f"a run failed with status {process.returncode}; see its log")


def report(args: argparse.Namespace, ended: Sequence[Ended], problems: Sequence[str]) -> None:
    """The table, and the JSON if asked for."""
    done = {phase: [str(each.step) for each in ended if each.phase == phase] for phase in PHASES}
    rows = [[phase, str(len(steps)), ", ".join(steps)] for phase, steps in done.items()]
    print_table(
        ["phase", "interruptions", "steps done"], rows, f"SIG{args.signal}, {len(ended)} times", left=3
    )
    print("\n".join(problems) or "no file unreadable, no difference in the mask")
    if args.json:
        facts = {"signal": args.signal, "ended": [asdict(each) for each in ended], "problems": list(problems)}
        write_json(args.json, facts)


if __name__ == "__main__":
    sys.exit(main())
