"""`evaluate MODEL …`: perplexities and zero-shot accuracy, side by side."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from roi_lightning.evaluation.settings import Settings
    from roi_lightning.evaluation.sheet import Sheet

# Written out, so that --help needs none of what the measuring needs.
_TASKS: Final = (
    "token_perplexity, token_perplexity_2048, word_perplexity, arc_challenge, arc_easy, boolq, hellaswag, "
    "piqa, race, sciq"
)


def build_parser() -> argparse.ArgumentParser:
    """The options of `evaluate`."""
    parser = argparse.ArgumentParser(
        prog="roi-lightning evaluate", description="Perplexities and zero-shot accuracy, side by side."
    )
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="hub id, directory, GGUF file, or mask file (with --base)")
    add("--tasks", default="token_perplexity", help=f"comma-separated, of {_TASKS}")
    add("--text", metavar="FILE", type=Path, help="for token perplexities (default: WikiText-2 from the hub)")
    add(
        "--task_data", metavar="DIR", type=Path, help="<task>.jsonl files, wikitext.jsonl for word_perplexity"
    )
    add(
        "--base",
        metavar="MODEL",
        help="what mask files apply to; if among the MODELs, what others are compared with",
    )
    add("--seq_len", metavar="N", type=int, default=1024, help="window of token_perplexity (default: 1024)")
    add("--limit", metavar="N", type=int, help="only the first N windows, documents, questions")
    add("--batch_size", metavar="N", type=int, default=8, help="sequences per forward pass (default: 8)")
    add(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights (default: as stored; bfloat16 for GGUF)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--json", metavar="OUT", type=Path, help="also write the results as JSON")
    add("--markdown", metavar="OUT", type=Path, help="also write the tables as Markdown")
    add("--trust_remote_code", action="store_true", help="let the models' own Python code run")
    return parser


def main(argv: Sequence[str]) -> int:
    """Check everything, measure, print the tables, and write what was asked for.

    Returns:
        0.

    Raises:
        UserError: For whatever can't be measured or written; nothing is written then.
    """
    args = build_parser().parse_args(argv)
    from roi_lightning.atomic import check_writable
    from roi_lightning.evaluation.report import caption, to_json, write
    from roi_lightning.evaluation.run import evaluate_models
    from roi_lightning.evaluation.sheet import make_sheets
    from roi_lightning.evaluation.subjects import dense_name, resolve_subjects

    settings = _settings(args)
    for out in filter(None, (args.json, args.markdown)):
        check_writable(out)
    subjects = resolve_subjects(args.models, args.base, args.trust_remote_code)
    dense = dense_name(subjects, args.base)
    results = evaluate_models(subjects, settings)
    updated = {subject.name: subject.updated for subject in subjects}
    sheets = make_sheets(results, settings.tasks, updated, dense)
    below = caption(settings, dense, subjects)
    _print(sheets, below)
    if args.json:
        write(args.json, to_json(results, settings, dense, subjects))
    if args.markdown:
        from roi_lightning.evaluation.markdown import to_markdown

        write(args.markdown, to_markdown(sheets, below))
    return 0


def _settings(args: argparse.Namespace) -> "Settings":
    from roi_lightning.devices import choose_device
    from roi_lightning.evaluation.settings import Settings
    from roi_lightning.evaluation.tasks import choose_tasks

    settings = Settings(
        tasks=choose_tasks(args.tasks),
        text=args.text,
        task_data=args.task_data,
        seq_len=args.seq_len,
        limit=args.limit,
        batch_size=args.batch_size,
        dtype=args.dtype,
        device=choose_device(args.device),
        trust_remote_code=args.trust_remote_code,
    )
    settings.check()
    return settings


def _print(sheets: Sequence["Sheet"], below: str) -> None:
    from rich.console import Console
    from rich.text import Text

    from roi_lightning.evaluation.terminal import print_sheet

    console = Console()
    for sheet in sheets:
        print_sheet(sheet, console)
    console.print(Text(below, "dim"))
