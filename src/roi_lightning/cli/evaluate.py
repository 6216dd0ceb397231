"""`evaluate LM …`: perplexities and tasks of lm-evaluation-harness, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from roi_lightning.cli.compared_models import ComparedModels
from roi_lightning.cli.options import parse_options
from roi_lightning.evaluation.models import dense_name, resolve_models
from roi_lightning.evaluation.report import as_json, caption
from roi_lightning.evaluation.results_table import make_tables
from roi_lightning.evaluation.run import evaluate_models
from roi_lightning.evaluation.tasks import EvalConfig
from roi_lightning.utils.atomic_io import write_json, written_aside
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import standard_output


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvalConfig, ComparedModels):
    """Perplexities, zero-shot accuracy and any task of lm-evaluation-harness, side by side.

    Attributes:
        base: The model that mask files apply to; if among the models, the one that others are compared with.
    """


def main(argv: Sequence[str]) -> int:
    """Check everything, measure, print the tables, and write what was asked for.

    Returns:
        0.

    Raises:
        UserError: For whatever can't be measured or written; nothing is written then.
    """
    options = parse_options(EvaluateOptions, "evaluate", argv)
    device, trusted = choose_device(options.device), options.trust_remote_code
    options.check_outputs()
    models = resolve_models(options.lm, options.base, trusted)
    dense = dense_name(models, options.base)
    evaluation = evaluate_models(models, options, lambda model: model.load(options.dtype, device, trusted))
    updated = {model.name: model.updated for model in models}
    tables = make_tables(evaluation.results, evaluation.tasks, updated, dense)
    below = caption(evaluation, options, dense, models)
    for table in tables:
        table.print()
    standard_output().print(Text(below, "dim"))
    if options.json:
        described = {"dtype": options.dtype, "device": str(device)}
        write_json(options.json, as_json(evaluation, options, dense, models, **described))
    if options.markdown:
        with written_aside(options.markdown) as partial:
            content = "\n".join([*(table.markdown() for table in tables), below, ""])
            partial.write_text(content, encoding="utf-8")
    return 0
