"""`evaluate LM …`: perplexities and tasks of lm-evaluation-harness, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from roi_lightning.cli.options import parse_options
from roi_lightning.evaluation.config import EvalConfig
from roi_lightning.evaluation.evaluated_models import dense_name, resolve_evaluated
from roi_lightning.evaluation.report import as_json, caption
from roi_lightning.evaluation.results_table import make_table
from roi_lightning.evaluation.run import evaluate_models
from roi_lightning.models.config import DType
from roi_lightning.utils.atomic_io import check_writable, write_json, written_aside
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import standard_output


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvalConfig):
    """Perplexities, zero-shot accuracy and any task of lm-evaluation-harness, side by side.

    Attributes:
        lm: Hub ids, directories (packed or not), folders of runs, GGUF files, or mask files (with --base).
        base: The model that mask files apply to; if among the models, the one that others are compared with.
        dtype: Of the weights: auto for the stored one, bfloat16 for GGUF.
        device: auto, cpu, cuda or cuda:N.
        json: Also write the results as JSON there.
        markdown: Also write them as Markdown there.
        trust_remote_code: Let the models' own Python code run.
    """

    lm: list[str] = field(kw_only=False)
    base: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    json: Path | None = None
    markdown: Path | None = None
    trust_remote_code: bool = False


def main(argv: Sequence[str]) -> int:
    """Check everything, measure, print the table, and write what was asked for.

    Returns:
        0.

    Raises:
        UserError: For whatever can't be measured or written; nothing is written then.
    """
    options = parse_options(EvaluateOptions, "evaluate", argv)
    device, trusted = choose_device(options.device), options.trust_remote_code
    for out in filter(None, (options.json, options.markdown)):
        check_writable(out)
    models = resolve_evaluated(options.lm, options.base, trusted)
    dense = dense_name(models, options.base)
    evaluation = evaluate_models(
        models, options, lambda model: model.load(options.dtype, device, trusted), dense
    )
    table, below = make_table(evaluation), caption(evaluation)
    if options.json:
        write_json(options.json, as_json(evaluation, device=str(device)))
    if options.markdown:
        with written_aside(options.markdown) as partial:
            partial.write_text(f"{table.markdown()}\n\n{below}\n", encoding="utf-8")
    table.print()
    standard_output().print(Text(below, "dim"))
    return 0
